"""The start of a model: ``lab startup`` as a child process, its figures taken over.

What lives here: that call, and the table's start rows. What may not: what a start is made of (startup.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.startup import medians
from headrace.errors import BenchFailed
from lab.table_measure import Measured
from lab.table_rows import Row

READY = {
    "start": "empty caches: ready",
    "start-warm": "in one process: ready",
}  # absent where steps never became steady


def start_seconds(flags: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Every stage of each start by its name. Raises BenchFailed with the child's last line where no start came
    about."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start.json"
        command = [
            sys.executable,
            "-m",
            "lab",
            "startup",
            "--repeats",
            str(repeats),
            "--output-json",
            str(path),
            "--",
            *flags,
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not path.exists():
            raise BenchFailed(
                (done.stderr.strip().splitlines() or [f"lab startup ended with status {done.returncode}"])[-1]
            )
        seconds: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))["each"]
    return seconds


def measure_starts(rows: Sequence[Row], flags: Sequence[str], repeats: int) -> tuple[list[Measured], dict[str, float]]:
    """Seconds from the command to ready, of starts with empty caches and of those after them; and the median of every
    stage of both."""
    if not rows:
        return [], {}
    try:
        seconds = start_seconds(flags, repeats)
    except BenchFailed as error:
        return [Measured(row.name, row.unit, problem=error.message) for row in rows], {}
    return [_measured(row, seconds.get(READY[row.name], [])) for row in rows], medians(seconds)


def _measured(row: Row, ready: Sequence[float]) -> Measured:
    if not ready:
        return Measured(
            row.name, row.unit, problem="it started, but its steps never became steady; see python -m lab startup"
        )
    return Measured(row.name, row.unit, tuple(ready))
