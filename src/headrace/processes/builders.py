"""Processes that compile kernels for this one, started while torch is imported.

A third of compiling is Python, the rest LLVM and ptxas. Threads of one process share the interpreter for that third,
and after the rest they wait for it again: a dozen threads on sixteen cores get little more done than four. Processes do
not wait for each other. They are forked from one that has imported everything and does nothing else, so each is ready
immediately.

What lives here: starting them, giving each one order at a time; the mark of a start that has built all it needs. What
may not: torch, what an order says (kernels/build/builder.py).
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from headrace.portability import open_cpus
from headrace.processes.child import environment as child_environment
from headrace.processes.frames import framed, read_frame

_log = logging.getLogger(__name__)
_KERNELS = Path(__file__).parent.parent / "kernels"
_PROGRAM = "headrace.processes.builder_program"
MOST = 14  # a core each; two are left to the start itself
FEWEST_CORES = 4  # with fewer the start's own threads serve as well
_ENDING = 1.0  # seconds for the process to end its own
PATIENCE = 60.0  # seconds for one order; the slowest take a few
DONE = b"done"


class Builders:
    """Optional helpers: an order that they cannot carry out is carried out by the process that needs it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.closed = False
        self._closing = threading.Lock()
        ours, theirs = zip(*(socket.socketpair() for _ in range(count)), strict=True)
        self._free: queue.SimpleQueue[tuple[socket.socket, BinaryIO] | None] = queue.SimpleQueue()
        self._ours: tuple[socket.socket, ...] = ours
        for each in ours:
            each.settimeout(PATIENCE)
            self._free.put((each, each.makefile("rb")))
        numbers = [each.fileno() for each in theirs]
        command = [sys.executable, "-P", "-m", _PROGRAM, *map(str, numbers)]
        environment, nothing = child_environment() | {"CUDA_VISIBLE_DEVICES": ""}, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            pass_fds=numbers,
            env=environment,
            start_new_session=True,
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
        )
        for each in theirs:
            each.close()

    def build(self, order: str) -> bool:
        """Whether one of them carried out the order. Waits for a free one and until it is done, except for one that
        hangs."""
        builder = self._free.get()
        if builder is None:  # closed
            self._free.put(None)
            return False
        sock, answers = builder
        try:
            sock.sendall(framed(order.encode()))
            done = read_frame(answers) == DONE
        except TimeoutError:
            sock.close()  # what it may still say is no answer to a later order
            done = False
        except (OSError, ValueError):  # gone, or closed
            done = False
        self._free.put(builder)
        return done

    def close(self) -> None:
        """Drops work in progress. A second caller waits for the first."""
        with self._closing:
            if not self.closed:
                self.closed = True
                self._end()

    def _end(self) -> None:
        self._free.put(None)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._process.pid, signal.SIGTERM)  # it ends those that it has forked, and waits for them
            deadline = time.monotonic() + _ENDING
            while (
                not os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                and time.monotonic() < deadline
            ):
                time.sleep(0.001)
            os.killpg(self._process.pid, signal.SIGKILL)  # what is left of them, should it have died or hang
        for each in self._ours:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._process.wait()


def mark_of(*facts: object) -> Path:
    """A file in Triton's cache that exists if a start with these facts, and the current kernels, has left everything it
    needed there.

    A wrong mark only costs a start without help, or unneeded helpers: whether a kernel is built is decided by Triton
    alone.
    """
    folder = (
        os.environ.get("TRITON_CACHE_DIR")
        or Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
    )
    sources = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(_KERNELS.glob("*/*.py"))]
    return Path(folder) / f"headrace-{sha256(repr((facts, sources)).encode()).hexdigest()[:24]}"


def begin_builders(mark: Path) -> Builders | None:
    """None if there is nothing for them to do, or there are too few cores."""
    cores = len(open_cpus())
    if cores < FEWEST_CORES or mark.exists():
        return None
    try:
        return Builders(min(MOST, cores - 2))
    except OSError as error:
        _log.debug("kernels are compiled in this process: %r", error)
        return None
