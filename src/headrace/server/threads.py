"""Work that would keep the event loop from its streams, in threads: much work apart from little, so that neither waits for the other.

What lives here: two pools. What may not: the work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_BYTES = 4096  # up to here a thread costs more than it saves
_LARGE_BYTES = 256 * 1024

Result = TypeVar("Result")


class Threads:
    """A few threads; the rest of the machine's cores belong to the streams and the engine."""

    def __init__(self) -> None:
        cores = os.cpu_count() or 1
        self._small = ThreadPoolExecutor(max(2, cores // 4), "headrace-small")
        self._large = ThreadPoolExecutor(max(1, cores // 8), "headrace-large")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """``work()`` on about ``size`` bytes, at once or in the pool for its size; dropped if the caller is cancelled before it began."""
        if size <= INLINE_BYTES:
            return work()
        pool = self._large if size > _LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Threads that work on are not waited for."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
