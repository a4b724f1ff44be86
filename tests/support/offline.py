"""Programs beside this file that compile or rehearse kernels on a machine without a GPU, and what they print.

What lives here: running them, each in a process of its own (here, kernels may already be interpreted), two at a time.
What may not: judgement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def found(*runs: tuple[str, ...]) -> list[dict[str, Any]]:
    """``runs``: a program's name and its arguments. The JSON objects that they print, in their order."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(_run, runs))


def _run(words: tuple[str, ...]) -> dict[str, Any]:
    program, *arguments = words
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, str(HERE / f"{program}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed
