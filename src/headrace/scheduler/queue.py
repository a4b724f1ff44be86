"""The waiting queue: a heap in the policy's order; what left it meanwhile (aborts) is skipped, not searched for.

What lives here: the heap. What may not: admission.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headrace.request import SequenceStatus
from headrace.sequence import Sequence

_COMPACT_ABOVE = 64


class WaitingQueue:
    """Sequences in ascending ``order``. ``len`` counts those still waiting."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Sequence]] = []
        self._pushed = 0
        self._gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._gone

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in self._heap if entry[2].status is SequenceStatus.WAITING)

    def push(self, sequence: Sequence) -> None:
        self._pushed += 1  # breaks ties between equals, so that sequences are never compared
        heapq.heappush(self._heap, (sequence.order, self._pushed, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].status is not SequenceStatus.WAITING:
            heapq.heappop(self._heap)
            self._gone -= 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[2]

    def discard(self) -> None:
        """One waiting sequence has just been marked finished; its entry goes when it comes up, or when such are the majority."""
        self._gone += 1
        if self._gone > _COMPACT_ABOVE and self._gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)
            self._gone = 0
