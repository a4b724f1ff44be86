"""A few threads whose work is taken from one tenant after the other, so that whoever asks for much waits for itself.

What lives here: that order and its bound, for an event loop's callers (FairThreads) and for the engine's grammars, of
which it is known how long each takes (CompileQueue). What may not: the work.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, count
from typing import Any, Generic, TypeVar

from headrace.errors import Overloaded

QUICK_SECONDS = 0.02  # a grammar that takes longer waits for its like alone
_PATIENCE = 10.0  # so many times as long as it takes itself, a grammar lets shorter ones pass that came later

Result = TypeVar("Result")


class _Threads(Generic[Result]):
    """``threads`` side by side, started when they are needed."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        # whose turn it is stands first; of one tenant, who is due first
        self._waiting: dict[str, list[tuple[float, int, Callable[[], Result], Future[Result]]]] = {}
        self._numbers = count()

    def submit(self, work: Callable[[], Result], tenant: str, due: float = 0.0) -> Future[Result]:
        """The future may be cancelled before its turn. Raises RuntimeError where no thread starts."""
        future: Future[Result] = Future()
        with self._lock:
            heapq.heappush(self._waiting.setdefault(tenant, []), (due, next(self._numbers), work, future))
        try:
            self._pool.submit(self._run_next)
        except RuntimeError:
            future.cancel()
            raise
        return future

    def waiting(self, tenant: str) -> int:
        """How much of its work has neither begun nor been cancelled."""
        with self._lock:
            return sum(not future.cancelled() for *_, future in self._waiting.get(tenant, ()))

    def _run_next(self) -> None:
        """What has been cancelled has no turn."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                tenant, queue = next(iter(self._waiting.items()))
                *_, work, future = heapq.heappop(queue)
                del self._waiting[tenant]
                if queue:
                    self._waiting[tenant] = queue
            if future.set_running_or_notify_cancel():
                break
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def close(self, *, wait: bool) -> None:
        """What has not begun never begins. ``wait``: for what has."""
        with self._lock:
            left, self._waiting = self._waiting, {}
        for *_, future in chain.from_iterable(left.values()):
            future.cancel()
        self._pool.shutdown(wait=wait, cancel_futures=True)


class FairThreads:
    """For an event loop. ``most``: that may wait of one tenant."""

    def __init__(self, threads: int, name: str, *, most: int | None = None) -> None:
        self._threads = _Threads[Any](threads, name)
        self._most = most

    async def run(self, work: Callable[[], Result], tenant: str = "") -> Result:
        """``work()`` in a thread; dropped if the caller is cancelled before it began. Raises Overloaded, and
        MemoryError where no thread starts."""
        if self._most is not None and (waiting := self._threads.waiting(tenant)) >= self._most:
            raise Overloaded(
                f"{waiting} of your requests wait to be prepared, the most that may; try again in 1 s.", retry_after=1
            )
        try:
            future: Future[Result] = self._threads.submit(work, tenant)
        except RuntimeError as error:
            raise MemoryError("no thread can be started") from error
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Threads that work on are not waited for."""
        self._threads.close(wait=False)


class CompileQueue(Generic[Result]):
    """Two threads: long grammars apart from short ones, of each tenant the shortest first."""

    def __init__(self) -> None:
        self._quick = _Threads[Result](1, "headrace-grammar")
        self._long = _Threads[Result](1, "headrace-long-grammar")

    def submit(self, work: Callable[[], Result], seconds: float, tenant: str) -> Future[Result]:
        """``seconds``: that it is likely to take. The future may be cancelled before its turn."""
        threads = self._quick if seconds <= QUICK_SECONDS else self._long
        return threads.submit(work, tenant, time.monotonic() + _PATIENCE * seconds)

    def close(self) -> None:
        """Waits for what is under way; what is not never begins."""
        self._quick.close(wait=True)
        self._long.close(wait=True)
