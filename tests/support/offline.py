"""Programs beside this file that compile or warm up kernels on a machine without a GPU, and what they print.

What lives here: running them, each in a process of its own (here, kernels may already be interpreted), two at a time.
What may not: judgement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
POLITE = ("nice", "-n", "10")  # tests that run meanwhile come first

Run = tuple[str, ...]  # a program's name and its arguments


class Programs:
    """Each run once a session, from when it was first asked for."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._begun: dict[Run, Future[dict[str, Any]]] = {}
        self._children: list[subprocess.Popen[str]] = []

    def begin(self, runs: Iterable[Run]) -> list[Future[dict[str, Any]]]:
        for run in (runs := list(runs)):
            if run not in self._begun:
                self._begun[run] = self._pool.submit(self._printed, run)
        return [self._begun[run] for run in runs]

    def end(self) -> None:
        """What nobody waits for any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.kill()

    def _printed(self, run: Run) -> dict[str, Any]:
        program, *arguments = run
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [*POLITE, sys.executable, str(HERE / f"{program}.py"), *arguments]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        self._children.append(child)
        output, errors = child.communicate()
        assert child.returncode == 0, errors[-3000:]
        printed: dict[str, Any] = json.loads(output)
        return printed


PROGRAMS = Programs()


def found(*runs: Run) -> list[dict[str, Any]]:
    """The JSON objects that these print, in their order."""
    return [begun.result() for begun in PROGRAMS.begin(runs)]
