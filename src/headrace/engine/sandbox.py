"""Processes for other people's programs (a template, a grammar): a worker module that answers frames and can be killed at any moment.

What lives here: starting, asking and ending such processes, and a pool of them. What may not: what they do, and their limits of time
and memory (they set those themselves, so that the kernel enforces them).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.engine.template_frames import encode_frame, read_frame

MAX_PROCESSES = 4
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")

Reply = dict[str, Any]


class Sandbox:
    """One process, without the environment's secrets; ``opening`` is its first frame, sent at once."""

    def __init__(self, module: str, opening: bytes) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        # sys.path is handed on because the parent may have found its packages by other means than the environment.
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([package_root, *(entry for entry in sys.path if entry)])
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        self._opened = False
        self._send(opening)

    def finish_start(self, check: Callable[[Reply | None], None]) -> None:
        """Waits for the reply to the opening, once; ``check`` raises when it is a refusal, and the process ends."""
        if self._opened:
            return
        self._opened = True
        try:
            check(self._receive())
        except BaseException:
            self.close()
            raise

    def request(self, frame: bytes) -> Reply | None:
        """The reply, or None when the process has ended: see ``ended_by``."""
        self._send(frame)
        return self._receive()

    def ended_by(self) -> int:
        """The signal that ended the process, once it gave no reply; 0: it ended by itself."""
        return max(0, -self._process.wait())

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead process shows in the reply
            self._process.stdin.write(frame)
            self._process.stdin.flush()

    def _receive(self) -> Reply | None:
        assert self._process.stdout is not None
        body = read_frame(self._process.stdout)  # type: ignore[arg-type]
        return None if body is None else json.loads(body)

    @property
    def alive(self) -> bool:
        return self._finalizer.alive

    def close(self) -> None:
        self._finalizer()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


class SandboxPool:
    """Up to MAX_PROCESSES alike, started when needed and kept: while one is busy others serve. Thread-safe."""

    def __init__(self, module: str, opening: Any, check: Callable[[Reply | None], None]) -> None:
        self._module = module
        self._opening = encode_frame(opening)
        self._check = check
        self._idle: list[Sandbox] = []
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_PROCESSES)

    def warm_up(self) -> None:
        """Starts a process without waiting for it, so that the first request need not."""
        with self._lock:
            if not self._idle:
                self._idle.append(Sandbox(self._module, self._opening))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for sandbox in idle:
            sandbox.close()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Sandbox]:
        """One of them for one caller; it goes back unless the caller closed it or raised."""
        with self._slots:
            with self._lock:
                sandbox = self._idle.pop() if self._idle else None
            sandbox = sandbox or Sandbox(self._module, self._opening)
            try:
                sandbox.finish_start(self._check)
                yield sandbox
            except BaseException:
                sandbox.close()
                raise
            if sandbox.alive:
                with self._lock:
                    self._idle.append(sandbox)
