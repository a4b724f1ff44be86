"""Ctrl-C between turns of the engine, never inside one.

What lives here: one context manager. What may not: deciding what an interrupt means.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """A first Ctrl-C inside is raised as KeyboardInterrupt on leaving, so that state is whole; a second one at once.

    Only where Python's own handler is in place, in the main thread: an application that handles SIGINT itself keeps doing so.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt
