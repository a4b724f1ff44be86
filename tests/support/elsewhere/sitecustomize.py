"""A system that is not Linux, as far as Python shows one. Every interpreter that starts with this folder on its path
loses what macOS does not have: Linux's own functions, /proc and /sys, limits on address space, uvloop.

What lives here: taking away. What may not: judging what is left (tests/engine/test_elsewhere.py).
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from typing import Any

GONE = (
    (
        os,
        (
            "sched_getaffinity",
            "sched_setaffinity",
            "memfd_create",
            "eventfd",
            "pidfd_open",
            "posix_fadvise",
            "posix_fallocate",
            "waitid",
        ),
    ),
    (signal, ("sigtimedwait", "sigwaitinfo")),
    (select, ("epoll",)),
    (resource, ("prlimit",)),
)
SYMBOLS = ("prctl", "malloc_trim")  # of the C library
FOLDERS = ("/proc", "/sys")


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(FOLDERS):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))
    if event == "ctypes.dlsym" and arguments[1] in SYMBOLS:
        raise AttributeError(f"symbol not found: {arguments[1]}")


def stat(path: Any, *more: Any, _stat: Any = os.stat, **named: Any) -> os.stat_result:
    refuse("open", (path,))
    return _stat(path, *more, **named)  # type: ignore[no-any-return]


def set_limit(kind: int, limits: tuple[int, int], _set: Any = resource.setrlimit) -> None:
    if kind == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")  # macOS's words
    _set(kind, limits)


for module, names in GONE:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
resource.setrlimit = set_limit  # type: ignore[assignment]
os.stat = stat  # type: ignore[assignment]
sys.modules["uvloop"] = None  # type: ignore[assignment]
sys.addaudithook(refuse)
if (
    "ELSEWHERE_PYTHON" in os.environ
):  # started by name, so that children without site-packages (-S) are taken there, too
    sys.executable = os.environ["ELSEWHERE_PYTHON"]
