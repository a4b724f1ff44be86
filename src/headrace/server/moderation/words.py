"""A list of words, looked for in a text that arrives in pieces.

One automaton for the whole list (Aho and Corasick 1975): a character costs about the same whatever the number of words.
Case does not count. An entry is found as a whole word; a star at its beginning or end lets it be part of a longer one.
For that, a border (the empty string) is fed wherever a letter, digit or underscore begins or ends a run of such, in
entries and texts alike.

What lives here: reading the list, and the search. What may not: answers, tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from headrace.errors import ConfigError

MAX_BYTES = 2**20  # of the file
MAX_ENTRIES = 50_000
MAX_LENGTH = 200  # characters of an entry
_BORDER = ""


class WordList:
    """The automaton. State 0 is the root; ``chars[s]``: characters on the way to s; ``found[s]``: of the longest entry
    that ends there."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.chars = [0]
        self.found = [0]
        self._fail = [0]
        for entry in entries:
            self._add(entry)
        self._link()

    def _add(self, entry: str) -> None:
        state = 0
        for symbol in _symbols_of(entry):
            known = self.edges[state].get(symbol)
            if known is None:
                known = self.edges[state][symbol] = len(self.edges)
                self.edges.append({})
                self.chars.append(self.chars[state] + len(symbol))
                self.found.append(0)
                self._fail.append(0)
            state = known
        self.found[state] = self.chars[state]

    def _link(self) -> None:
        """Each state's longest proper suffix that is a state, level by level."""
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            self.found[state] = self.found[state] or self.found[self._fail[state]]
            for symbol, child in self.edges[state].items():
                self._fail[child] = self.step(self._fail[state], symbol)
                queue.append(child)

    def step(self, state: int, symbol: str) -> int:
        """The longest end of what was fed that begins an entry."""
        while symbol not in self.edges[state] and state:
            state = self._fail[state]
        return self.edges[state].get(symbol, 0)


def _folded(character: str) -> str:
    """In lower case where that is one character, too: lengths stay."""
    lower = character.lower()
    return lower if len(lower) == 1 else character


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _symbols_of(entry: str) -> Iterator[str]:
    text = entry.removeprefix("*").removesuffix("*")
    inside = entry.startswith("*") and _is_word(text[0])
    for character in text:
        if _is_word(character) != inside:
            inside = not inside
            yield _BORDER
        yield _folded(character)
    if inside and not entry.endswith("*"):
        yield _BORDER


def read_words(path: str) -> WordList:
    """One entry a line; empty lines and those that begin with # are left out. Raises ConfigError."""
    try:
        data = Path(path).read_bytes()
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except OSError as error:
        raise ConfigError(
            f"--moderation-words {path}: {(error.strerror or str(error)).lower()}; give a readable file."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--moderation-words {path} is not UTF-8; convert it.") from None
    entries = [line for line in lines if line and not line.startswith("#")]
    longest = max(map(len, entries), default=0)
    if len(data) > MAX_BYTES or len(entries) > MAX_ENTRIES or longest > MAX_LENGTH:
        limits = f"{MAX_BYTES} bytes, {MAX_ENTRIES} entries, {MAX_LENGTH} characters each"
        raise ConfigError(
            f"--moderation-words {path} has {len(data)} bytes, {len(entries)} entries, the longest of {longest}; at most {limits}."
        )
    if not entries or not all(entry.strip("*") for entry in entries):
        raise ConfigError(
            f"--moderation-words {path} has no entry, or one of stars alone; give one word or phrase a line."
        )
    return WordList(entries)


class WordMatcher:
    """One text. What may be shown ends where the longest beginning of an entry begins."""

    __slots__ = ("_inside", "_length", "_list", "_state")

    def __init__(self, words: WordList) -> None:
        self._list = words
        self._state = 0
        self._length = 0
        self._inside = False  # the last character belongs to a word

    def push(self, text: str, *, final: bool) -> tuple[int, bool]:
        """``(characters from the beginning that may be shown, whether an entry follows them)``."""
        for character in text:
            if _is_word(character) != self._inside:
                self._inside = not self._inside
                if self._feed(_BORDER):
                    break
            found = self._feed(_folded(character))
            self._length += 1
            if found:
                break
        else:
            if not (final and self._inside and self._feed(_BORDER)):
                return self._length if final else self._length - self._list.chars[self._state], False
        return self._length - self._list.found[self._state], True

    def _feed(self, symbol: str) -> bool:
        self._state = self._list.step(self._state, symbol)
        return self._list.found[self._state] > 0
