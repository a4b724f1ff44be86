"""A few threads whose work is taken from one tenant after the other, so that whoever asks for much waits for itself.

What lives here: that order, and its bound. What may not: the work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.errors import Overloaded

Result = TypeVar("Result")


class Lane:
    """``threads`` side by side. For one event loop; ``most``: that may wait of one tenant."""

    def __init__(self, threads: int, name: str, *, most: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._most = most
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn it is stands first

    async def run(self, work: Callable[[], Result], tenant: str = "") -> Result:
        """``work()`` in a thread; dropped if the caller is cancelled before it began. Raises Overloaded, and MemoryError where no thread starts."""
        if self._free:
            self._free -= 1
        else:
            await self._turn(tenant)
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        except RuntimeError as error:  # its place is the next one's
            self._call()
            raise MemoryError("no thread can be started") from error
        running.add_done_callback(self._go_on)
        return await asyncio.shield(running)  # a thread works on when its caller has left: its place is taken until it ends

    async def _turn(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if self._most is not None and len(queue) >= self._most:
            raise Overloaded(f"{len(queue)} of your requests wait to be prepared, the most that may; try again in 1 s.", retry_after=1)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:
                self._call()
            raise

    def _forget(self, tenant: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[tenant]

    def _go_on(self, ended: asyncio.Future[Result]) -> None:
        if not ended.cancelled():
            ended.exception()  # its caller may have left, and then nobody asks
        self._call()

    def _call(self) -> None:
        """The next tenant's oldest that has not just been cancelled."""
        while self._waiting:
            tenant, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            del self._waiting[tenant]
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                return turn.set_result(None)
        self._free += 1

    def close(self) -> None:
        """Threads that work on are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
