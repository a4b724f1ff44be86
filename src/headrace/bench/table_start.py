"""The start of a model: ``bench startup`` as a child process, its figures taken over.

What lives here: that call, and the table's start row. What may not: what a start is made of (startup.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.bench.load import BenchFailed
from headrace.bench.table_measure import Measured
from headrace.bench.table_rows import Row

FIGURES = ("empty caches: ready", "serve: ready")  # the first one there is: a start that stays unsteady has no time of the first kind


def start_seconds(flags: Sequence[str], repeats: int = 1) -> dict[str, float]:
    """Every stage by its name. Raises BenchFailed with the child's last line where no start came about."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start.json"
        command = [sys.executable, "-m", "headrace", "bench", "startup", "--repeats", str(repeats), "--output-json", str(path), "--", *flags]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not path.exists():
            raise BenchFailed((done.stderr.strip().splitlines() or [f"bench startup ended with status {done.returncode}"])[-1])
        seconds: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["seconds"]
    return seconds


def ready_seconds(seconds: Mapping[str, float]) -> float | None:
    """From the command to ready, of what there is; None: no step was steady."""
    return next((seconds[name] for name in FIGURES if name in seconds), None)


def measure_start(row: Row, flags: Sequence[str]) -> Measured:
    """Seconds from the command to ready."""
    try:
        ready = ready_seconds(start_seconds(flags))
    except BenchFailed as error:
        return Measured(row.name, row.unit, problem=error.message)
    if ready is None:
        return Measured(row.name, row.unit, problem="bench startup found no moment from which steps stay steady")
    return Measured(row.name, row.unit, (ready,))
