"""How long answers will be: predicted from those before, or taken from what requests allow.

    History      answers to prompts that begin alike (an application's instructions), else of the same tenant, else of anybody
    MostTokens   every answer is as long as max_tokens allows: in a simulation, where that is exact, the oracle

What lives here: the predictors. What may not: orders of service.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from typing import Protocol

from headrace.sequence import Sequence

BEGINNING = 32  # tokens of a prompt that tell its kind
ENOUGH = 5  # answers of a kind, before they are believed
KEPT = 64  # the last answers of a kind
GROUPS = 2048  # kinds that are remembered; the one that was not met for longest goes first
FIRST_GUESS = 128.0  # tokens, before anything has ended

Group = tuple[str, bytes]


class Lengths(Protocol):
    news: int  # how often a kind of answers has become known

    def remaining(self, sequence: Sequence) -> float:
        """Tokens that its answer is expected to have beyond those known. Above 0."""
        ...

    def ended(self, sequence: Sequence) -> None: ...


class MostTokens:
    news = 0

    def remaining(self, sequence: Sequence) -> float:
        return float(max(1, sequence.max_num_tokens - len(sequence.token_ids)))

    def ended(self, sequence: Sequence) -> None:
        pass


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
        """The mean of what those had left that were longer than ``tokens``; beyond all of them, as much again as the longest exceeded the mean."""
        longer = self._sizes[bisect_right(self._sizes, tokens) :]
        if longer:
            return sum(longer) / len(longer) - tokens
        return max(1.0, self._sizes[-1] - sum(self._sizes) / len(self._sizes))


class History:
    """Max_tokens is not looked at: most clients set it far above what they get. Nor does it cut a prediction off, though no answer gets longer:
    whoever always asks for little is known by it after ``ENOUGH`` answers, and in a simulation, where max_tokens is the length that an answer
    will have, the cut would tell the predictor what nobody knows on a server, and its figures would be worth nothing."""

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
    """From the narrowest to all. A tenant's kinds are its own: nobody can teach the engine about another's."""
    request = sequence.request
    beginning = request.prompt_token_ids[:BEGINNING].tobytes() if len(request.prompt_token_ids) > BEGINNING else b"short"
    return (request.tenant, beginning), (request.tenant, b""), ("", b"all")
