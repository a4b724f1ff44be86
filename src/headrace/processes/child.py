"""A child process on an event loop: a module of this package, started by exec, with a socket to its parent as standard
input.

What lives here: starting one, what it inherits, the delays between restarts. What may not: what is said to it
(messages.py).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from signal import Signals
from socket import socket

import headrace

FIRST_WAIT, LONGEST_WAIT = 0.25, 2.0  # seconds before another life; it doubles while lives are short
SHORT_LIFE = 60.0  # seconds


def start(module: str, sock: socket, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """As ``spawn``, for who has no event loop. ``more``: for its environment."""
    return subprocess.Popen(
        (sys.executable, "-P", "-m", module),
        stdin=sock.fileno(),
        stdout=2,
        env={**environment(), **more},
        start_new_session=True,
    )


async def spawn(module: str, sock: socket, *inherited: int) -> asyncio.subprocess.Process:
    """Starts it in its own session: a Ctrl-C in the terminal is for the parent, which drains requests. Standard output
    is shared with the parent."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module),  # -P: the working directory is no place to import from
        stdin=sock.fileno(),
        stdout=2,
        env=environment(),
        start_new_session=True,
        pass_fds=inherited,
    )


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
