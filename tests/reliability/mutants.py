"""Whether the checks can fail: each row's mutants of the product, planted one at a time into a copy of the tree, and the tests that must turn red.

    python -m tests.reliability.mutants [ROW …] [--list]

Copies the sources and tests into a temporary folder once, holds that a row's tests are green there, plants each of its mutants, runs
their tests again, and prints a table. The checkout is never touched. Ends with 0 only if every mutant was killed.

What lives here: planting and running. What may not: the mutants (mutants.diff).
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path

from tests.reliability.mutant_list import MUTANTS, Mutant
from tests.support.serving import ROOT

PRODUCT = Path("src", "headrace")
SECONDS = 600  # for the tests of one mutant
_SAID = 150  # characters of the reason that the table shows


class Verdict(Enum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    NOT_RUN = "NOT RUN"  # the tests are red without it, or could not be collected: this says nothing of the check


def table(mutants: Sequence[Mutant] = MUTANTS) -> str:
    """What is planted and what turns red, as Markdown."""
    lines = ["| row | planted into the product | file | turns red |", "|---|---|---|---|"]
    lines += [f"| {each.row} | {each.what} | {each.file} | {'<br>'.join(_short(test) for test in each.tests)} |" for each in mutants]
    return "\n".join(lines)


def _short(test: str) -> str:
    file, _, name = test.partition("::test_")
    return f"{file.removeprefix('tests/').removesuffix('.py').replace('/test_', '/')}: {name.replace('_', ' ')}"


def copy_tree(target: Path) -> None:
    """What the tests need. Nothing is linked: a mutant may not reach the checkout."""
    for name in ("src", "tests", "docs", "deploy"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    for name in ("pyproject.toml", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, target / name)


def plant(mutant: Mutant, tree: Path) -> str:
    """Returns the file's text as it was."""
    path = tree / PRODUCT / mutant.file
    text = path.read_text(encoding="utf-8")
    assert mutant.occurrences(text) == 1, f"row {mutant.row}, {mutant.what}: its text does not stand once in {mutant.file}"
    ast.parse(mutant.planted(text))  # else tests would turn red for nothing
    path.write_text(mutant.planted(text), encoding="utf-8")
    return text


def run_tests(tree: Path, tests: Iterable[str]) -> tuple[int, str]:
    """pytest's exit status, and the first failure's reason."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "300", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"no end within {SECONDS} s"
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))] or done.stdout.splitlines()[-1:]
    return done.returncode, said[0] if said else done.stderr[-_SAID:]


def judge(tree: Path, mutant: Mutant, green: dict[tuple[str, ...], tuple[int, str]]) -> tuple[Verdict, str]:
    if mutant.tests not in green:
        green[mutant.tests] = run_tests(tree, mutant.tests)
    status, said = green[mutant.tests]
    if status:
        return Verdict.NOT_RUN, f"red without it: {said}"
    before = plant(mutant, tree)
    try:
        status, said = run_tests(tree, mutant.tests)
    finally:
        (tree / PRODUCT / mutant.file).write_text(before, encoding="utf-8")
    verdict = {0: Verdict.SURVIVED, 1: Verdict.KILLED}.get(status, Verdict.NOT_RUN)
    return verdict, said.partition(" - ")[2] or said


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.mutants", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("rows", metavar="ROW", nargs="*", type=int, help="rows whose mutants are planted; all without any")
    parser.add_argument("--list", action="store_true", help="print the table of docs/reliability.md, plant nothing")
    args = parser.parse_args()
    chosen = [each for each in MUTANTS if not args.rows or each.row in args.rows]
    if args.list:
        print(table(chosen))
        return 0
    verdicts = []
    green: dict[tuple[str, ...], tuple[int, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for each in chosen:
            begun = time.monotonic()
            verdict, said = judge(Path(folder), each, green)
            verdicts.append(verdict)
            print(f"{each.row:>3}  {each.what:<60}{time.monotonic() - begun:>7.1f} s  {verdict.value:<9} {said[:_SAID]}", flush=True)
    print(f"{verdicts.count(Verdict.KILLED)} of {len(verdicts)} killed")
    return int(set(verdicts) != {Verdict.KILLED})


if __name__ == "__main__":
    sys.exit(main())
