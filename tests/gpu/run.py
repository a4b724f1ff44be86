"""Every test of this folder on the card, and one table of how they went.

    python tests/gpu/run.py [GROUP …] [--jobs N] [--limit SECONDS] [-- pytest arguments]

Groups are files (``engine`` is ``test_engine.py``); each runs in a process of its own, several at a time, so that
kernels compile side by side. Those of ALONE measure the whole device, its memory or its speed, and run by themselves at
the end. Ends with 0 only if all passed.

What lives here: starting pytest, the record of what it did (this file is its plugin too), the table. What may not:
tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ALONE = ("memory", "meter", "prompt_graphs", "storm")  # they measure the whole device
SECONDS_A_TEST = 120  # the first test of a group compiles
SHOWN = 40  # lines of pytest's output, where something failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """One group's run. ``seconds`` are wall-clock, the start of the process included."""

    group: str
    seconds: float
    passed: int
    skipped: int
    failed: tuple[str, ...]
    unfinished: bool  # the process was stopped, or died
    slowest: tuple[float, str]
    output: str

    @property
    def good(self) -> bool:
        return not (self.failed or self.unfinished) and self.passed + self.skipped > 0

    @property
    def line(self) -> str:
        count = self.passed + self.skipped + len(self.failed)
        end = "" if self.good else "  FAILED" if self.failed else "  UNFINISHED"
        slow = f"{self.slowest[0]:.0f} s: {self.slowest[1]}"
        return f"{self.group:<20}{count:>6}{self.passed:>8}{self.skipped:>9}{self.seconds:>9.1f}   {slow:<60}{end}"


HEADER = f"{'group':<20}{'tests':>6}{'passed':>8}{'skipped':>9}{'seconds':>9}   slowest test"


# --- in the pytest process --------------------------------------------------------------------------------------------


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--record", help="file that gets a line of JSON for every test")


def pytest_configure(config: Any) -> None:
    if config.getoption("--record"):
        config.pluginmanager.register(Recorder(Path(config.getoption("--record"))), "recorder")


class Recorder:
    """Writes down each test as it ends, so that nothing is lost where the process is stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("::")[2]
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call" or not report.passed:
            self._write(name, report.outcome)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self._write(report.nodeid, report.outcome)

    def _write(self, name: str, outcome: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "outcome": outcome, "seconds": self._seconds.get(name, 0.0)}) + "\n")


# --- around it --------------------------------------------------------------------------------------------------------


def groups() -> list[str]:
    return sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))


def run_group(group: str, deadline: float, extra: Iterable[str]) -> Outcome:
    """pytest over one file, in a process of its own; stopped at ``deadline`` (time.monotonic)."""
    given = os.environ.get("PYTHONPATH")  # what the caller put first stays first: another copy of the sources, say
    path = os.pathsep.join([*([given] if given else []), *(str(ROOT / part) for part in ("src", "tests", "."))])
    # The caller's pytest options are the caller's: `cache_dir`, say, is unknown where there is no cache.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        record, output = Path(folder, "record"), Path(folder, "output")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.gpu.run",
            f"--record={record}",
            str(HERE / f"test_{group}.py"),
        ]
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", f"timeout={SECONDS_A_TEST}", *extra]
        started, code = time.monotonic(), None
        with output.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
            try:
                code = process.wait(max(0.0, deadline - started))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return read_record(group, record, time.monotonic() - started, code, output.read_text(errors="replace"))


def read_record(group: str, record: Path, seconds: float, code: int | None, output: str) -> Outcome:
    """``code``: pytest's, None if it was stopped; 0, 1 and 5 (nothing collected) are orderly ends."""
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []
    of = {
        outcome: [line["name"] for line in lines if line["outcome"] == outcome]
        for outcome in ("passed", "skipped", "failed")
    }
    slowest = max(((line["seconds"], line["name"]) for line in lines), default=(0.0, ""))
    failed = tuple(dict.fromkeys(of["failed"]))
    passed = len(set(of["passed"]) - set(failed))
    return Outcome(group, seconds, passed, len(of["skipped"]), failed, code not in (0, 1, 5), slowest, output)


def run_all(wanted: list[str], jobs: int, limit: float, extra: list[str]) -> Iterator[Outcome]:
    """Each group's outcome as soon as it is known."""
    deadline = time.monotonic() + limit
    with ThreadPoolExecutor(jobs) as pool:
        together = [pool.submit(run_group, group, deadline, extra) for group in wanted if group not in ALONE]
        for each in together:
            yield each.result()
    for group in wanted:
        if group in ALONE:
            yield run_group(group, deadline, extra)


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


def show(outcome: Outcome) -> None:
    print(outcome.line, flush=True)
    for name in outcome.failed:
        print(f"    {name}", flush=True)


def main() -> int:
    known, (own, extra) = groups(), _split(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description="Runs the tests of tests/gpu and prints a table.", epilog="After --: arguments of pytest."
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(known)}; all of them without one")
    parser.add_argument(
        "--jobs", type=int, default=min(10, os.cpu_count() or 1), help="groups at a time (default %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds after which everything is stopped (default %(default)s)"
    )
    args = parser.parse_args(own)
    if unknown := set(args.groups) - set(known):
        parser.error(f"unknown groups {sorted(unknown)}; the known ones are {', '.join(known)}")
    if (device := device_line()) is None:
        print("There is no GPU here, so nothing was run.")
        return 2
    started, outcomes = time.monotonic(), []
    print(HEADER)
    for outcome in run_all(args.groups or known, max(1, args.jobs), args.limit, extra):
        outcomes.append(outcome)
        show(outcome)
    for each in outcomes:
        if not each.good:
            print(f"\n--- {each.group}\n" + "\n".join(each.output.splitlines()[-SHOWN:]))
    count = sum(each.passed for each in outcomes)
    print(f"\n{count} tests passed in {time.monotonic() - started:.0f} s on {device}")
    return 0 if all(each.good for each in outcomes) else 1


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Before and after ``--``."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
