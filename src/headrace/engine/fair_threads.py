"""A few threads whose work is taken from one tenant after the other, so that whoever asks for much waits for itself.

What lives here: that order and its bound, for an event loop's callers (FairThreads) and for the engine's grammars, of
which it is known how long each takes (CompileQueue). What may not: the work.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Generic, TypeVar

from headrace.errors import Overloaded

QUICK_SECONDS = 0.02  # a grammar that takes longer waits for its like alone
_PATIENCE = 10.0  # so many times as long as it takes itself, a grammar lets shorter ones pass that came later

Result = TypeVar("Result")


class FairThreads:
    """``threads`` side by side. For one event loop; ``most``: that may wait of one tenant."""

    def __init__(self, threads: int, name: str, *, most: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._most = most
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # whose turn it is stands first

    async def run(self, work: Callable[[], Result], tenant: str = "") -> Result:
        """``work()`` in a thread; dropped if the caller is cancelled before it began. Raises Overloaded, and
        MemoryError where no thread starts."""
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
        # a thread works on when its caller has left: its place is taken until it ends
        return await asyncio.shield(running)

    async def _turn(self, tenant: str) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if self._most is not None and len(queue) >= self._most:
            raise Overloaded(
                f"{len(queue)} of your requests wait to be prepared, the most that may; try again in 1 s.",
                retry_after=1,
            )
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


class CompileQueue(Generic[Result]):
    """Two threads, started when they are needed: long grammars apart from short ones, of each tenant the shortest
    first."""

    def __init__(self) -> None:
        self._quick = _Thread[Result]("headrace-grammar")
        self._long = _Thread[Result]("headrace-long-grammar")

    def submit(self, work: Callable[[], Result], seconds: float, tenant: str) -> Future[Result]:
        """``seconds``: that it is likely to take. The future may be cancelled before its turn."""
        return (self._quick if seconds <= QUICK_SECONDS else self._long).submit(work, seconds, tenant)

    def close(self) -> None:
        """Waits for what is under way; what is not never begins."""
        self._quick.close()
        self._long.close()


class _Thread(Generic[Result]):
    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        # whose turn it is stands first
        self._waiting: dict[str, list[tuple[float, int, Callable[[], Result], Future[Result]]]] = {}
        self._numbers = count()

    def submit(self, work: Callable[[], Result], seconds: float, tenant: str) -> Future[Result]:
        future: Future[Result] = Future()
        due = time.monotonic() + _PATIENCE * seconds
        with self._lock:
            heapq.heappush(self._waiting.setdefault(tenant, []), (due, next(self._numbers), work, future))
        self._pool.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            tenant, queue = next(iter(self._waiting.items()))
            *_, work, future = heapq.heappop(queue)
            del self._waiting[tenant]
            if queue:
                self._waiting[tenant] = queue
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
