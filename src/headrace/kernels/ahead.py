"""Kernels built ahead of their first use, several at a time.

What lives here: the threads. What may not: what a rehearsal calls (each kernel's own file), which kernels there are (the registry).

Compiling is mostly machine code (LLVM, ptxas, the C compiler for launchers), which runs outside Python's lock; weights load meanwhile.
What is Python takes turns: the longest rehearsals go first, so that their machine code is under way while others take theirs, and there
are fewer threads than cores, so that not all take turns at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from headrace.errors import HeadraceError
from headrace.kernels import Kernels, Rehearsal
from headrace.kernels.candidate import Sizes

_log = logging.getLogger(__name__)
MAX_THREADS = 8
# Operations whose kernels take longest to compile (measured on an H200's host), longest first.
_LONGEST = ("paged_attention", "pick_tokens", "moe", "linear")

Prepared = TypeVar("Prepared")


class CompileAhead(Generic[Prepared]):
    """Threads that build kernels. ``prepare`` is begun at once: what every compilation needs and what needs no device.

    ``start`` queues the rehearsals of the call sites chosen since the last ``start``; ``finish`` waits for all of them. A rehearsal that
    meets another error than a kernel that does not build ends the start if ``strict``; else it is logged, and the first real call will
    say the same.
    """

    def __init__(self, prepare: Callable[[], Prepared], *, strict: bool, threads: int | None = None) -> None:
        self._strict = strict
        self._pool = ThreadPoolExecutor(threads or min(MAX_THREADS, os.cpu_count() or 1), "headrace-compile")
        self._first: Future[Prepared] = self._pool.submit(prepare)
        self._sites = 0  # call sites seen
        self._running: dict[str, Future[float]] = {}

    def start(self, kernels: Kernels, sizes: Sizes, prepare: Callable[[], object]) -> None:
        """``prepare`` runs before the first of these rehearsals, alone."""
        prepared = self._pool.submit(self._prepare, prepare)
        for each in sorted(kernels.rehearsals(sizes, since=self._sites), key=_turn):
            if each.name not in self._running:
                self._running[each.name] = self._pool.submit(self._rehearse, each, prepared)
        self._sites = len(kernels.choices)

    @property
    def prepared(self) -> Prepared:
        """What the first ``prepare`` returned."""
        return self._first.result()

    def finish(self) -> dict[str, float]:
        """Seconds each rehearsal took. Raises StrictKernelError or ConfigError where a kernel did not build and may not be replaced."""
        return {name: rehearsed.result() for name, rehearsed in self._running.items()}

    def close(self) -> None:
        """Drops what has not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)

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
            with torch.inference_mode():
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
