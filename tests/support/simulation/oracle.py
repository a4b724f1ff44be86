"""What each request must be answered alone: the hash of its context, token by token, and where that ends.

Nothing of the engine is used but the hash itself, so nothing that the engine does to tokens, blocks or steps can be in
here too.

What lives here: the expected token and end, the masks of grammars (which are a hash too), and what may be found of a
prefix. What may not: engines, events.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from headrace.engine.keyed_hash import _mix, adapter_key  # shared with the executor on purpose; tables and rows are not
from headrace.request import REPETITION, FinishReason, RepetitionDetection
from tests.support.simulation.schedule import Asked

VOCAB = 64
EOS = 7
ROOT = _mix(0, 0x5EED)  # the executor's with key 0
WORDS = VOCAB // 32
LOOPS = RepetitionDetection(max_pattern_size=4, min_count=3, min_tokens=24)
NOTHING_ALLOWED = "no token is allowed"
_FORKED = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1

End = tuple[FinishReason, int | str | None]  # with its stop reason, or the message of an error


ADAPTERS = ("one", "two", "three")


def key_of(name: str, revision: int = 0) -> str:
    """Of an adapter whose files have been replaced so often."""
    return f"{name}#{revision}"


def root(adapter: str | None) -> int:
    """The hash of nothing: with an adapter that lies on the device it is another model's."""
    return ROOT if adapter is None else _mix(ROOT, adapter_key(adapter))


def chain(tokens: Sequence[int], head: int = ROOT) -> array[int]:
    """The hash after each token."""
    return array("Q", [head := _mix(head, token) for token in tokens])


def allowed(head: int) -> list[int]:
    """What a grammar allows after a context with this hash: an eighth of all tokens and the end, often one alone, and
    rarely nothing."""
    if head % 61 == 0:
        return []
    if head >> 16 & 1:
        return [head >> 32 & VOCAB - 1]
    return sorted({EOS, *range(head >> 32 & 7, VOCAB, 8)})


def forced(head: int) -> tuple[int, ...]:
    """The tokens that must come, one after another, as far as a run goes."""
    run: list[int] = []
    while len(run) < 5 and len(fine := allowed(head)) == 1:
        run += fine
        head = _mix(head, fine[0])
    return tuple(run)


def mask_words(head: int) -> bytes:
    """The same as bits, for TokenMasks."""
    return sum(1 << token for token in allowed(head)).to_bytes(4 * WORDS, "little")


class Line:
    """One answer as it must come. ``expect`` says the next token and whether it is the last one; ``take`` goes on."""

    __slots__ = ("_end", "_salt", "asked", "head", "ids", "tokens")

    def __init__(self, asked: Asked, index: int, prompt: array[int], limit: int) -> None:
        self.asked = asked
        self.tokens = array("i")  # told so far
        self.ids = array("i", asked.prompt)  # and the prompt before them
        self.head = prompt[-1] if prompt else ROOT
        self._salt = (asked.seed + index * _FORKED) & _MASK if asked.n > 1 else 0
        self._end = min(len(asked.prompt) + asked.max_tokens, limit)

    def expect(self) -> tuple[int, End | None]:
        """Token -1: there is none, and the end says why."""
        drawn = _mix(self.head ^ self._salt, 0x70C)
        if self.asked.compiles is None:
            token = drawn % VOCAB if self.asked.only < 0 else self.asked.only
        else:
            choices = allowed(self.head)
            if not choices:
                return -1, (FinishReason.ERROR, NOTHING_ALLOWED)
            token = drawn % VOCAB if drawn % VOCAB in choices else choices[drawn % len(choices)]
        return token, self._end_at(token)

    def _end_at(self, token: int) -> End | None:
        asked, count = self.asked, len(self.tokens) + 1
        follows = asked.compiles is not None
        eos = token == EOS and (follows or not asked.ignore_eos)
        if (eos or token in asked.stops) and (count >= asked.min_tokens or (follows and token == EOS)):
            return FinishReason.STOP, None if eos else token
        if asked.loops and count >= asked.min_tokens and _loops([*self.tokens, token]):
            return FinishReason.STOP, REPETITION
        return (FinishReason.LENGTH, None) if len(self.ids) + 1 >= self._end else None

    def take(self, token: int) -> None:
        self.tokens.append(token)
        self.ids.append(token)
        self.head = _mix(self.head, token)


def _loops(tokens: list[int]) -> bool:
    """The definition: the end is a cycle, LOOPS.min_count times in a row and over LOOPS.min_tokens tokens."""
    for period in range(1, LOOPS.max_pattern_size + 1):
        size = max(LOOPS.min_count * period, LOOPS.min_tokens)
        tail = tokens[-size:]
        if len(tokens) >= size and tail[period:] == tail[:-period]:
            return True
    return False


class Library:
    """Every context that was ever begun, by salt and adapter: a prefix that is found must be in here."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str | None], list[Line]] = {}

    def add(self, line: Line) -> None:
        self._held.setdefault((line.asked.salt, line.asked.adapter), []).append(line)

    def holds(self, asked: Asked, count: int) -> bool:
        """Whether somebody else of the same salt and adapter has these first ``count`` tokens of its prompt."""
        wanted = asked.prompt[:count]
        others = reversed(self._held.get((asked.salt, asked.adapter), ()))
        return any(line.asked is not asked and (*line.asked.prompt, *line.tokens)[:count] == wanted for line in others)
