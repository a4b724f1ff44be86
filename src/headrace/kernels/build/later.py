"""Kernels that only some later steps want, and which those can do without until they are there.

What lives here: what such a kernel's warm-up is, and how it says that it would have to compile. What may not: threads
(ahead.py), which steps do without what (worker/executor.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Missing(BaseException):
    """A kernel is in no cache, and here nothing is compiled. Nobody's failure, so that nobody takes it for one."""


class Ended(BaseException):
    """Whoever was to compile has ended, and nobody waits for the kernel any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """A warm-up that is one as any other when it is called."""

    call: Callable[[], object]
    find: Callable[[], object]  # the same with what a cache holds. Raises Missing
    # only compiles and loads: it takes none of the device's memory for data, and nothing of its time. Raises Ended
    build: Callable[[], object]

    def __call__(self) -> object:
        return self.call()
