"""Processes that belong together: a child that ends with its parent, a parent that outlives nobody's orphans. (Elsewhere than on Linux a
child looks once a second, and orphans are not adopted.)

What lives here: what the kernel is asked for. What may not: starting processes, deciding when they end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # of prctl(2)
_LOOK_SECONDS = 1.0


def _prctl(option: int, value: int) -> bool:
    """False where there is no such call: elsewhere than on Linux."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except AttributeError:
        return False
    return True


def end_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when the thread that started it has ended, even if it is stopped then; or it ends itself soon after.

    ``parent``: that process's id, if it is known: should it be gone already, this one ends now.
    """
    expected = os.getppid() if parent is None else parent
    if not _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL):
        threading.Thread(target=_end_after, args=(expected,), name="headrace-parent", daemon=True).start()
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Whoever loses its parent below this process becomes its child, so that it can wait for all of them."""
    _prctl(_SET_SUBREAPER, 1)


def end_children(seconds: float) -> bool:
    """Waits for every child, those that are left after ``seconds`` are killed. False when some are there even then."""
    if _children_ended(seconds):
        return True
    for pid in children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return _children_ended(seconds)


def _children_ended(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        return False
    return True


def children() -> list[int]:
    """This process's own, also those that wait to be collected; none where there is no /proc."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []
    me = os.getpid()
    return [pid for pid in pids if _parent_of(pid) == me]


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
