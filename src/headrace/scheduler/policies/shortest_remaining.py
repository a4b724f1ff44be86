"""Shortest remaining work first, by predicted lengths, with ageing.

The mean time that requests take is least when whoever needs least goes first; but then whoever needs much might never go. So a second of
waiting is worth ``ageing`` tokens:

    key  =  tokens still to come (predicted: lengths.py) + PROMPT_SHARE · prompt tokens + ageing · arrival in seconds

Keys of those who wait do not change with time, since all of them age alike (only where a prediction does). One with fewer tokens goes before
an earlier one only if it came less than

    (remaining work of the earlier)  /  ageing        seconds after it

and so nobody is passed by anybody who came later than that: no starvation. One that runs is pushed out for a key that is lower by more than what
computing it again would cost.

What lives here: keys. What may not: predictions (lengths.py), room (planner.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies.lengths import Lengths
from headrace.scheduler.policies.protocol import DynamicPolicy, Order, Refusal, Standing
from headrace.sequence import Sequence

PROMPT_SHARE = 1 / 16  # of a token of an answer: what a token of a prompt costs, many of which are computed at once
STRIDE = 16  # tokens after which a running one's key is looked at again,
LOOK = 0.1  # ... and seconds after which steps that are alike are interrupted for that
LEAST_GAIN = 32.0  # tokens: for less nobody is pushed out


class ShortestRemaining(DynamicPolicy):
    """See the module. ``ageing``: tokens a second."""

    name = "shortest-remaining"

    def __init__(self, lengths: Lengths, ageing: float) -> None:
        self._lengths = lengths
        self._ageing = ageing
        self._looked: dict[Sequence, int] = {}  # those who run; the output tokens that its key is of
        self._news = 0  # what was known about lengths when those who wait were ordered

    def order(self, request: Request, arrival_number: int) -> Order:
        """Key, number, when it came: further answers (n > 1) begin with their brother's, so they have waited as long."""
        return (0.0, arrival_number, 0.0)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        """A running one whose prompt is still computed has its key from when it waited; it is as good a victim as any."""
        again = PROMPT_SHARE * running.num_tokens
        return candidate.order[0] + LEAST_GAIN + again < running.order[0]

    def arrived(self, sequence: Sequence, standing: Standing) -> Refusal | None:
        sequence.order = self._key(sequence, standing.now)
        return None

    def consider(self, standing: Standing) -> Iterable[tuple[Sequence, Refusal]]:
        """Those who run have less left; with a prediction, sometimes more. Those who wait are ordered anew when a kind of answers is new."""
        self.wake = standing.now + LOOK if len(standing.waiting) else math.inf
        if len(standing.waiting):
            for sequence, looked in self._looked.items():
                if sequence.num_output_tokens >= looked + STRIDE:
                    self._look(sequence)
            if self._news != self._lengths.news:
                self._news = self._lengths.news
                for sequence in standing.waiting:
                    sequence.order = self._key(sequence, sequence.order[-1])
                standing.waiting.reorder()
        return ()

    def admitted(self, sequence: Sequence, now: float) -> None:
        self._look(sequence)

    def left(self, sequence: Sequence, now: float) -> None:
        self._looked.pop(sequence, None)
        if sequence.status is SequenceStatus.FINISHED:
            self._lengths.ended(sequence)
        else:
            sequence.order = self._key(sequence, sequence.order[-1])

    def _look(self, sequence: Sequence) -> None:
        self._looked[sequence] = sequence.num_output_tokens
        sequence.order = self._key(sequence, sequence.order[-1])

    def _key(self, sequence: Sequence, came: float) -> Order:
        prompt = max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
        work = self._lengths.remaining(sequence) + PROMPT_SHARE * prompt
        return (work + self._ageing * came, sequence.order[1], came)
