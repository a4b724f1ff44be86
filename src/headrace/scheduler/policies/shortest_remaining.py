"""Shortest remaining work first, by predicted lengths, with ageing.

The mean time that requests take is least when whoever needs least goes first; but then whoever needs much might never
go. So a second of waiting is worth ``ageing`` tokens:

    key  =  tokens still to come (predicted) + PROMPT_SHARE · prompt tokens + ageing · arrival in seconds

Keys of those who wait do not change with time, since all of them age alike (only where a prediction does). One with
fewer tokens goes before an earlier one only if it came less than

    (remaining work of the earlier)  /  ageing        seconds after it

and so none is passed by one that came later than that: no starvation. One that runs is pushed out for a key that
is lower by more than what computing it again would cost.

Answers' lengths are predicted from those before, or taken from what requests allow:

    History      answers to prompts that begin alike (an application's instructions), else of the same tenant, else of
    anybody
    MaxTokens    every answer is as long as max_tokens allows: in a simulation, where that is exact, the oracle

What lives here: keys, predictors. What may not: room (step_planner.py).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable

from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies.protocol import DynamicPolicy, Order, Refusal
from headrace.scheduler.roster import Roster, Sequence

PROMPT_SHARE = 1 / 16  # of a token of an answer: what a token of a prompt costs, many of which are computed at once
STRIDE = 16  # tokens after which a running one's key is looked at again,
LOOK = 0.1  # ... and seconds after which steps that are alike are interrupted for that
LEAST_GAIN = 32.0  # tokens: for less none is preempted

BEGINNING = 32  # tokens of a prompt that tell its kind
ENOUGH = 5  # answers of a kind, before they are believed
KEPT = 64  # the last answers of a kind
GROUPS = 2048  # kinds that are remembered; the one that was not met for longest goes first
FIRST_GUESS = 128.0  # tokens, before anything has ended

Group = tuple[str, bytes]


class MaxTokens:
    """Every answer is as long as it may be."""

    news = 0  # how often a kind of answers has become known

    def remaining(self, sequence: Sequence) -> float:
        """Tokens that its answer is expected to have beyond those known. Above 0."""
        return float(max(1, sequence.max_num_tokens - len(sequence.token_ids)))

    def ended(self, sequence: Sequence) -> None:
        """It tells something of those to come."""


class _Kind:
    """The last lengths of one kind of answers, in order of coming and in order of size."""

    __slots__ = ("_last", "_sizes")

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sizes: array[int] = array("q")

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, length: int) -> None:
        if len(self._last) == KEPT:
            self._sizes.remove(self._last.popleft())
        self._last.append(length)
        insort(self._sizes, length)

    def remaining(self, tokens: int) -> float:
        """The mean of what those had left that were longer than ``tokens``; beyond all of them, as much again as the
        longest exceeded the mean."""
        longer = self._sizes[bisect_right(self._sizes, tokens) :]
        if longer:
            return sum(longer) / len(longer) - tokens
        return max(1.0, self._sizes[-1] - sum(self._sizes) / len(self._sizes))


class History(MaxTokens):
    """Max_tokens is not looked at: most clients set it far above what they get. Nor does it cut a prediction off,
    though no answer gets longer: whoever always asks for little is known by it after ``ENOUGH`` answers, and in a
    simulation, where max_tokens is the length that an answer will have, the cut would tell the predictor what is not
    known on a server, and its figures would be worth nothing."""

    def __init__(self) -> None:
        self.news = 0
        self._kinds: OrderedDict[Group, _Kind] = OrderedDict()

    def remaining(self, sequence: Sequence) -> float:
        for group in _groups(sequence):
            kind = self._kinds.get(group)
            if kind is not None and len(kind) >= ENOUGH:
                return kind.remaining(sequence.num_output_tokens)
        return FIRST_GUESS

    def ended(self, sequence: Sequence) -> None:
        if not sequence.num_output_tokens:
            return
        for group in reversed(_groups(sequence)):
            kind = self._kinds.setdefault(group, _Kind())
            kind.add(sequence.num_output_tokens)
            self.news += len(kind) == ENOUGH
            self._kinds.move_to_end(group, last=True)
        if len(self._kinds) > GROUPS:
            self._kinds.popitem(last=False)
            self._kinds.popitem(last=False)


def _groups(sequence: Sequence) -> tuple[Group, Group, Group]:
    """From the narrowest to all. A tenant's kinds are its own: one tenant cannot teach the engine about another's."""
    request = sequence.request
    beginning = (
        request.prompt_token_ids[:BEGINNING].tobytes() if len(request.prompt_token_ids) > BEGINNING else b"short"
    )
    return (request.tenant, beginning), (request.tenant, b""), ("", b"all")


class ShortestRemaining(DynamicPolicy):
    """See the module. ``ageing``: tokens a second."""

    def __init__(self, lengths: MaxTokens, ageing: float) -> None:
        self._lengths = lengths
        self._ageing = ageing
        self._looked: dict[Sequence, int] = {}  # those who run; the output tokens that its key is of
        self._news = 0  # what was known about lengths when those who wait were ordered

    def order(self, request: Request, arrival_number: int) -> Order:
        """Key, number, when it came: further answers (n > 1) begin with their brother's, so they have waited as
        long."""
        return (0.0, arrival_number, 0.0)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        """A running one whose prompt is still computed has its key from when it waited; it is as good a victim as
        any."""
        again = PROMPT_SHARE * running.num_tokens
        return candidate.order[0] + LEAST_GAIN + again < running.order[0]

    def arrived(self, sequence: Sequence, roster: Roster) -> Refusal | None:
        sequence.order = self._key(sequence, roster.now)
        return None

    def consider(self, roster: Roster) -> Iterable[tuple[Sequence, Refusal]]:
        """Those who run have less left; with a prediction, sometimes more. Those who wait are ordered anew when a kind
        of answers is new."""
        self.wake = roster.now + LOOK if len(roster.waiting) else math.inf
        if len(roster.waiting):
            for sequence, looked in self._looked.items():
                if sequence.num_output_tokens >= looked + STRIDE:
                    self._look(sequence)
            if self._news != self._lengths.news:
                self._news = self._lengths.news
                for sequence in roster.waiting:
                    sequence.order = self._key(sequence, sequence.order[-1])
                roster.waiting.reorder()
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
