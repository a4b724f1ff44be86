"""The waiting queue: a heap in the policy's order; what left it meanwhile (aborts) is skipped, not searched for.

    WaitingQueue   one heap
    LaneQueue      a heap a lane (a tenant …); which lane goes first is asked anew whenever the head is looked for

What lives here: the heaps. What may not: admission, what an order means (policies/).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from headrace.request import SequenceStatus
from headrace.sequence import Sequence

_COMPACT_ABOVE = 64
_Heap = list[tuple[tuple[float, ...], int, Sequence]]


class WaitingQueue:
    """Sequences in ascending ``order``. ``len`` counts those still waiting."""

    def __init__(self) -> None:
        self._heap: _Heap = []
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
        """What ``peek`` has just shown."""
        return heapq.heappop(self._heap)[2]

    def discard(self) -> None:
        """One waiting sequence has just been marked finished; its entry goes when it comes up, or when such are the majority."""
        self._gone += 1
        if self._gone > _COMPACT_ABOVE and self._gone * 2 > len(self._heap):
            self._heap = _waiting(self._heap)
            heapq.heapify(self._heap)
            self._gone = 0

    def reorder(self) -> None:
        """Their orders have changed. Equals stay in the order in which they came."""
        self._heap = [(sequence.order, pushed, sequence) for _, pushed, sequence in _waiting(self._heap)]
        heapq.heapify(self._heap)
        self._gone = 0

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """Those who would be admitted before this one as things stand, in no order."""
        return [each for each in self if each.order < sequence.order]


class LaneQueue(WaitingQueue):
    """``lane_of`` never changes for a sequence; ``rank`` of a lane may at any time: the head is the first of the lane of the least rank."""

    def __init__(self, lane_of: Callable[[Sequence], str], rank: Callable[[str], float]) -> None:
        super().__init__()
        self._lane_of, self._rank = lane_of, rank
        self._lanes: dict[str, _Heap] = {}
        self._size = 0
        self._first: str | None = None  # the head's lane, until something changes

    def __len__(self) -> int:
        return self._size - self._gone

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for heap in self._lanes.values() for entry in heap if entry[2].status is SequenceStatus.WAITING)

    def push(self, sequence: Sequence) -> None:
        self._pushed += 1
        heapq.heappush(self._lanes.setdefault(self._lane_of(sequence), []), (sequence.order, self._pushed, sequence))
        self._size += 1
        self._first = None

    def peek(self) -> Sequence | None:
        if self._first is None or self._lanes[self._first][0][2].status is not SequenceStatus.WAITING:
            self._first = self._find_first()
        return None if self._first is None else self._lanes[self._first][0][2]

    def _find_first(self) -> str | None:
        for lane in list(self._lanes):
            self._drop_ended(lane)
        return min(self._lanes, key=lambda lane: (self._rank(lane), self._lanes[lane][0][:2]), default=None)

    def _drop_ended(self, lane: str) -> None:
        heap = self._lanes[lane]
        while heap and heap[0][2].status is not SequenceStatus.WAITING:
            heapq.heappop(heap)
            self._gone -= 1
            self._size -= 1
        if not heap:
            del self._lanes[lane]

    def pop(self) -> Sequence:
        assert self._first is not None, "peek comes before pop"
        heap = self._lanes[self._first]
        sequence = heapq.heappop(heap)[2]
        if not heap:
            del self._lanes[self._first]
        self._size -= 1
        self._first = None
        return sequence

    def discard(self) -> None:
        self._gone += 1
        if self._gone > _COMPACT_ABOVE and self._gone * 2 > self._size:
            self.reorder()

    def reorder(self) -> None:
        lanes = {lane: [(sequence.order, pushed, sequence) for _, pushed, sequence in _waiting(heap)] for lane, heap in self._lanes.items()}
        self._lanes = {lane: heap for lane, heap in lanes.items() if heap}
        for heap in self._lanes.values():
            heapq.heapify(heap)
        self._size, self._gone, self._first = sum(map(len, self._lanes.values())), 0, None

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        lane = self._lane_of(sequence)
        own = self._rank(lane)
        before = {each for each in self._lanes if each != lane and (self._rank(each), each) < (own, lane)}
        return [each for each in self if (each.order < sequence.order if self._lane_of(each) == lane else self._lane_of(each) in before)]

    def lanes(self) -> Iterable[str]:
        """Those in which somebody may wait."""
        return self._lanes


def _waiting(heap: _Heap) -> _Heap:
    return [entry for entry in heap if entry[2].status is SequenceStatus.WAITING]
