"""Values read in pieces, strictly: as they come, they are given out as JSON, and a character that cannot follow is
noticed at once.

What lives here: values and strings as JSON and as Python write them, as readers on a cursor. What may not: recursion
(depth is bounded and on a list), building values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import ClassVar

from headrace.server.parsing.cursor import Cursor, Ended, Malformed, Reads, Wait
from headrace.server.parsing.formats import Literals

MAX_DEPTH = 128
MAX_SCALAR = 256  # characters of a number
MAX_TEXT = 256  # characters of a string that is wanted whole

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ATOM = re.compile(r"[-+.0-9A-Za-z_]+")
_SPACE = re.compile(r"[ \t\r\n]+")
_KEY = re.compile(r"\w")
_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
WORDS = {"True": "true", "False": "false", "None": "null", **_JSON_WORDS}
_PYTHON_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPED = {"'": "'", '"': '\\"', "/": "/", "\\": "\\\\", "n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f"}
_DIGITS = {"x": 2, "u": 4, "U": 8}

Give = Callable[[str], None]


def quoted(text: str) -> str:
    """The inside of a JSON string. Pieces put together are the whole text's."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _Values:
    """One value, however deep, as JSON has it: given as it is written. The brace or bracket that ends it is taken but
    not given: whether what it belongs to is whole may not be known yet."""

    closers: ClassVar = {"{": "}", "[": "]"}

    def __init__(self, cursor: Cursor, give: Give) -> None:
        self._cursor, self._give = cursor, give
        self._open: list[str] = []  # what ends each of the values that have begun

    def read(self) -> Wait:
        while True:
            character = yield from self._space()
            if character not in self.closers:
                yield from self._read_scalar(character)
            elif (yield from self._enter(character)):
                continue
            if (yield from self._leave()):
                return

    def _enter(self, opener: str) -> Reads[bool]:
        """Into an object or a list, up to its first value; False where it has none."""
        if len(self._open) == MAX_DEPTH:
            raise Malformed
        self._open.append(self.closers[opener])
        self._take("{" if opener == "{" else "[")
        if (yield from self._space()) == self._open[-1]:
            return False
        if opener == "{":
            yield from self._read_key()
        return True

    def _leave(self) -> Reads[bool]:
        """After a value: out of what ends here, up to the next value; True where the outermost has ended."""
        while self._open:
            character = yield from self._space()
            if character == self._open[-1]:
                self._close(self._open.pop())
            elif character != ",":
                raise Malformed
            elif (yield from self._continues()):
                if self._open[-1] == "}":
                    yield from self._read_key()
                return False
        return True

    def _take(self, given: str) -> None:
        self._cursor.take(self._cursor.at + 1)
        self._give(given)

    def _close(self, closer: str) -> None:
        self._take(closer if self._open else "")

    def _continues(self) -> Reads[bool]:
        """Takes the comma; whether a value comes behind it."""
        yield from ()
        self._take(",")
        return True

    def _space(self) -> Reads[str]:
        """The next character that is no white space."""
        while (character := (yield from self._cursor.peek())) in " \t\r\n":
            self._give(self._cursor.match(_SPACE))
        return character

    def _read_scalar(self, first: str) -> Wait:
        if first == '"':
            yield from read_string(self._cursor, self._give)
        else:
            self._give((yield from _read_atom(self._cursor, _JSON_WORDS)))

    def _read_key(self) -> Wait:
        """With what stands behind it."""
        if (yield from self._space()) != '"':
            raise Malformed
        yield from read_string(self._cursor, self._give)
        if (yield from self._space()) != ":":
            raise Malformed
        self._take(":")


def read_value(cursor: Cursor, give: Give) -> Wait:
    """Any value of JSON."""
    return _Values(cursor, give).read()


def read_string(cursor: Cursor, give: Give) -> Wait:
    """A string with its quotes, from its opening one on."""
    give(cursor.take(cursor.at + 1))
    while True:
        character = yield from cursor.peek()
        if character == '"':
            give(cursor.take(cursor.at + 1))
            return
        if character == "\\":
            yield from _read_escape(cursor, give)
        elif plain := cursor.match(_PLAIN):
            give(plain)
        else:
            raise Malformed


def _read_escape(cursor: Cursor, give: Give) -> Wait:
    """Taken whole, so that half an escape is never given out."""
    needed = 6 if (yield from cursor.window(2)) == "\\u" else 2
    window = yield from cursor.window(needed)
    if len(window) < needed:
        raise Ended
    if not _ESCAPE.fullmatch(window):
        raise Malformed
    give(cursor.take(cursor.at + needed))


def _read_atom(cursor: Cursor, words: Mapping[str, str]) -> Reads[str]:
    """A number or one of ``words``; whole, because only what follows shows where it ends. Raises Malformed, Ended."""
    while True:
        found = _ATOM.match(cursor.text, cursor.at)
        end = cursor.at if found is None else found.end()
        if end == cursor.at or end - cursor.at > MAX_SCALAR:
            raise Malformed
        if end < len(cursor.text):
            break
        if cursor.ended:
            raise Ended
        yield
    atom = cursor.take(end)
    if atom not in words and not _NUMBER.fullmatch(atom):
        raise Malformed
    return words.get(atom, atom)


def read_text(cursor: Cursor) -> Reads[str]:
    """A string's value, for strings that are short where all is well."""
    if (yield from cursor.space()) != '"':
        raise Malformed
    parts: list[str] = []
    length = 0

    def keep(part: str) -> None:
        nonlocal length
        length += len(part)
        if length <= MAX_TEXT:
            parts.append(part)

    yield from read_string(cursor, keep)
    if length > MAX_TEXT:
        raise Malformed
    return str(json.loads("".join(parts)))


# --- Python


class _Literals(_Values):
    """As Python has it, of which JSON is a part: given as JSON, with its end."""

    closers: ClassVar = {"{": "}", "[": "]", "(": ")"}

    def __init__(self, cursor: Cursor, give: Give, literals: Literals = Literals()) -> None:  # noqa: B008 - frozen
        super().__init__(cursor, give)
        self._literals = literals

    def _close(self, closer: str) -> None:
        self._take("}" if closer == "}" else "]")

    def _continues(self) -> Reads[bool]:
        self._cursor.take(self._cursor.at + 1)
        if (yield from self._space()) == self._open[-1]:
            return False
        self._give(", ")
        return True

    def _space(self) -> Reads[str]:
        return (yield from self._cursor.space())

    def _read_scalar(self, first: str) -> Wait:
        if not (yield from self._read_text()):
            self._give((yield from _read_atom(self._cursor, WORDS)))

    def _read_key(self) -> Wait:
        """Where texts have a quote of their own, keys may stand without."""
        if not (yield from self._read_text()):
            if not self._literals.quote:
                raise Malformed
            yield from self._space()
            self._give(f'"{quoted((yield from read_word(self._cursor, _KEY)))}"')
        yield from self._cursor.require(":")
        self._give(": ")

    def _read_text(self) -> Reads[bool]:
        """A text between quotes, where one begins."""
        cursor, quote = self._cursor, self._literals.quote
        if quote:
            found = yield from cursor.literal(quote)
            if not found and cursor.ended and quote.startswith(cursor.text[cursor.at :].strip()):
                raise Ended
            if found:
                yield from read_until(cursor, quote, self._give)
                return True
        if (yield from self._space()) not in _PYTHON_PLAIN:
            return False
        yield from _read_python_string(cursor, self._give)
        return True


def read_literal(cursor: Cursor, give: Give) -> Wait:
    """Any value of Python's literals."""
    return _Literals(cursor, give).read()


def read_keywords(cursor: Cursor, literals: Literals, give: Give) -> Wait:
    """``key=value, …)``, from behind the opening bracket on: the inside of one object, from its opening brace on and
    without the closing one."""
    lead = "{"
    while (yield from cursor.space()) != literals.close:
        key = yield from read_word(cursor, _KEY)
        yield from cursor.require(literals.assign)
        give(f'{lead}"{quoted(key)}": ')
        lead = ", "
        yield from _Literals(cursor, give, literals).read()
        if (yield from cursor.space()) == ",":
            cursor.take(cursor.at + 1)
        elif (yield from cursor.space()) != literals.close:
            raise Malformed
    cursor.take(cursor.at + 1)
    if lead == "{":
        give(lead)


def read_word(cursor: Cursor, letters: re.Pattern[str]) -> Reads[str]:
    """Characters that are ``letters``, up to the first that is none. Raises Malformed where there are none or too
    many."""
    word = ""
    while len(word) <= MAX_TEXT and letters.match((yield from cursor.peek())):
        word += cursor.take(cursor.at + 1)
    if not word or len(word) > MAX_TEXT:
        raise Malformed
    return word


def read_until(cursor: Cursor, marker: str, give: Give, *, lines: bool = False) -> Wait:
    """A text up to a marker. ``lines``: a new line before that is not of it."""
    give('"')
    end = ("\n" if lines else "") + marker
    while True:
        found = cursor.text.find(marker, cursor.at)
        if found >= 0:
            text = cursor.take(found)
            give(quoted(text.removesuffix("\n") if lines else text) + '"')
            cursor.at += len(marker)
            return
        if text := cursor.take(len(cursor.text) - _held(cursor.text, cursor.at, end, marker)):
            give(quoted(text))
        if cursor.ended:
            raise Ended
        yield


def _held(text: str, begin: int, *ends: str) -> int:
    """Characters at the end of ``text`` that one of ``ends`` may begin with."""
    sizes = range(min(max(map(len, ends)) - 1, len(text) - begin), 0, -1)
    return next((size for size in sizes if any(end.startswith(text[-size:]) for end in ends)), 0)


def _read_python_string(cursor: Cursor, give: Give) -> Wait:
    quote = cursor.take(cursor.at + 1)
    give('"')
    while (character := (yield from cursor.peek())) != quote:
        give(
            (yield from _read_python_escape(cursor))
            if character == "\\"
            else quoted(cursor.match(_PYTHON_PLAIN[quote]))
        )
    cursor.take(cursor.at + 1)
    give('"')


def _read_python_escape(cursor: Cursor) -> Reads[str]:
    """An escape taken whole, as JSON writes it. One that Python does not know is its two characters, as in Python."""
    window = yield from cursor.window(2)
    letter = window[1:]
    if not letter:
        raise Ended
    size = 2 + _DIGITS.get(letter, 0)
    window = yield from cursor.window(size)
    if len(window) < size:
        raise Ended
    cursor.take(cursor.at + size)
    if letter not in _DIGITS:
        return _ESCAPED.get(letter, "\\\\" + quoted(letter))
    if not re.fullmatch("[0-9a-fA-F]+", window[2:]):
        raise Malformed
    code = int(window[2:], 16)
    if letter == "u":
        return window
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise Malformed
    return quoted(chr(code))
