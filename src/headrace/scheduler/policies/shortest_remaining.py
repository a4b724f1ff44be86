"""Shortest remaining work first, by predicted lengths, with ageing.

The mean time that requests take is least when whoever needs least goes first; but then whoever needs much might never go. So a second of
waiting is worth ``ageing`` tokens:

    key  =  tokens still to come (predicted: lengths.py) + PROMPT_SHARE · prompt tokens + ageing · arrival in seconds

Keys of those who wait do not change with time, since all of them age alike. One with fewer tokens goes before an earlier one only if it came
less than

    (remaining work of the earlier)  /  ageing        seconds after it

and so nobody is passed by anybody who came later than that: no starvation. One that runs is pushed out for a key that is lower by more than what
computing it again would cost.

What lives here: keys. What may not: predictions (lengths.py), room (planner.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies.lengths import Lengths
from headrace.scheduler.policies.protocol import DynamicPolicy, Order, Refusal, Standing
from headrace.sequence import Sequence

PROMPT_SHARE = 1 / 16  # of a token of an answer: what a token of a prompt costs, many of which are computed at once
STRIDE = 16  # tokens after which a running one's key is looked at again
LEAST_GAIN = 32.0  # tokens: for less nobody is pushed out


class ShortestRemaining(DynamicPolicy):
    """See the module. ``ageing``: tokens a second."""

    name = "shortest-remaining"

    def __init__(self, lengths: Lengths, ageing: float) -> None:
        self._lengths = lengths
        self._ageing = ageing
        self._arrived: dict[Sequence, float] = {}
        self._looked: dict[Sequence, int] = {}  # those who run; the output tokens that its key is of

    def order(self, request: Request, arrival_number: int) -> Order:
        return (0.0, arrival_number)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        """A running one whose prompt is still computed has its key from when it waited; it is as good a victim as any."""
        again = PROMPT_SHARE * running.num_tokens
        return candidate.order[0] + LEAST_GAIN + again < running.order[0]

    def arrived(self, sequence: Sequence, standing: Standing) -> Refusal | None:
        self._arrived[sequence] = standing.now
        sequence.order = self._key(sequence)
        return None

    def consider(self, standing: Standing) -> Iterable[tuple[Sequence, Refusal]]:
        """Those who run have less left; with a prediction, sometimes more."""
        if len(standing.waiting):
            for sequence, looked in self._looked.items():
                if sequence.num_output_tokens >= looked + STRIDE:
                    self._look(sequence)
        return ()

    def admitted(self, sequence: Sequence, now: float) -> None:
        if sequence not in self._arrived:  # a further answer (n > 1) has waited as long as the first
            came = (at for each, at in self._arrived.items() if each.request_id == sequence.request_id)
            self._arrived[sequence] = next(came, now)
        self._look(sequence)

    def left(self, sequence: Sequence, now: float) -> None:
        self._looked.pop(sequence, None)
        if sequence.status is SequenceStatus.FINISHED:
            del self._arrived[sequence]
            self._lengths.ended(sequence)
        else:
            sequence.order = self._key(sequence)

    def _look(self, sequence: Sequence) -> None:
        self._looked[sequence] = sequence.num_output_tokens
        sequence.order = self._key(sequence)

    def _key(self, sequence: Sequence) -> Order:
        prompt = max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)
        work = self._lengths.remaining(sequence) + PROMPT_SHARE * prompt
        return (work + self._ageing * self._arrived[sequence], sequence.order[-1])
