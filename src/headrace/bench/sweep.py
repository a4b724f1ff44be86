"""A series of measurements that can be interrupted: results so far are reported, and the exit status shows that they
are incomplete.

What lives here: taking points until Ctrl-C. What may not: measuring, showing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeVar

INTERRUPTED = 130  # the exit status after Ctrl-C, as shells have it

T = TypeVar("T")


class Sweep:
    """The series of one command. ``stopped``: Ctrl-C was pressed while points were taken; nothing more is measured
    after that."""

    def __init__(self) -> None:
        self.stopped = False
        self._done = 0

    def take(self, points: Iterable[T]) -> list[T]:
        """All points, or those finished before a Ctrl-C. Raises KeyboardInterrupt if there are none yet."""
        taken: list[T] = []
        if self.stopped:
            return taken
        try:
            for point in points:
                taken.append(point)
                self._done += 1
                if self.stopped:  # within the point: it is not whole, but something
                    break
        except KeyboardInterrupt:
            if not self._done:
                raise
            self.stop(f"{self._done} measurements were done")
        return taken

    def stop(self, how_far: str) -> None:
        self.stopped = True
        print(f"\nheadrace: interrupted when {how_far}; these are their results.", file=sys.stderr)

    def status(self, status: int = 0) -> int:
        return INTERRUPTED if self.stopped else status
