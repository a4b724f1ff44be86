"""A front end on virtual time: one event loop, turn after turn.

A turn takes all that has come by its beginning. Tokens that steps brought meanwhile are sent on together, one message a
request, however many of its tokens they are: a front end that falls behind sends fewer and longer messages. Requests
are read, all of them, before the first is handed on: a burst reaches the core late, and then quickly.

What lives here: turns. What may not: prices (cost/prices.py), clients and steps (drive.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import Any

from headrace.cost.prices import FrontPrices
from headrace.request import SequenceOutput

READ = 0.4  # of a request's work: seen in bursts of 24 to 320 requests
Message = tuple[float, list[SequenceOutput]]  # when its client sees it, and what the request got, in order


class FrontEnd:
    """Times are seconds."""

    def __init__(self, prices: FrontPrices) -> None:
        self._prices = prices
        self._free = 0.0  # when the last turn ends
        self._number = count()
        # heaps, by when they came
        self._requests: list[tuple[float, int, int, int]] = []
        self._outputs: list[tuple[float, int, Sequence[SequenceOutput]]] = []

    def take(self, at: float, index: int, prompt_tokens: int) -> None:
        heapq.heappush(self._requests, (at, next(self._number), index, prompt_tokens))

    def bring(self, at: float, outputs: Sequence[SequenceOutput]) -> None:
        """What a step brought at its end."""
        heapq.heappush(self._outputs, (at, next(self._number), outputs))

    @property
    def due(self) -> float:
        """When the next turn begins; infinite where nothing has come."""
        first = min((heap[0][0] for heap in (self._requests, self._outputs) if heap), default=math.inf)
        return max(first, self._free)

    def turn(self) -> tuple[list[Message], list[tuple[float, int]]]:
        """The next one: messages, by when they are sent; and requests, when each is in the core."""
        begun, prices = self.due, self._prices
        brought = [outputs for _, _, outputs in _until(begun, self._outputs)]
        taken = [(index, tokens) for _, _, index, tokens in _until(begun, self._requests)]
        now, messages = begun + (prices.waking if brought else 0.0), []
        for outputs in _by_request(brought):
            now += prices.sending(sum(len(output.token_ids) for output in outputs))
            messages.append((now, outputs))
        work = [prices.working(tokens) for _, tokens in taken]
        now += READ * sum(work)
        through = accumulate(((1.0 - READ) * each for each in work), initial=now)
        *_, self._free = ends = list(through)
        waits = [prices.resting(tokens) for _, tokens in taken]
        return messages, [(end + wait, index) for end, wait, (index, _) in zip(ends[1:], waits, taken, strict=True)]


def _until(now: float, heap: list[Any]) -> Iterator[Any]:
    while heap and heap[0][0] <= now:
        yield heapq.heappop(heap)


def _by_request(brought: Sequence[Sequence[SequenceOutput]]) -> Iterable[list[SequenceOutput]]:
    if len(brought) == 1:
        return ([output] for output in brought[0])
    found: dict[int, list[SequenceOutput]] = {}
    for outputs in brought:
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
    return found.values()
