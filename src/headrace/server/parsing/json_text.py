"""JSON read in pieces, strictly: as it comes, it is given out, and a character that cannot follow is noticed at once.

What lives here: values and strings as readers on a cursor. What may not: recursion (depth is bounded and on a list), building values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from headrace.server.parsing.cursor import Cursor, Ended, Malformed, Wait

MAX_DEPTH = 128
MAX_SCALAR = 256  # characters of a number
MAX_TEXT = 256  # characters of a string that is wanted whole

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SCALAR = re.compile(r"(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_SCALAR_PART = re.compile(r"[-+.0-9A-Za-z]+")
_SPACE = re.compile(r"[ \t\r\n]+")

Give = Callable[[str], None]


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


def read_run(cursor: Cursor, letters: re.Pattern[str]) -> Generator[None, None, str]:
    """A number or a word made of ``letters``; whole, because only what follows shows where it ends. Raises Malformed, Ended."""
    while True:
        found = letters.match(cursor.text, cursor.at)
        end = cursor.at if found is None else found.end()
        if end == cursor.at or end - cursor.at > MAX_SCALAR:
            raise Malformed
        if end < len(cursor.text):
            break
        if cursor.ended:
            raise Ended
        yield
    return cursor.take(end)


def _read_scalar(cursor: Cursor, give: Give) -> Wait:
    """A number, true, false or null."""
    scalar = yield from read_run(cursor, _SCALAR_PART)
    if not _SCALAR.fullmatch(scalar):
        raise Malformed
    give(scalar)


def read_value(cursor: Cursor, give: Give) -> Wait:
    """Any value. The brace or bracket that ends it is taken but not given: whether what it belongs to is whole may not be known yet."""
    closers: list[str] = []
    while True:
        character = yield from _space(cursor, give)
        if character in "{[":
            entered = yield from _enter(cursor, give, closers, character)
            if entered:
                continue
        else:
            yield from (read_string if character == '"' else _read_scalar)(cursor, give)
        if not closers or (yield from _leave(cursor, give, closers)):
            return


def _enter(cursor: Cursor, give: Give, closers: list[str], opener: str) -> Generator[None, None, bool]:
    """Into an object or a list, up to its first value; False where it has none."""
    if len(closers) == MAX_DEPTH:
        raise Malformed
    closers.append("}" if opener == "{" else "]")
    give(cursor.take(cursor.at + 1))
    if (yield from _space(cursor, give)) == closers[-1]:
        return False
    if opener == "{":
        yield from _read_key(cursor, give)
    return True


def _leave(cursor: Cursor, give: Give, closers: list[str]) -> Generator[None, None, bool]:
    """After a value: out of what ends here, up to the next value; True where the outermost has ended."""
    while (character := (yield from _space(cursor, give))) == closers[-1]:
        end = cursor.take(cursor.at + 1)
        closers.pop()
        if not closers:
            return True
        give(end)
    if character != ",":
        raise Malformed
    give(cursor.take(cursor.at + 1))
    if closers[-1] == "}":
        yield from _read_key(cursor, give)
    return False


def _read_key(cursor: Cursor, give: Give) -> Wait:
    if (yield from _space(cursor, give)) != '"':
        raise Malformed
    yield from read_string(cursor, give)
    if (yield from _space(cursor, give)) != ":":
        raise Malformed
    give(cursor.take(cursor.at + 1))


def _space(cursor: Cursor, give: Give) -> Generator[None, None, str]:
    """The next character that is no white space."""
    while (character := (yield from cursor.peek())) in " \t\r\n":
        give(cursor.match(_SPACE))
    return character


def read_text(cursor: Cursor) -> Generator[None, None, str]:
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
