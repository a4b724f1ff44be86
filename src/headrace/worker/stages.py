"""How long each part of a start took.

What lives here: that clock. What may not: the parts (worker.py).
"""

from __future__ import annotations

from headrace.clock import Clock


class Stages:
    """Seconds by stage, in order. A stage is what happened since the one before was noted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.now()
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        now = self._clock.now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
