"""Arguments that are not written as JSON, given out as JSON while they come: values between tags, and Python's keyword arguments.

What lives here: these two ways of writing, as readers on a cursor. What may not: names of calls and what surrounds them (parser.py).

What is given is the inside of one JSON object, from its opening brace on and without the closing one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping

from headrace.server.parsing.cursor import MAX_HEAD, Cursor, Ended, Malformed, Wait
from headrace.server.parsing.formats import Tags
from headrace.server.parsing.json_text import MAX_DEPTH, MAX_TEXT, Give, read_run, read_value

# JSON types that each parameter of a function may have.
Types = Mapping[str, Collection[str]]

_ANY = ("string", "integer", "number", "boolean", "null", "object", "array")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_ATOM = re.compile(r"[-+.0-9A-Za-z_]+")
_KEY = re.compile(r"\w")
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPED = {"'": "'", '"': '\\"', "/": "/", "\\": "\\\\", "n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f"}
_DIGITS = {"x": 2, "u": 4, "U": 8}


def read_word(cursor: Cursor, letters: re.Pattern[str]) -> Generator[None, None, str]:
    """Characters that are ``letters``, up to the first that is none. Raises Malformed where there are none or too many."""
    word = ""
    while len(word) <= MAX_TEXT and letters.match((yield from cursor.peek())):
        word += cursor.take(cursor.at + 1)
    if not word or len(word) > MAX_TEXT:
        raise Malformed
    return word


def _quoted(text: str) -> str:
    """The inside of a JSON string. Pieces put together are the whole text's."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


# --- between tags


def read_tagged(cursor: Cursor, tags: Tags, types: Types, give: Give) -> Wait:
    """``key_begin KEY key_end value_begin VALUE value_end``, as often as it comes, then the end."""
    lead = "{"
    while (yield from _another(cursor, tags)):
        key = yield from _read_up_to(cursor, tags.key_end)
        if tags.value_begin:
            yield from cursor.require(tags.value_begin)
        give(f'{lead}"{_quoted(key)}": ')
        lead = ", "
        yield from _read_tagged_value(cursor, tags, types.get(key, _ANY), give)
    if lead == "{":
        give(lead)


def _another(cursor: Cursor, tags: Tags) -> Generator[None, None, bool]:
    """Whether one more begins; else the end is taken."""
    if (yield from cursor.literal(tags.key_begin)):
        return True
    rest = cursor.text[cursor.at :].lstrip()
    if cursor.ended and tags.key_begin.startswith(rest):
        raise Ended
    yield from cursor.require(tags.end)
    return False


def _read_up_to(cursor: Cursor, end: str) -> Generator[None, None, str]:
    """A short text and the marker after it."""
    written = ""
    while not written.endswith(end):
        yield from cursor.peek()
        written += cursor.take(cursor.at + 1)
        if len(written) > MAX_TEXT:
            raise Malformed
    return written[: -len(end)].strip()


def _read_tagged_value(cursor: Cursor, tags: Tags, types: Collection[str], give: Give) -> Wait:
    """A text stays one, as it comes; JSON does where no text may stand; of anything else only the end shows what it is."""
    if (yield from cursor.window(1)) == "\n":
        cursor.take(cursor.at + 1)
    if set(types) == {"string"}:
        yield from _read_tagged_text(cursor, tags.value_end, give)
    elif "string" not in types and (yield from cursor.window(1)) in ("{", "["):
        yield from read_value(cursor, inner := _Closed(give))
        inner.close()
        yield from cursor.require(tags.value_end)
    else:
        yield from _read_tagged_scalar(cursor, tags.value_end, types, give)


class _Closed:
    """``read_value`` keeps the last bracket back; here the value is whole with it."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self._first = ""

    def __call__(self, text: str) -> None:
        self._first = self._first or text.lstrip()[:1]
        self._give(text)

    def close(self) -> None:
        self._give("}" if self._first == "{" else "]")


def _read_tagged_text(cursor: Cursor, end: str, give: Give) -> Wait:
    """Up to ``end`` and the new line before it."""
    give('"')
    while True:
        found = cursor.text.find(end, cursor.at)
        if found >= 0:
            give(_quoted(cursor.take(found).removesuffix("\n")) + '"')
            cursor.at += len(end)
            return
        if text := cursor.take(len(cursor.text) - _held(cursor.text, cursor.at, end)):
            give(_quoted(text))
        if cursor.ended:
            raise Ended
        yield


def _held(text: str, begin: int, end: str) -> int:
    """Characters at the end of ``text`` that may belong to a new line and ``end``."""
    room = len(text) - begin
    return next((size for size in range(min(len(end), room), 0, -1) if f"\n{end}".startswith(text[-size:]) or end.startswith(text[-size:])), 0)


def _read_tagged_scalar(cursor: Cursor, end: str, types: Collection[str], give: Give) -> Wait:
    limit = MAX_HEAD + len(end)
    while (found := cursor.text.find(end, cursor.at, cursor.at + limit)) < 0:
        if len(cursor.text) - cursor.at >= limit:  # as long as this only texts are
            yield from _read_tagged_text(cursor, end, give)
            return
        if cursor.ended:
            raise Ended
        yield
    written = cursor.take(found).removesuffix("\n")
    cursor.take(found + len(end))
    give(_as_json(written, types))


def _as_json(written: str, types: Collection[str]) -> str:
    """JSON of one of ``types`` as it is, Python's words for it in JSON's, everything else as a text."""
    text = _WORDS.get(written.strip(), written.strip())
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{_quoted(written)}"'
    kind = _type_of(value)
    fits = "string" not in types or kind in types or (kind == "integer" and "number" in types)
    return text if fits else f'"{_quoted(written)}"'


def _refuse(name: str) -> None:
    raise ValueError(name)


def _type_of(value: object) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


# --- Python's


def read_keywords(cursor: Cursor, give: Give) -> Wait:
    """``key=value, …)``, from behind the opening bracket on. Values are Python's literals, or JSON's."""
    lead = "{"
    while (yield from cursor.space()) != ")":
        key = yield from read_word(cursor, _KEY)
        yield from cursor.require("=")
        give(f'{lead}"{_quoted(key)}": ')
        lead = ", "
        yield from _read_literal(cursor, give)
        if (yield from cursor.space()) == ",":
            cursor.take(cursor.at + 1)
        elif (yield from cursor.space()) != ")":
            raise Malformed
    cursor.take(cursor.at + 1)
    if lead == "{":
        give(lead)


def _read_literal(cursor: Cursor, give: Give) -> Wait:
    """One value, however deep, without recursion."""
    closers: list[str] = []
    while True:
        if (opener := (yield from cursor.space())) in _CLOSERS:
            if (yield from _enter(cursor, give, closers, opener)):
                continue
        elif opener in _PLAIN:
            yield from _read_python_string(cursor, give)
        else:
            yield from _read_atom(cursor, give)
        if (yield from _leave(cursor, give, closers)):
            return


def _enter(cursor: Cursor, give: Give, closers: list[str], opener: str) -> Generator[None, None, bool]:
    """Into a list, tuple or dict, up to its first value; False where it has none."""
    if len(closers) == MAX_DEPTH:
        raise Malformed
    closers.append(_CLOSERS[opener])
    cursor.take(cursor.at + 1)
    give("{" if opener == "{" else "[")
    if (yield from cursor.space()) == closers[-1]:
        _close(cursor, give, closers)
        return False
    yield from _read_key(cursor, give, closers)
    return True


def _leave(cursor: Cursor, give: Give, closers: list[str]) -> Generator[None, None, bool]:
    """After a value: out of what ends here, up to the next value; True where the outermost has ended."""
    while closers:
        character = yield from cursor.space()
        if character == ",":
            cursor.take(cursor.at + 1)
            if (yield from cursor.space()) != closers[-1]:
                give(", ")
                yield from _read_key(cursor, give, closers)
                return False
        elif character != closers[-1]:
            raise Malformed
        _close(cursor, give, closers)
    return True


def _close(cursor: Cursor, give: Give, closers: list[str]) -> None:
    cursor.take(cursor.at + 1)
    give("}" if closers.pop() == "}" else "]")


def _read_key(cursor: Cursor, give: Give, closers: list[str]) -> Wait:
    if closers[-1] != "}":
        return
    if (yield from cursor.space()) not in _PLAIN:
        raise Malformed
    yield from _read_python_string(cursor, give)
    yield from cursor.require(":")
    give(": ")


def _read_python_string(cursor: Cursor, give: Give) -> Wait:
    quote = cursor.take(cursor.at + 1)
    give('"')
    while (character := (yield from cursor.peek())) != quote:
        give((yield from _read_python_escape(cursor)) if character == "\\" else _quoted(cursor.match(_PLAIN[quote])))
    cursor.take(cursor.at + 1)
    give('"')


def _read_python_escape(cursor: Cursor) -> Generator[None, None, str]:
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
        return _ESCAPED.get(letter, "\\\\" + _quoted(letter))
    if not re.fullmatch("[0-9a-fA-F]+", window[2:]):
        raise Malformed
    code = int(window[2:], 16)
    if letter == "u":
        return window
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise Malformed
    return _quoted(chr(code))


def _read_atom(cursor: Cursor, give: Give) -> Wait:
    """A number or a word of Python's or of JSON's."""
    atom = yield from read_run(cursor, _ATOM)
    if atom not in _WORDS and not _NUMBER.fullmatch(atom):
        raise Malformed
    give(_WORDS.get(atom, atom))
