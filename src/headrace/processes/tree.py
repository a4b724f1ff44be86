"""Processes that belong together: a child that ends with its parent, a parent that outlives nobody's orphans. (Elsewhere than on Linux a
child looks once a second, and orphans are not adopted.)

What lives here: what the kernel is asked for. What may not: starting processes, deciding when they end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

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
