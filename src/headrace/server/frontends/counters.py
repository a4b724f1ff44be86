"""The numbers of all front ends, in one block of memory that they share: each writes its own page, all may read every
page.

So counters are sums that are true at any moment, whoever is asked; what a front end that died has counted stays, and
the next one at its place counts on. A server with one front end keeps its page to itself.

What lives here: pages, their cells, places of the queue. What may not: what cells mean to /metrics (exposition.py),
processes.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence

from headrace.portability import shared_file

_INTS, _FLOATS = 960, 64
CELLS = 1024  # of tenants' places
_PAGE_BYTES = 8 * (_INTS + _FLOATS + CELLS)
_SHARE = 8  # a tenant holds at most so many times as many places as are left free
_NAMED = 5  # cells that have a name
STAMP_SECONDS = 0.5


class _Cell:
    """A number of a page that has a name; others are handed out behind these."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, page: Page, owner: object = None) -> int:
        return page.ints[self._place]

    def __set__(self, page: Page, value: int) -> None:
        page.ints[self._place] = value


class Page:
    """One front end's numbers: 64-bit integers and floats, zero at first."""

    live = _Cell(0)  # places of the queue that its requests hold
    connections = _Cell(1)
    turns = _Cell(2)  # grows while its event loop turns
    up = _Cell(3)  # somebody accepts connections here
    served = _Cell(4)  # somebody here has had the engine, this one or one that it replaced

    def __init__(self, memory: memoryview | None = None) -> None:
        whole = memoryview(bytearray(_PAGE_BYTES)) if memory is None else memory
        self.ints: memoryview[int] = whole[: 8 * _INTS].cast("q")
        self.floats: memoryview[float] = whole[8 * _INTS : 8 * (_INTS + _FLOATS)].cast("d")
        self.held: memoryview[int] = whole[8 * (_INTS + _FLOATS) :].cast("q")  # of ``live``, by tenant
        self._next_int, self._next_float = _NAMED, 0

    def take_ints(self, count: int) -> memoryview[int]:
        """The next cells: whoever takes them in the same order gets the same."""
        begin = self._next_int
        self._next_int += count
        assert self._next_int <= _INTS
        return self.ints[begin : self._next_int]

    def take_float(self) -> memoryview[float]:
        begin = self._next_float
        self._next_float += 1
        assert self._next_float <= _FLOATS
        return self.floats[begin : self._next_float]

    async def stamp(self) -> None:
        """For ever, from the event loop that is to be watched."""
        while True:
            self.turns += 1
            await asyncio.sleep(STAMP_SECONDS)

    def vacate(self) -> None:
        """Whoever wrote here is gone, and holds nothing any more. What it counted stays."""
        self.live = self.connections = 0
        self.held[:] = memoryview(bytes(8 * CELLS)).cast("q")
        self.up = False


class Counters:
    """``pages[number]``, one a front end. ``fd``: what another process opens it by, -1 where it is private."""

    def __init__(self, memory: memoryview, count: int, fd: int = -1) -> None:
        self.fd = fd
        self.pages: Sequence[Page] = [
            Page(memory[number * _PAGE_BYTES : (number + 1) * _PAGE_BYTES]) for number in range(count)
        ]

    @classmethod
    def private(cls) -> Counters:
        return cls(memoryview(bytearray(_PAGE_BYTES)), 1)

    @classmethod
    def create(cls, count: int) -> Counters:
        """To be inherited, by fork or by descriptor."""
        return cls.open(shared_file(count * _PAGE_BYTES), count)

    @classmethod
    def open(cls, fd: int, count: int) -> Counters:
        return cls(memoryview(mmap.mmap(fd, count * _PAGE_BYTES)), count, fd)

    @property
    def live(self) -> int:
        return sum(page.live for page in self.pages)

    def held_by(self, cell: int) -> int:
        return sum(page.held[cell] for page in self.pages)

    def try_hold(self, page: Page, count: int, limit: int, cell: int | None = None) -> bool:
        """Takes ``count`` places for ``page``. They are taken first and counted then: two at once may both be refused,
        never let in.

        ``cell``: of the tenant, where there are several. A tenant may hold _SHARE times as many places as it leaves
        free: alone nearly all, k that want more equal parts, and there is always something left for one that comes (the
        dynamic thresholds of shared switch buffers, Choudhury and Hahne 1998). Whoever has nothing gets a place as long
        as there is one.
        """
        self.give_back(page, -count, cell)
        free = limit - self.live
        if free >= 0 and (cell is None or (held := self.held_by(cell)) == 1 or held <= _SHARE * free):
            return True
        self.give_back(page, count, cell)
        return False

    def give_back(self, page: Page, count: int, cell: int | None = None) -> None:
        page.live -= count
        if cell is not None:
            page.held[cell] -= count


def most_places(limit: int, cell: int | None) -> int:
    """That one tenant can ever hold."""
    return limit if cell is None else max(1, limit * _SHARE // (_SHARE + 1))


class Watch:
    """Tells that an event loop does not turn: ``looks`` at its page in a row saw no change. (Looks, not seconds:
    whoever was stopped together with it has seen nothing.)"""

    def __init__(self, page: Page, looks: int) -> None:
        self._page = page
        self._limit = looks
        self._looks, self._seen = 0, page.turns

    def hung(self) -> bool:
        seen = self._page.turns
        self._looks = self._looks + 1 if seen == self._seen else 0
        self._seen = seen
        return self._looks >= self._limit
