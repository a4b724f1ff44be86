"""Work that would keep the event loop from its streams, in threads: much work apart from little, so that neither waits for the other.

What lives here: two lanes. What may not: the work, whose turn it is (engine/lanes.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from headrace.engine.lanes import Lane
from headrace.engine.sandbox import MAX_PROCESSES

INLINE_BYTES = 4096  # up to here a thread costs more than it saves
_LARGE_BYTES = 256 * 1024

Result = TypeVar("Result")


class Threads:
    """A few threads; the rest of the machine's cores belong to the streams and the engine."""

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        self._small = Lane(max(MAX_PROCESSES, cores // 4), "headrace-small")  # mostly they wait for a template's process
        self._large = Lane(max(1, cores // 8), "headrace-large")

    async def run(self, size: int, work: Callable[[], Result], tenant: str = "") -> Result:
        """``work()`` on about ``size`` bytes, at once or in the lane for its size; dropped if the caller is cancelled before it began."""
        if size <= INLINE_BYTES:
            return work()
        return await (self._large if size > _LARGE_BYTES else self._small).run(work, tenant)

    def close(self) -> None:
        """Threads that work on are not waited for."""
        for lane in (self._small, self._large):
            lane.close()
