"""A child process: a module of this package, started by exec, with a socket to its parent as standard input.

What lives here: starting one, what it inherits, waiting for it on an event loop, the delays between restarts. What may
not: what is said to it (messages.py).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from socket import socket, socketpair

import headrace

SWITCH_SECONDS = 0.0005  # that a thread may keep the interpreter from others
FIRST_WAIT, LONGEST_WAIT = 0.25, 2.0  # seconds before another life; it doubles while lives are short
SHORT_LIFE = 60.0  # seconds


def share_interpreter() -> None:
    """A thread that asks for the interpreter again and again is not kept waiting for 5 ms each time by those that compute in it."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))


def start(
    module: str, sock: socket, more: Mapping[str, str], inherited: Sequence[int] = (), words: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """In its own session: a Ctrl-C in the terminal is for the parent, which drains requests. Standard output is shared
    with the parent. ``more``: for its environment; ``words``: its arguments."""
    return subprocess.Popen(
        (sys.executable, "-P", "-m", module, *words),  # -P: the working directory is no place to import from
        stdin=sock.fileno(),
        stdout=2,
        env={**environment(), **more},
        start_new_session=True,
        pass_fds=inherited,
    )


class Child:
    """A process that was started, for an event loop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        """Negative: the signal that ended it. None: it has not ended."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def watch() -> None:
            self._process.wait()
            with suppress(RuntimeError):  # it is not waited for any more, and the loop is closed
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=watch, name="headrace-child", daemon=True).start()
        await ended.wait()
        return self._process.wait()


@dataclass(frozen=True, slots=True)
class Begun:
    """A child that was started with two sockets: ``sock`` to its standard input, ``door`` to its descriptor
    ``their_door``."""

    child: Child
    sock: socket
    door: socket
    their_door: int

    def end(self) -> None:
        """Nothing is left of it."""
        self.child.end()
        self.sock.close()
        self.door.close()


def begin(module: str, *inherited: int, words: Sequence[str] = ()) -> Begun:
    (sock, theirs), (door, their_door) = socketpair(), socketpair()
    with theirs, their_door:
        process = start(module, theirs, {}, (their_door.fileno(), *inherited), words)
        return Begun(Child(process), sock, door, their_door.fileno())


def environment() -> dict[str, str]:
    """This process's environment, extended so that a package that is not installed is found where this process found
    it."""
    root = str(Path(headrace.__file__).resolve().parent.parent)
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


class RestartBackoff:
    """How long to wait before one process is started again: longer, the more short lives it has had in a row."""

    def __init__(self) -> None:
        self.short = 0
        self._began = time.monotonic()

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self, status: int) -> str:
        """How it ended, in words; ``status`` is negative for a signal."""
        seconds = time.monotonic() - self._began
        self.short = self.short + 1 if seconds < SHORT_LIFE else 1
        how = f"exit status {status}" if status >= 0 else f"signal {-status} ({Signals(-status).name})"
        return f"{how} after {seconds:.1f} s"

    @property
    def wait(self) -> float:
        return min(FIRST_WAIT * 2.0 ** min(self.short - 1, 9), LONGEST_WAIT)  # a day of short lives is no overflow
