"""The waiting queue: a heap in the policy's order; what left it meanwhile (aborts) is skipped, not searched for.

    WaitingQueue   one heap
    LaneQueue      a heap a lane (a tenant …), and one of lanes

What lives here: the heaps. What may not: admission, what an order means (policies/).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from headrace.request import SequenceStatus
from headrace.sequence import Sequence

_COMPACT_ABOVE = 64
_Heap = list[tuple[tuple[float, ...], int, Sequence]]
_Place = tuple[float, tuple[float, ...], int, str]  # rank, the head's order and number, lane


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

    def in_order(self, coming: Iterable[Sequence] = ()) -> list[Sequence]:
        """As they would be admitted as things stand, if these came, too."""
        return sorted([*self._sorted(), *coming], key=self._place_of)

    def _sorted(self) -> list[Sequence]:
        return [entry[2] for entry in sorted(_waiting(self._heap))]

    def _place_of(self, sequence: Sequence) -> tuple[float, ...]:
        return sequence.order

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """Those who would be admitted before this one as things stand, in no order."""
        return [each for each in self if each.order < sequence.order]


class LaneQueue(WaitingQueue):
    """``lane_of`` never changes for a sequence. ``rank`` of a lane may rise at any time, and the lane of the least rank goes first; so its place
    is looked up anew only when it comes up."""

    def __init__(self, lane_of: Callable[[Sequence], str], rank: Callable[[str], float]) -> None:
        super().__init__()
        self._lane_of, self._rank = lane_of, rank
        self._lanes: dict[str, _Heap] = {}
        self._places: list[_Place] = []  # each lane's is here, perhaps beside ones that it has no more
        self._size = 0

    def __len__(self) -> int:
        return self._size - self._gone

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for heap in self._lanes.values() for entry in heap if entry[2].status is SequenceStatus.WAITING)

    def push(self, sequence: Sequence) -> None:
        self._pushed += 1
        self._size += 1
        lane = self._lane_of(sequence)
        heap = self._lanes.setdefault(lane, [])
        heapq.heappush(heap, (sequence.order, self._pushed, sequence))
        if heap[0][2] is sequence:
            heapq.heappush(self._places, self._place(lane))
            if len(self._places) > _COMPACT_ABOVE + 2 * len(self._lanes):
                self._places = sorted(map(self._place, self._lanes))

    def peek(self) -> Sequence | None:
        while self._places:
            lane = self._places[0][-1]
            self._drop_ended(lane)
            if lane in self._lanes and self._place(lane) == self._places[0]:
                return self._lanes[lane][0][2]
            heapq.heappop(self._places)
            if lane in self._lanes:
                heapq.heappush(self._places, self._place(lane))
        return None

    def _place(self, lane: str) -> _Place:
        return (self._rank(lane), *self._lanes[lane][0][:2], lane)

    def _drop_ended(self, lane: str) -> None:
        heap = self._lanes.get(lane, [])
        while heap and heap[0][2].status is not SequenceStatus.WAITING:
            heapq.heappop(heap)
            self._gone -= 1
            self._size -= 1
        if not heap:
            self._lanes.pop(lane, None)

    def pop(self) -> Sequence:
        lane = heapq.heappop(self._places)[-1]
        sequence = heapq.heappop(self._lanes[lane])[2]
        self._size -= 1
        self._drop_ended(lane)
        if lane in self._lanes:
            heapq.heappush(self._places, self._place(lane))
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
        self._places = sorted(map(self._place, self._lanes))
        self._size, self._gone = sum(map(len, self._lanes.values())), 0

    def _sorted(self) -> list[Sequence]:
        return [entry[2] for heap in self._lanes.values() for entry in sorted(_waiting(heap))]

    def _place_of(self, sequence: Sequence) -> tuple[float, ...]:
        return (self._rank(self._lane_of(sequence)), *sequence.order)

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """Whole lanes that go first, and those before it in its own."""
        own = self._lane_of(sequence)
        first = {lane for lane in self._lanes if lane != own and self._rank(lane) < self._rank(own)}
        return [each for each in self if (each.order < sequence.order if self._lane_of(each) == own else self._lane_of(each) in first)]


def _waiting(heap: _Heap) -> _Heap:
    return [entry for entry in heap if entry[2].status is SequenceStatus.WAITING]
