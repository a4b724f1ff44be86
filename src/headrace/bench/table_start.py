"""The table's start row: ``bench startup`` as a child process, its figures taken over.

What lives here: that call. What may not: what a start is made of (startup.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.bench.table_measure import Measured
from headrace.bench.table_rows import Row

FIGURE = "serve: ready"


def measure_start(row: Row, flags: Sequence[str]) -> Measured:
    """Seconds from the command to ready; without a figure where no start came about."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "start.json"
        command = [sys.executable, "-m", "headrace", "bench", "startup", "--repeats", "1", "--output-json", str(path), "--", *flags]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode or not path.exists():
            said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            return Measured(row.name, row.unit, problem=said)
        seconds = json.loads(path.read_text(encoding="utf-8"))["seconds"]
    return Measured(row.name, row.unit, (seconds[FIGURE],))
