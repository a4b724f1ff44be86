"""Text that comes in pieces, read as if it were all there: readers are generators that yield where they need more.

What lives here: waiting, taking, looking ahead, and what is kept in case it turns out to be no call. What may not: any
format.

Where a reader stops depends on the text alone, never on how it was cut into pieces; so every look-ahead is bounded by
the text (``MAX_SPACE``, ``MAX_HEAD``), and none by what happens to be there.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

MAX_HEAD = 4096  # characters of a call that may be held back until its name is known and its arguments begin
MAX_SPACE = 64  # characters of white space that may be looked over

Found = TypeVar("Found")
Reads = Generator[None, None, Found]
Wait = Reads[None]
_SPACE = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """What was taken for a call is none."""


class Ended(Exception):
    """The text ends where more is needed."""


class Cursor:
    """``text[at:]`` is not taken yet. While ``recording``, what is taken is kept in the head, which has a limit."""

    __slots__ = ("_head", "_room", "at", "ended", "recording", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.recording = False
        self._head: list[str] = []
        self._room = 0

    def push(self, text: str) -> None:
        self.text, self.at = self.text[self.at :] + text, 0

    def record(self) -> None:
        """Begins a head."""
        self.recording, self._head, self._room = True, [], MAX_HEAD

    def head(self) -> str:
        """Ends the head and returns it."""
        head, self._head, self.recording = "".join(self._head), [], False
        return head

    def take(self, end: int) -> str:
        """The text up to position ``end``."""
        taken, self.at = self.text[self.at : end], end
        if self.recording:
            self._head.append(taken)
            self._room -= len(taken)
        return taken

    def match(self, pattern: re.Pattern[str]) -> str:
        """Takes what matches here, of what there is."""
        found = pattern.match(self.text, self.at, self._limit())
        return self.take(found.end()) if found is not None else ""

    def _limit(self) -> int:
        return min(len(self.text), self.at + self._room) if self.recording else len(self.text)

    def peek(self) -> Reads[str]:
        """The next character. Raises Ended, and Malformed where the head is full."""
        while self.at == len(self.text):
            if self.ended:
                raise Ended
            yield
        if self.recording and self._room <= 0:
            raise Malformed
        return self.text[self.at]

    def window(self, length: int) -> Reads[str]:
        """The next ``length`` characters, or fewer at the end of the text."""
        while len(self.text) - self.at < length and not self.ended:
            yield
        return self.text[self.at : self.at + length]

    def space(self) -> Reads[str]:
        """Takes white space up to the next other character; returns that character. Raises as ``peek``."""
        while True:
            character = yield from self.peek()
            if character not in " \t\r\n":
                return character
            self.match(_SPACE)

    def expect(self, character: str) -> Wait:
        """Takes white space and this character. Raises as ``peek``, and Malformed where another comes."""
        if (yield from self.space()) != character:
            raise Malformed
        self.take(self.at + 1)

    def skip_space(self) -> Wait:
        """Drops white space, all there is, to the end of the text if need be."""
        while True:
            self.at = _end_of(_SPACE, self.text, self.at)
            if self.at < len(self.text) or self.ended:
                return
            yield

    def literal(self, literal: str) -> Reads[bool]:
        """Takes white space and ``literal`` if they come next; nothing otherwise."""
        if not (yield from self.sees(literal)):
            return False
        self.take(self._after_space() + len(literal))
        return True

    def require(self, literal: str) -> Wait:
        """As ``literal``. Raises Malformed where it does not come, Ended where the text ends too early to tell."""
        if not (yield from self.literal(literal)):
            rest = self.text[self._after_space() :]
            raise Ended if literal.startswith(rest) else Malformed

    def sees(self, literal: str) -> Reads[bool]:
        """Whether ``literal`` comes next, after white space."""
        while True:
            begin = self._after_space()
            found = self.text[begin : begin + len(literal)]
            if found == literal:
                return True
            if self.ended or not literal.startswith(found):
                return False
            yield

    def _after_space(self) -> int:
        return _end_of(_SPACE, self.text, self.at, self.at + MAX_SPACE)


def _end_of(pattern: re.Pattern[str], text: str, begin: int, limit: int | None = None) -> int:
    found = pattern.match(text, begin, len(text) if limit is None else limit)
    return begin if found is None else found.end()
