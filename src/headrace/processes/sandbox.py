"""Processes for other people's programs (a template, a grammar, a moderation function): each answers lines of JSON and
can be killed at any moment. ASCII alone: it can carry values that msgpack cannot, such as lone surrogates and integers
of any size.

What lives here: starting, asking and ending such processes, a pool of them, and their own loop. What may not: what they
do, and their limits of memory and CPU time (they set those themselves, so that the kernel enforces them).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from headrace.portability import ignore_terminal
from headrace.processes.frames import MAX_FRAME, parent_socket

MAX_PROCESSES = 4
START_SECONDS = 60.0
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")

Reply = dict[str, Any]
Check = Callable[[Reply | None], None]


def json_line(value: Any) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"


def _read_line(stream: BinaryIO) -> bytes | None:
    """The next line; None at the stream's end, also within a line, and for one that is far too long."""
    line = stream.readline(MAX_FRAME)
    return line if line.endswith(b"\n") else None


def answer_lines(answer: Callable[[bytes], Reply]) -> None:
    """The whole life of such a process: line in, reply out, until the stream ends. Anything printed goes to stderr."""
    ignore_terminal()
    os.dup2(2, 1)
    with parent_socket() as sock, sock.makefile("rb") as asked:
        while (line := _read_line(asked)) is not None:
            sock.sendall(json_line(answer(line)))


class Sandbox:
    """One process; ``opening`` is its first line, sent immediately. Only a ``trusted`` one gets this process's
    environment and stderr."""

    def __init__(self, module: str, opening: bytes, *, trusted: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        flags, stderr, env = ((), None, None) if trusted else (("-S", "-P"), subprocess.DEVNULL, _bare_environment())
        command = [sys.executable, *flags, "-m", module]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=stderr, env=env
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket, self._replies)
        self._opened = False
        self._send(opening)

    def finish_start(self, check: Check) -> None:
        """Waits for the reply to the opening, once; ``check`` raises if it is a refusal or missing."""
        if not self._opened:
            self._opened, reply = True, None
            self._socket.settimeout(START_SECONDS)
            with contextlib.suppress(TimeoutError):
                reply = self._receive()
            check(reply)

    def request(self, line: bytes, seconds: float | None = None) -> Reply | None:
        """The reply, or None if the process has ended: see ``ended_by``. Raises TimeoutError; the process is then
        unusable."""
        self._socket.settimeout(seconds)
        self._send(line)
        return self._receive()

    def ended_by(self) -> int:
        """The signal that ended the process, once it gave no reply; 0: it exited by itself."""
        return -min(0, int(self._process.wait()))

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # a dead process shows in the reply
            self._socket.sendall(line)

    def _receive(self) -> Reply | None:
        with contextlib.suppress(ConnectionError):
            if (line := _read_line(self._replies)) is not None:
                reply: Reply = json.loads(line)
                return reply
        return None

    @property
    def alive(self) -> bool:
        return self._finalizer.alive

    def kill(self) -> None:
        """May be called from any thread; a pending request then sees the end."""
        self._process.kill()

    def close(self) -> None:
        self._finalizer()


def _bare_environment() -> dict[str, str]:
    """An environment without secrets. sys.path is passed on because the parent may have found its packages by other
    means."""
    package_root = str(Path(__file__).resolve().parents[2])
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**environment, "PYTHONPATH": os.pathsep.join([package_root, *(entry for entry in sys.path if entry)])}


def _end(process: subprocess.Popen[bytes], sock: socket.socket, replies: Any) -> None:
    process.kill()
    replies.close()
    sock.close()
    process.wait()


class SandboxPool:
    """Up to ``most`` equal processes, started when needed and kept; while one is busy, others serve. Thread-safe."""

    def __init__(
        self, module: str, opening: Any, check: Check, *, most: int = MAX_PROCESSES, trusted: bool = False
    ) -> None:
        self._create = partial(Sandbox, module, json_line(opening), trusted=trusted)
        self._check = check
        self._idle: list[Sandbox] = []
        self._busy: list[Sandbox] = []
        self._slots = threading.BoundedSemaphore(most)

    def warm_up(self) -> None:
        """Starts a process without waiting for it, so that the first request need not wait."""
        if not self._idle:
            self._idle.append(self._create())

    def check(self) -> None:
        """Raises what ``check`` does."""
        with self.borrowed():
            pass

    def close(self) -> None:
        """Ends all of them, including busy ones."""
        for sandbox in [*self._busy]:
            sandbox.kill()
        while self._idle:
            self._idle.pop().close()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[Sandbox]:
        """Lends a process to one caller; it is returned to the pool unless the caller closed it or raised."""
        with self._slots:
            try:
                sandbox = self._idle.pop()
            except IndexError:
                sandbox = self._create()
            self._busy.append(sandbox)
            try:
                sandbox.finish_start(self._check)
                yield sandbox
            except BaseException:
                sandbox.close()
                raise
            finally:
                self._busy.remove(sandbox)
            if sandbox.alive:
                self._idle.append(sandbox)
