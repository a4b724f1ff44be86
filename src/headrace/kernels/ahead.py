"""Kernels built ahead of their first use, several at a time.

What lives here: the threads. What may not: what a rehearsal calls (each kernel's own file), which kernels there are (the registry).

Each thread waits for a process that compiles for it, where there are such (builders.py), or compiles itself; weights load meanwhile. The
longest rehearsals go first.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Generic, TypeVar

import torch

from headrace.errors import ConfigError, HeadraceError
from headrace.kernels import Kernels, Rehearsal
from headrace.kernels.candidate import Sizes

_log = logging.getLogger(__name__)
MAX_THREADS = 14
PATIENCE = 120.0  # seconds in which one kernel at least must get done; the slowest take a few
# Operations whose kernels take longest to compile (measured on an H200's host), longest first.
_LONGEST = ("paged_attention", "pick_tokens", "moe", "linear")

Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


class _Threads:
    """Daemon threads over one queue: a compiler that hangs keeps neither a start nor the end of the process waiting."""

    def __init__(self, count: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, name=f"headrace-compile-{index}", daemon=True) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        future: Future[Result] = Future()
        self._queue.put((future, lambda: call(*arguments)))
        return future

    def close(self, seconds: float) -> None:
        """Drops what has not begun; waits so long for what has."""
        with suppress(queue.Empty):  # asked beforehand it may be empty a moment later: the threads take from it, too
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)


class CompileAhead(Generic[Prepared]):
    """Threads that build kernels. ``prepare`` is begun at once: what every compilation needs and what needs no device.

    ``start`` queues the rehearsals of the call sites chosen since the last ``start``; ``finish`` waits for all of them. A rehearsal that
    meets another error than a kernel that does not build ends the start if ``strict``; else it is logged, and the first real call will
    say the same. Where for ``patience`` seconds none of them gets done, the compiler hangs, and that ends the start.
    """

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        *,
        strict: bool,
        threads: int | None = None,
        patience: float = PATIENCE,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Every rehearsal runs ``within`` its own of these."""
        self._strict = strict
        self._patience = patience
        self._within = within
        self._threads = _Threads(threads or min(MAX_THREADS, os.cpu_count() or 1))
        self._first: Future[Prepared] = self._threads.submit(prepare)
        self._sites = 0  # call sites seen
        self._running: dict[str, Future[float]] = {}
        self._hangs = False

    def start(self, kernels: Kernels, sizes: Sizes, prepare: Callable[[], object]) -> None:
        """``prepare`` runs before the first of these rehearsals, alone."""
        prepared = self._threads.submit(self._prepare, prepare)
        for each in sorted(kernels.rehearsals(sizes, since=self._sites), key=_turn):
            if each.name not in self._running:
                self._running[each.name] = self._threads.submit(self._rehearse, each, prepared)
        self._sites = len(kernels.choices)

    @property
    def prepared(self) -> Prepared:
        """What the first ``prepare`` returned."""
        return self._first.result()

    def finish(self, meanwhile: Callable[[], object] = lambda: None) -> dict[str, float]:
        """Seconds each rehearsal took. ``meanwhile`` is called once, when no more than one is still under way: while many are, they load code
        and launch, and the device has no quiet moment. Raises StrictKernelError or ConfigError where a kernel did not build and may not be
        replaced, ConfigError where the compiler hangs."""
        self._wait(leaving=1)
        meanwhile()
        self._wait(leaving=0)
        return {name: rehearsed.result() for name, rehearsed in self._running.items()}

    def close(self) -> None:
        """Drops what has not begun, and waits for what has, but for a compiler that hangs."""
        self._threads.close(0.0 if self._hangs else self._patience)

    # --- parts

    def _wait(self, leaving: int) -> None:
        """Until no more than so many rehearsals are under way."""
        pending = {each for each in self._running.values() if not each.done()}
        while len(pending) > leaving:
            done, pending = wait(pending, self._patience, FIRST_COMPLETED)
            if not done:
                self._hangs = True
                raise ConfigError(self._stuck(len(pending)))

    def _stuck(self, count: int) -> str:
        names = [name for name, rehearsed in self._running.items() if not rehearsed.done()]
        return (
            f"The kernels' compiler hangs: of {len(self._running)} kernels {count} are not built, and none got done in {self._patience:.0f} s "
            f"({', '.join(names[:3])}{', …' if count > 3 else ''}). Look at the machine's load and at the kernel cache's disk, or do without "
            "these kernels: --disabled-kernels triton."
        )

    def _prepare(self, prepare: Callable[[], object]) -> None:
        self._first.result()
        try:
            prepare()
        except Exception:  # what a kernel cannot be built for is said by its rehearsal, which then gives way
            if self._strict:
                raise
            _log.exception("kernels could not be made ready to be built in several threads; they are built all the same")

    def _rehearse(self, rehearsal: Rehearsal, prepared: Future[None]) -> float:
        prepared.result()
        begin = time.perf_counter()
        try:
            with torch.inference_mode(), self._within():
                rehearsal.run()
        except HeadraceError:
            raise
        except Exception:
            if self._strict:
                raise
            _log.exception("the rehearsal of %s failed; its first real call builds its kernel", rehearsal.name)
        return time.perf_counter() - begin


def _turn(rehearsal: Rehearsal) -> int:
    op = rehearsal.name.split()[0]
    return _LONGEST.index(op) if op in _LONGEST else len(_LONGEST)
