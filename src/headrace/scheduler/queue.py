"""The waiting queue: a heap a lane (a tenant …) in the policy's order, and one of lanes; what left it meanwhile
(aborts) is skipped, not searched for.

And the order of requests that are all there at once:

Longest answers first: the order of requests that are all there at once and that nobody reads along, where all lengths
are known.

A batch ends with its last answer. One that is long and begins late keeps a device waiting that computes nothing else;
so those that take longest begin first, and the short ones fill what is left (list scheduling by longest processing
time: Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969).

Known means that nothing but ``max_tokens`` ends an answer. Where answers end by themselves, that says too little of
their lengths: in simulations of answers that end anywhere before it, this order took 2 to 4 % longer than the given
one, for it brings prompts one by one into many steps.

Where not everything fits into the cache, requests that begin alike stay together: a prefix whose blocks have gone is
computed again.

What lives here: the heaps, that order. What may not: admission, what an order means (policies/).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

from headrace.request import Request, SequenceStatus
from headrace.sampling_params import SamplingParams
from headrace.sequence import Sequence

_COMPACT_ABOVE = 64
_Heap = list[tuple[tuple[float, ...], int, Sequence]]
_Place = tuple[float, tuple[float, ...], int, str]  # rank, the head's order and number, lane


def _lane_of_all(sequence: Sequence) -> str:
    return ""


def _rank_of_all(lane: str) -> float:
    return 0.0


class WaitingQueue:
    """Sequences in ascending ``order``, lane by lane. ``len`` counts those still waiting.

    ``lane_of`` never changes for a sequence. ``rank`` of a lane may rise at any time, and the lane of the least rank
    goes first; so its place is looked up anew only when it comes up. By default there is one lane."""

    def __init__(
        self, lane_of: Callable[[Sequence], str] = _lane_of_all, rank: Callable[[str], float] = _rank_of_all
    ) -> None:
        self._lane_of, self._rank = lane_of, rank
        self._pushed = 0
        self._gone = 0
        self._lanes: dict[str, _Heap] = {}
        self._places: list[_Place] = []  # each lane's is here, perhaps beside ones that it has no more
        self._size = 0

    def __len__(self) -> int:
        return self._size - self._gone

    def __iter__(self) -> Iterator[Sequence]:
        return (
            entry[2] for heap in self._lanes.values() for entry in heap if entry[2].status is SequenceStatus.WAITING
        )

    def push(self, sequence: Sequence) -> None:
        self._pushed += 1  # breaks ties between equals, so that sequences are never compared
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
        """What ``peek`` has just shown."""
        lane = heapq.heappop(self._places)[-1]
        sequence = heapq.heappop(self._lanes[lane])[2]
        self._size -= 1
        self._drop_ended(lane)
        if lane in self._lanes:
            heapq.heappush(self._places, self._place(lane))
        return sequence

    def discard(self) -> None:
        """One waiting sequence has just been marked finished; its entry goes when it comes up, or when such are the
        majority."""
        self._gone += 1
        if self._gone > _COMPACT_ABOVE and self._gone * 2 > self._size:
            self.reorder()

    def reorder(self) -> None:
        """Their orders have changed. Equals stay in the order in which they came."""
        lanes = {
            lane: [(sequence.order, pushed, sequence) for _, pushed, sequence in _waiting(heap)]
            for lane, heap in self._lanes.items()
        }
        self._lanes = {lane: heap for lane, heap in lanes.items() if heap}
        for heap in self._lanes.values():
            heapq.heapify(heap)
        self._places = sorted(map(self._place, self._lanes))
        self._size, self._gone = sum(map(len, self._lanes.values())), 0

    def in_order(self, coming: Iterable[Sequence] = ()) -> list[Sequence]:
        """As they would be admitted as things stand, if these came, too."""
        return sorted([*self._sorted(), *coming], key=self._place_of)

    def _sorted(self) -> list[Sequence]:
        return [entry[2] for heap in self._lanes.values() for entry in sorted(_waiting(heap))]

    def _place_of(self, sequence: Sequence) -> tuple[float, ...]:
        return (self._rank(self._lane_of(sequence)), *sequence.order)

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """Those who would be admitted before this one as things stand, in no order: whole lanes that go first, and
        those before it in its own."""
        own = self._lane_of(sequence)
        first = {lane for lane in self._lanes if lane != own and self._rank(lane) < self._rank(own)}
        return [
            each
            for each in self
            if (each.order < sequence.order if self._lane_of(each) == own else self._lane_of(each) in first)
        ]


def _waiting(heap: _Heap) -> _Heap:
    return [entry for entry in heap if entry[2].status is SequenceStatus.WAITING]


# --- all at once


def longest_first(requests: Seq[Request], *, block_tokens: int, capacity: float) -> Seq[Request]:
    """The same requests; those of equal length in the given order. ``capacity``: tokens that the cache holds;
    ``block_tokens``: of the shortest prefix that it finds."""
    if len({_length(each) for each in requests}) < 2 or not all(_is_known(each.params) for each in requests):
        return requests
    if sum(len(each.prompt_token_ids) + each.params.n * _length(each) for each in requests) <= capacity:
        return sorted(requests, key=_length, reverse=True)
    return _families_first(requests, block_tokens)


def _length(request: Request) -> int:
    return request.params.max_tokens or 0  # resolved: it is never None here


def _is_known(params: SamplingParams) -> bool:
    if params.structured_outputs is not None:
        return False  # a grammar's end is one before min_tokens, too
    ends_early = not params.ignore_eos or params.stop or params.stop_token_ids or params.repetition_detection
    return not ends_early or params.min_tokens == params.max_tokens


def _families_first(requests: Seq[Request], tokens: int) -> list[Request]:
    """Those that share their first ``tokens`` ids come one after another, and among them those that share twice as
    many, and so on. The family of the longest answer goes first."""
    families: dict[bytes, list[Request]] = {}
    for each in requests:
        families.setdefault(each.prompt_token_ids[:tokens].tobytes(), []).append(each)
    ordered = []
    for family in families.values():
        splits = len(family) > 1 and any(len(each.prompt_token_ids) > tokens for each in family)
        ordered.append(_families_first(family, 2 * tokens) if splits else sorted(family, key=_length, reverse=True))
    ordered.sort(key=lambda family: _length(family[0]), reverse=True)
    return [each for family in ordered for each in family]
