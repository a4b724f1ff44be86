"""Every test of this folder on the card, and one table of how they went.

    python tests/gpu/run.py [GROUP …] [--jobs N] [-- pytest arguments]

Groups are files (``engine`` is ``test_engine.py``); each runs in a process of its own, several at a time, so that kernels compile side by
side. Those of ALONE look at the memory of the whole device and run by themselves at the end. Ends with 0 only if all passed.

What lives here: starting pytest, reading its reports, the table. What may not: tests.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ALONE = ("memory", "meter", "storm", "start")  # they measure what the whole device holds
SECONDS_A_TEST = 240  # the first test of a group compiles


@dataclass(frozen=True, slots=True)
class Outcome:
    """One group's run. ``seconds`` are wall-clock, process start included."""

    group: str
    tests: int
    passed: int
    skipped: int
    seconds: float
    failures: tuple[str, ...]
    tail: str  # pytest's last lines, where something failed

    @property
    def good(self) -> bool:
        return self.tests > 0 and not self.failures and self.passed + self.skipped == self.tests


def groups() -> list[str]:
    return sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))


def run_group(group: str, extra: list[str]) -> Outcome:
    """pytest over one file, in a process of its own."""
    path = os.pathsep.join([*(str(ROOT / part) for part in ("src", "tests", ".")), *filter(None, [os.environ.get("PYTHONPATH")])])
    if os.environ.get("PYTHONPATH"):  # what the caller put first stays first: another copy of the sources, say
        path = os.pathsep.join([os.environ["PYTHONPATH"], path])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", str(HERE / f"test_{group}.py"), "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-o", f"timeout={SECONDS_A_TEST}", *extra]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        return read_report(group, report, seconds, done.stdout + done.stderr)


def read_report(group: str, report: Path, seconds: float, output: str) -> Outcome:
    """An unreadable report (the process died) is one failed test."""
    tail = "\n".join(output.splitlines()[-60:])
    if not report.exists():
        return Outcome(group, 1, 0, 0, seconds, ("the process died",), tail)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = tuple(str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(group, len(cases), len(cases) - len(failed) - skipped, skipped, seconds, failed, tail if failed or not cases else "")


def run_all(wanted: list[str], jobs: int, extra: list[str]) -> list[Outcome]:
    together = [group for group in wanted if group not in ALONE]
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        outcomes = list(pool.map(lambda group: run_group(group, extra), together))
    return outcomes + [run_group(group, extra) for group in wanted if group in ALONE]


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'group':<24}{'tests':>7}{'passed':>8}{'skipped':>9}{'seconds':>9}"]
    for each in outcomes:
        lines.append(f"{each.group:<24}{each.tests:>7}{each.passed:>8}{each.skipped:>9}{each.seconds:>9.1f}{'' if each.good else '  FAILED'}")
        lines += [f"    {name}" for name in each.failures]
    return "\n".join(lines)


def device_line() -> str | None:
    """What the tests ran on; None: there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {version}, python {python}; {time.strftime('%Y-%m-%d %H:%M')}"


def main() -> int:
    known = groups()
    own, _, extra = (list(part) for part in _split(sys.argv[1:]))
    parser = argparse.ArgumentParser(description="Runs the tests of tests/gpu and prints a table.", epilog="After --: arguments of pytest.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(known)}; all of them without one")
    parser.add_argument("--jobs", type=int, default=min(4, (os.cpu_count() or 1)), help="groups at a time (default %(default)s)")
    args = parser.parse_args(own)
    if unknown := set(args.groups) - set(known):
        parser.error(f"unknown groups {sorted(unknown)}; the known ones are {', '.join(known)}")
    if (device := device_line()) is None:
        print("There is no GPU here, so nothing was run.")
        return 2
    started = time.perf_counter()
    outcomes = run_all(args.groups or known, args.jobs, extra)
    for each in outcomes:
        if each.tail:
            print(f"--- {each.group}\n{each.tail}\n")
    print(table(outcomes))
    print(f"{sum(each.tests for each in outcomes)} tests in {time.perf_counter() - started:.0f} s on {device}")
    return 0 if all(each.good for each in outcomes) else 1


def _split(arguments: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Before and after ``--``."""
    if "--" not in arguments:
        return arguments, [], []
    at = arguments.index("--")
    return arguments[:at], ["--"], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
