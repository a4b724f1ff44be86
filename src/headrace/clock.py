"""Real and virtual time, in seconds. The engine asks a Clock and never the operating system.

What lives here: the two clocks. What may not: timers, threads, policy.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds from an arbitrary origin."""

    def now(self) -> float: ...

    def thread_seconds(self) -> float:
        """CPU seconds the calling thread has used."""
        ...

    def sleep_until(self, when: float) -> None: ...


class RealClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.perf_counter)
    thread_seconds = staticmethod(time.thread_time)

    def sleep_until(self, when: float) -> None:
        remaining = when - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)


class VirtualClock:
    """Time that passes only while a caller sleeps: simulations and tests run as fast as they compute."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def thread_seconds(self) -> float:
        """None are used: computing takes no virtual time."""
        return 0.0

    def sleep_until(self, when: float) -> None:
        self._now = max(self._now, when)
