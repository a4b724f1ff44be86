"""Whether the checks can fail: each row's mutants of the product, planted one at a time into a copy of the tree, and
the tests that must turn red.

    python -m tests.reliability.mutants [ROW …] [--check | --list | --record]

Copies the sources and tests into a temporary folder once, holds that a row's tests are green there, plants each of its
mutants, runs their tests again, and prints a table. The checkout's product is never touched. Ends with 0 only if every
mutant was killed.

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

from tests.reliability.mutant_list import MUTANTS, Mutant, Unplantable, record
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
    lines = ["| row | planted into the product | must turn red | last run |", "|---|---|---|---|"]
    lines += [
        f"| {each.row} | {each.what} | {'<br>'.join(_short(test) for test in each.tests)} | {each.verdict} |"
        for each in mutants
    ]
    return "\n".join(lines)


def sources(tree: Path) -> dict[str, str]:
    """The package's modules, by their place in it."""
    package = tree / PRODUCT
    return {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))
    }


def unplantable(mutants: Sequence[Mutant] = MUTANTS) -> list[str]:
    """What is wrong with those that cannot be planted as the product stands now, or that change nothing."""
    texts, wrong = sources(ROOT), []
    for each in mutants:
        try:
            file, planted = each.plant(texts)
            ast.parse(planted)  # else tests would turn red for nothing
            wrong += [f"row {each.row}, {each.what}: it changes nothing"] if planted == texts[file] else []
        except (Unplantable, SyntaxError) as error:
            wrong.append(str(error))
    return wrong


def _short(test: str) -> str:
    file, _, name = test.partition("::test_")
    return f"{file.removeprefix('tests/').removesuffix('.py').replace('/test_', '/')}: {name.replace('_', ' ')}"


def copy_tree(target: Path) -> None:
    """What the tests need. Nothing is linked: a mutant may not reach the checkout."""
    for name in ("src", "tests", "docs", "deploy"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    for name in ("pyproject.toml", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, target / name)


def run_tests(tree: Path, tests: Iterable[str]) -> tuple[int, str]:
    """pytest's exit status (that of no tests where all were skipped), and the first failure's reason."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "120", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end within {SECONDS} s"
    if done.returncode == 0 and " passed" not in done.stdout:
        return 5, "all were skipped"
    said = [
        line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ] or done.stdout.splitlines()[-1:]
    return done.returncode, said[0] if said else done.stderr[-_SAID:]


def judge(tree: Path, mutant: Mutant, green: dict[tuple[str, ...], tuple[int, str]]) -> tuple[Verdict, str]:
    if mutant.tests not in green:
        green[mutant.tests] = run_tests(tree, mutant.tests)
    status, said = green[mutant.tests]
    if status:
        return Verdict.NOT_RUN, f"red without it: {said}"
    texts = sources(tree)
    file, planted = mutant.plant(texts)
    (tree / PRODUCT / file).write_text(planted, encoding="utf-8")
    try:
        status, said = run_tests(tree, mutant.tests)
    finally:
        (tree / PRODUCT / file).write_text(texts[file], encoding="utf-8")
    verdict = {0: Verdict.SURVIVED, 1: Verdict.KILLED}.get(status, Verdict.NOT_RUN)
    return verdict, said.partition(" - ")[2] or said


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability.mutants", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument(
        "rows", metavar="ROW", nargs="*", type=int, help="rows whose mutants are planted; all without any"
    )
    parser.add_argument("--check", action="store_true", help="only say which can no longer be planted")
    parser.add_argument("--list", action="store_true", help="print the table of docs/reliability.md, plant nothing")
    parser.add_argument("--record", action="store_true", help="write each verdict and the day into mutants.diff")
    return parser


def main() -> int:
    args = create_parser().parse_args()
    chosen = [each for each in MUTANTS if not args.rows or each.row in args.rows]
    if args.list:
        print(table(chosen))
        return 0
    if args.check:
        print(*unplantable(chosen) or [f"{len(chosen)} mutants can be planted"], sep="\n")
        return int(bool(unplantable(chosen)))
    verdicts = []
    green: dict[tuple[str, ...], tuple[int, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for each in chosen:
            begun = time.monotonic()
            verdict, said = judge(Path(folder), each, green)
            verdicts.append(verdict)
            if args.record:
                record(each, f"{verdict.value} {time.strftime('%Y-%m-%d')}")
            print(
                f"{each.row:>3}  {each.what:<60}{time.monotonic() - begun:>7.1f} s  {verdict.value:<9} {said[:_SAID]}",
                flush=True,
            )
    print(f"{verdicts.count(Verdict.KILLED)} of {len(verdicts)} killed")
    return int(set(verdicts) != {Verdict.KILLED})


if __name__ == "__main__":
    sys.exit(main())
