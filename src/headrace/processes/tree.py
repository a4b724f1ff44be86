"""Process trees: children end with their parent, and a parent collects orphans below it. (On other systems than Linux,
a child checks once a second, and orphans are not adopted.)

What lives here: the system calls for that. What may not: starting processes, deciding when they end.
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
    """False if there is no such call: on other systems than Linux."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except AttributeError:
        return False
    return True


def end_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when the thread that started it has ended, even if it is stopped then; elsewhere it
    ends itself soon after.

    ``parent``: that process's id, if known: if it is gone already, this process ends now.
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
    """Processes below this one that lose their parent become its children, so that it can wait for all of them."""
    _prctl(_SET_SUBREAPER, 1)
