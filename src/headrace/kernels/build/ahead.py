"""Kernels built ahead of their first use, several at a time.

What lives here: the threads. What may not: what a warm-up calls (each kernel's own file), which kernels there are
(the registry).

Each thread waits for a process that compiles for it, where there are such (processes/builders.py), or compiles itself;
weights load meanwhile. The longest warm-ups go first. Where there are such processes, kernels that steps can do
without (later.py) are built when no other is waiting, and a start does not wait for them: it hands them over, with the
threads, to whoever runs the steps.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from headrace.errors import ConfigError, HeadraceError
from headrace.kernels import Kernels, WarmUp
from headrace.kernels.build.later import Later, Missing
from headrace.kernels.candidate import Sizes
from headrace.kernels.operations import TURNS

_log = logging.getLogger(__name__)
MAX_THREADS = 14
_LEAVE = 2.0  # seconds for a thread whose compiler was ended
_GLANCE = 0.02  # seconds after which one who waits for a thread looks whether he still should
_EXPECTED = 10.0  # seconds in which another process builds what takes longest
_LOOK = 0.1  # seconds between looks for that, each of which takes the interpreter some milliseconds
PATIENCE = 120.0  # seconds in which one kernel at least must get done; the slowest take a few
_FIRST = -1  # turns: what others wait for,
_OTHERS = TURNS + 1  # later by so much: what another process of this host builds first,
_LAST = 2 * _OTHERS + 1  # what nobody waits for,
_NEVER = _LAST + 1  # a thread's end

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


class _Threads:
    """Daemon threads over one queue: a compiler that hangs keeps neither a start nor the end of the process waiting."""

    def __init__(self, count: int) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, tuple[Future[Any], Callable[[], Any]] | None]] = (
            queue.PriorityQueue()
        )
        self._order = itertools.count()
        self._busy: dict[threading.Thread, Future[Any]] = {}
        self._threads = [
            threading.Thread(target=self._serve, name=f"headrace-compile-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any, turn: int = _FIRST) -> Future[Result]:
        """The lowest turn goes first; of equal ones, who came first."""
        future: Future[Result] = Future()
        self._queue.put((turn, next(self._order), (future, lambda: call(*arguments))))
        return future

    def end(self) -> None:
        """When there is nothing left to do."""
        for _ in self._threads:
            self._queue.put((_NEVER, next(self._order), None))

    def close(self, seconds: float, leaving: Collection[Future[Any]] = ()) -> None:
        """Drops what has not begun; waits so long for what has, but for ``leaving``."""
        with suppress(queue.Empty):  # asked beforehand it may be empty a moment later: the threads take from it, too
            while True:
                _, _, work = self._queue.get_nowait()
                if work is not None and work[0].cancel():
                    work[0].set_running_or_notify_cancel()  # else whoever waits for several at once does not hear of it
        self.end()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            while thread.is_alive() and self._busy.get(thread) not in leaving and time.monotonic() < deadline:
                thread.join(min(_GLANCE, seconds))

    def _serve(self) -> None:
        thread = threading.current_thread()
        while (work := self._queue.get()[2]) is not None:
            future, call = work
            self._busy[thread] = future
            try:
                future.set_result(call())
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)


class PendingKernels:
    """Kernels that are still to come when a start is over, and the threads that see to them. ``end`` is called once,
    when all of them have come, or nobody waits for them any more: with whether they are all there.
    """

    def __init__(self, coming: dict[str, Future[None]], threads: _Threads, end: Callable[[bool], object]) -> None:
        self._coming = coming
        self._threads = threads
        self._end = end
        self._ending = threading.Lock()
        self._ended = False
        self.there = False
        self.arrived: float | None = None  # ``time.time()`` when they were
        threads.end()
        for each in coming.values():
            each.add_done_callback(self._look)

    def wait(self, seconds: float) -> bool:
        """Whether they all came within that time."""
        wait(self._coming.values(), seconds)
        self._look()
        return self.there

    def close(self) -> None:
        """What has not come is dropped, and whoever compiles it ended."""
        self._threads.close(0.0)
        self._finish(there=False)
        self._threads.close(_LEAVE)

    def _look(self, _: object = None) -> None:
        if all(each.done() for each in self._coming.values()):
            self._finish(there=not any(each.cancelled() or each.exception() for each in self._coming.values()))

    def _finish(self, *, there: bool) -> None:
        with self._ending:
            if not self._ended:
                self._ended = True
                self._end(there)
                self.there, self.arrived = there, time.time() if there else None


class CompileAhead(Generic[Prepared]):
    """Threads that build kernels. ``prepare`` is begun at once: what every compilation needs and what needs no device.

    ``start`` queues the warm-ups of the call sites chosen since the last ``start``; ``finish`` waits for all of them.
    A warm-up that meets another error than a kernel that does not build ends the start if ``strict``; else it is
    logged, and the first real call will say the same. Where for ``patience`` seconds none of them gets done, the
    compiler hangs, and that ends the start.
    """

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        *,
        strict: bool,
        threads: int | None = None,
        patience: float = PATIENCE,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        later: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Every warm-up runs ``within`` its own of these. ``later``: what may come later does, unless it is found in
        a cache. ``share``: this process's among so many that build the same: each begins with a part of its own, and
        finds much of the others' in their cache when it comes to that."""
        self._strict = strict
        self._patience = patience
        self._within = within
        self._later = later
        self._share = share
        self._coming: dict[str, Future[None]] = {}  # what comes later
        self._handed_over = False
        self._threads = _Threads(threads or min(MAX_THREADS, os.cpu_count() or 1))
        self._first: Future[Prepared] = self._threads.submit(prepare)
        self._sites = 0  # call sites seen
        self._running: dict[str, Future[float]] = {}
        self._hangs = False

    def start(self, kernels: Kernels, sizes: Sizes, prepare: Callable[[], object]) -> None:
        """``prepare`` runs before the first of these warm-ups, alone."""
        prepared = self._threads.submit(self._prepare, prepare)
        own, others = self._share
        for at, each in enumerate(sorted(kernels.warm_ups(sizes, since=self._sites), key=attrgetter("turn"))):
            if each.name not in self._running:
                mine, long = at % others == own, isinstance(each.call, Later)
                warm_up = self._find if self._later and long else self._warm_up if mine or not long else self._expect
                turn = each.turn if mine else _LAST - 1 if long else each.turn + _OTHERS
                self._running[each.name] = self._threads.submit(warm_up, each, prepared, turn=turn)
        self._sites = len(kernels.choices)

    @property
    def prepared(self) -> Prepared:
        """What the first ``prepare`` returned."""
        return self._first.result()

    def finish(self, meanwhile: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Seconds each warm-up took. ``meanwhile`` is called once, when no more than one is still under way: while
        many are, they load code and launch, and the device has no quiet moment. Raises StrictKernelError or ConfigError
        where a kernel did not build and may not be replaced, ConfigError where the compiler hangs."""
        self._wait(leaving=1)
        meanwhile()
        self._wait(leaving=0)
        return {name: warmed_up.result() for name, warmed_up in self._running.items()}

    @property
    def coming(self) -> tuple[str, ...]:
        """What is not built when ``finish`` has returned."""
        return tuple(self._coming)

    def hand_over(self, end: Callable[[bool], object]) -> PendingKernels:
        """What is ``coming``, to somebody who closes it. ``end``: see there."""
        self._handed_over = True
        return PendingKernels(self._coming, self._threads, end)

    def close(self) -> None:
        """Drops what has not begun, and waits for what has, but for a compiler that hangs and for what comes later.
        Nothing that was handed over."""
        if not self._handed_over:
            self._threads.close(0.0 if self._hangs else self._patience, tuple(self._coming.values()))

    # --- parts

    def _wait(self, leaving: int) -> None:
        """Until no more than so many warm-ups are under way."""
        pending = {each for each in self._running.values() if not each.done()}
        while len(pending) > leaving:
            done, pending = wait(pending, self._patience, FIRST_COMPLETED)
            if not done:
                self._hangs = True
                raise ConfigError(self._stuck(len(pending)))

    def _stuck(self, count: int) -> str:
        names = [name for name, warmed_up in self._running.items() if not warmed_up.done()]
        return (
            f"The kernels' compiler hangs: of {len(self._running)} kernels {count} are not built, and none got done in {self._patience:.0f} s "
            f"({', '.join(names[:3])}{', …' if count > 3 else ''}). Look at the machine's load and at the kernel cache's disk, or do without "
            "these kernels: --disabled-kernels triton."
        )

    def _prepare(self, prepare: Callable[[], object]) -> None:
        self._first.result()
        try:
            prepare()
        except Exception:  # what a kernel cannot be built for is said by its warm-up, which then gives way
            if self._strict:
                raise
            _log.exception(
                "kernels could not be made ready to be built in several threads; they are built all the same"
            )

    def _find(self, warm_up: WarmUp, prepared: Future[None]) -> float:
        """A warm-up with what a cache holds; where that lacks the kernel, it comes later."""
        assert isinstance(warm_up.call, Later)
        try:
            return self._warm_up(replace(warm_up, call=warm_up.call.find), prepared)
        except Missing:
            self._coming[warm_up.name] = self._threads.submit(self._build, warm_up.name, warm_up.call, turn=_LAST)
            return 0.0

    def _expect(self, warm_up: WarmUp, prepared: Future[None]) -> float:
        """One that another process takes long to build; built here, too, where it does not come."""
        assert isinstance(warm_up.call, Later)
        found, end = replace(warm_up, call=warm_up.call.find), time.monotonic() + _EXPECTED
        while time.monotonic() < end:
            try:
                return self._warm_up(found, prepared)
            except Missing:
                time.sleep(_LOOK)
        return self._warm_up(warm_up, prepared)

    def _build(self, name: str, later: Later) -> None:
        """Steps do without what raises here, so this is all that is heard of it."""
        try:
            with torch.inference_mode(), self._within():
                later.build()
        except Exception:
            _log.exception(
                "%s: the kernel cannot be built; steps go on without it%s",
                name,
                " (--strict-kernels)" if self._strict else "",
            )
            raise

    def _warm_up(self, warm_up: WarmUp, prepared: Future[None]) -> float:
        prepared.result()
        begin = time.perf_counter()
        try:
            with torch.inference_mode(), self._within():
                warm_up.run()
        except HeadraceError:
            raise
        except Exception:
            if self._strict:
                raise
            _log.exception("the warm-up of %s failed; its first real call builds its kernel", warm_up.name)
        return time.perf_counter() - begin
