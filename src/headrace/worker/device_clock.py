"""A CUDA stream's own time: how long each step was, how long the device had nothing to do before it.

What lives here: waiting for a step's end and reading its events. What may not: what a step does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol


class Event(Protocol):
    """A CUDA event that was made with timing."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float: ...  # ms


@dataclass(frozen=True, slots=True)
class StepSeconds:
    device: float  # from the step's first event to its last, without its pause
    idle: float  # from the last event of the step before to this one's first (0 for the first step), and its pause
    lent: float  # CPU seconds this thread spun until the step was done


class DeviceClock:
    """Steps of one stream, in order."""

    def __init__(self) -> None:
        self._last: Event | None = None

    def wait(self, begun: Event, arrived: Event, pause: tuple[Event, Event] | None = None) -> StepSeconds:
        """Returns when ``arrived`` has happened. Waiting spins, and that is no work of the host's. ``pause``: between these two events
        the step had nothing to do, because something it needed was not there."""
        before = time.thread_time()
        arrived.synchronize()
        lent = time.thread_time() - before
        idle = self._last.elapsed_time(begun) / 1e3 if self._last is not None else 0.0
        self._last = arrived
        paused = max(0.0, pause[0].elapsed_time(pause[1]) / 1e3) if pause is not None else 0.0
        return StepSeconds(begun.elapsed_time(arrived) / 1e3 - paused, max(0.0, idle) + paused, lent)
