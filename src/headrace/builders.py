"""Processes that compile kernels beside a start, so that the interpreter's lock of one does not hold up the other.

They are begun before torch is imported, import it themselves meanwhile, and are told what to build once a start knows it. What they build
lies in the compiler's cache; whoever asks for it then finds it there. They are help: what they do not build is built by who needs it.

What lives here: starting, telling and ending them. What may not: torch, what they do (worker/kernel_builder.py), who waits (kernels/ahead.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_MODULE = "headrace.worker.kernel_builder"
_CORES_EACH, _MOST = 4, 4
_FULL = 64  # entries of a cache that holds a model's kernels


@dataclass(frozen=True, slots=True)
class Job:
    """What a start is going to launch: the model, sizes in tokens, how kernels are chosen, what the card is."""

    config: Mapping[str, Any]  # of the model
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    disabled: tuple[str, ...]
    batch_invariant: bool
    programmatic: bool
    sites: tuple[tuple[str, str], ...]  # outside of the decoder: operation, element type
    card: str
    capability: tuple[int, int]
    processors: int

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "config": dict(self.config)}


def builders_wanted() -> int:
    """How many: none where the compiler's cache holds kernels already, or where cores are few."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    with contextlib.suppress(OSError):
        if sum(1 for _ in folder.iterdir()) >= _FULL:
            return 0
    return min(_MOST, (os.cpu_count() or 1) // _CORES_EACH)


class Builders:
    """``count`` of them; each builds its share of what it is told, and names each kernel when it is done with it."""

    def __init__(self, count: int, module: str = _MODULE) -> None:
        # sys.path is handed on because this process may have found its packages by other means than the environment.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(index), str(count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                text=True,
            )
            for index in range(count)
        ]
        self._left = count
        self._lock = threading.Lock()

    def tell(self, job: Job, done: Callable[[str], None], ended: Callable[[], None]) -> None:
        """Once. ``done`` is called with the name of each kernel, ``ended`` when no more will come, both from other threads."""
        for process in self._processes:
            threading.Thread(target=self._follow, args=(process, done, ended), name="headrace-builders", daemon=True).start()
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # one that has ended shows in its output
                process.stdin.write(json.dumps(job.as_dict()) + "\n")
                process.stdin.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _follow(self, process: subprocess.Popen[str], done: Callable[[str], None], ended: Callable[[], None]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed while it was read
            for line in process.stdout:
                done(json.loads(line))
        if process.wait() > 0:  # below 0: killed, by us
            _log.debug("a process that builds kernels ended with status %d", process.returncode)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            ended()
