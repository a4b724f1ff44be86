"""What torch's caching allocator does with the requests of steps, and what a plan of their lifetimes takes in its
place.

What lives here: traces of two lengths and those between, a model of that allocator. What may not: torch, recording
(arena.py), planning.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.worker.arena import ALIGNED, Use, plan, rounded

SMALL, SMALL_SEGMENT, LARGE_SEGMENT, ROUNDED = 2**20, 2 * 2**20, 20 * 2**20, 2 * 2**20
ALMOST_LARGE = 10 * 2**20


def between(shorter: Sequence[Use], longer: Sequence[Use], tokens: tuple[int, int], wanted: int) -> list[Use]:
    """The trace of ``wanted`` tokens from those of ``tokens``: sizes are linear in tokens. The two must be of one
    order."""
    if [(use.first, use.last) for use in shorter] != [(use.first, use.last) for use in longer]:
        raise ValueError(
            f"{len(shorter)} and {len(longer)} tensors, or other lifetimes: steps of {tokens} tokens are not of one kind"
        )
    share = (wanted - tokens[0]) / (tokens[1] - tokens[0])
    return [
        Use(max(0, round(a.size + (b.size - a.size) * share)), a.first, a.last)
        for a, b in zip(shorter, longer, strict=True)
    ]


class CachingAllocator:
    """torch's, as far as sizes go: small and large segments, best fit, blocks split and joined, nothing given back.

    ``reserved``: bytes taken from the driver so far, in ``taken`` requests; ``requests``: of tensors.
    """

    def __init__(self) -> None:
        self.reserved = self.taken = self.requests = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # (size, segment, offset)
        self._at: dict[tuple[int, int], int] = {}  # free blocks by place → size
        self._ends: dict[tuple[int, int], int] = {}  # free blocks by end → size

    def allocate(self, size: int) -> tuple[bool, int, int, int]:
        """A block: (small, segment, offset, size)."""
        self.requests += 1
        size, small = max(rounded(size), ALIGNED), size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, 0, 0))
        if at == len(free):
            self._segment(size, small)
            at = bisect_left(free, (size, 0, 0))
        whole, segment, offset = free[at]
        self._take(small, whole, segment, offset)
        rest = whole - size
        if rest >= ALIGNED if small else rest > SMALL:
            self._put(small, rest, segment, offset + size)
            return small, segment, offset, size
        return small, segment, offset, whole

    def free(self, block: tuple[bool, int, int, int]) -> None:
        small, segment, offset, size = block
        if (before := self._ends.get((segment, offset))) is not None:
            self._take(small, before, segment, offset - before)
            offset, size = offset - before, size + before
        if (after := self._at.get((segment, offset + size))) is not None:
            self._take(small, after, segment, offset + size)
            size += after
        self._put(small, size, segment, offset)

    def _segment(self, size: int, small: bool) -> None:
        """A small one; one for several of up to 10 MiB; else one for itself."""
        whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < ALMOST_LARGE else -(-size // ROUNDED) * ROUNDED
        self.reserved += whole
        self.taken += 1
        self._put(small, whole, self.taken, 0)

    def _put(self, small: bool, size: int, segment: int, offset: int) -> None:
        insort(self._free[small], (size, segment, offset))
        self._at[segment, offset] = self._ends[segment, offset + size] = size

    def _take(self, small: bool, size: int, segment: int, offset: int) -> None:
        free = self._free[small]
        del free[bisect_left(free, (size, segment, offset))]
        del self._at[segment, offset], self._ends[segment, offset + size]


def replay(allocator: CachingAllocator, uses: Sequence[Use]) -> None:
    """One step's requests in their order."""
    events = sorted(
        [(use.first, 1, index) for index, use in enumerate(uses)]
        + [(use.last, 0, index) for index, use in enumerate(uses)]
    )
    blocks = {}
    for _, begins, index in events:
        if begins:
            blocks[index] = allocator.allocate(uses[index].size)
        else:
            allocator.free(blocks.pop(index))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Over a run of steps of changing lengths; bytes, and counts of the whole run."""

    alive: int  # most at once
    planned: int  # the largest plan's buffer
    cached: int  # what a caching allocator came to hold
    tensors: int  # requested, of the allocator; none are with a plan
    segments: int  # taken from the driver by the allocator; a plan takes one


def compare(traces: Iterable[Sequence[Use]]) -> Comparison:
    allocator, alive, planned = CachingAllocator(), 0, 0
    for uses in traces:
        replay(allocator, uses)
        alive, planned = max(alive, most_alive(uses)), max(planned, plan(uses).size)
    return Comparison(alive, planned, allocator.reserved, allocator.requests, allocator.taken)


def most_alive(uses: Sequence[Use]) -> int:
    """Bytes alive at once: no plan is smaller."""
    changes = sorted(
        [(use.first, 1, rounded(use.size)) for use in uses] + [(use.last, 0, -rounded(use.size)) for use in uses]
    )
    alive = most = 0
    for _, _, change in changes:
        alive += change
        most = max(most, alive)
    return most
