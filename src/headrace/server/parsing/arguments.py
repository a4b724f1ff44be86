"""Arguments that are not written as JSON, given out as JSON while they come: values between tags, and keys with literals.

What lives here: these two ways of writing, as readers on a cursor. What may not: names of calls and what surrounds them (parser.py).

What is given is the inside of one JSON object, from its opening brace on and without the closing one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping

from headrace.server.parsing.cursor import MAX_HEAD, Cursor, Ended, Malformed, Wait
from headrace.server.parsing.formats import Literals, Tags
from headrace.server.parsing.json_text import MAX_DEPTH, MAX_TEXT, Give, read_run

# JSON types that each parameter of a function may have.
Types = Mapping[str, Collection[str]]

_TEXT = ("string",)
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
        key = yield from read_up_to(cursor, tags.key_end)
        kinds = types.get(key, _ANY)
        if tags.kind_end:
            text = (yield from read_up_to(cursor, tags.kind_end)) == "true"
            kinds = _TEXT if text else [kind for kind in kinds if kind != "string"] or _ANY
        if tags.value_begin:
            yield from cursor.require(tags.value_begin)
        give(f'{lead}"{_quoted(key)}": ')
        lead = ", "
        yield from _read_tagged_value(cursor, tags, kinds, give)
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


def read_up_to(cursor: Cursor, end: str) -> Generator[None, None, str]:
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
    if tags.lines and (yield from cursor.window(1)) == "\n":
        cursor.take(cursor.at + 1)
    if set(types) == {"string"}:
        yield from _read_tagged_text(cursor, tags, give)
    elif "string" not in types and (yield from cursor.window(1)) in ("{", "["):
        yield from _read_literal(cursor, PYTHON, give)  # of which JSON is a part; some templates write the one, some the other
        yield from cursor.require(tags.value_end)
    else:
        yield from _read_tagged_scalar(cursor, tags, types, give)


def _read_tagged_text(cursor: Cursor, tags: Tags, give: Give) -> Wait:
    """Up to the end of the value."""
    give('"')
    end = ("\n" if tags.lines else "") + tags.value_end
    while True:
        found = cursor.text.find(tags.value_end, cursor.at)
        if found >= 0:
            text = cursor.take(found)
            give(_quoted(text.removesuffix("\n") if tags.lines else text) + '"')
            cursor.at += len(tags.value_end)
            return
        if text := cursor.take(len(cursor.text) - _held(cursor.text, cursor.at, end, tags.value_end)):
            give(_quoted(text))
        if cursor.ended:
            raise Ended
        yield


def _held(text: str, begin: int, *ends: str) -> int:
    """Characters at the end of ``text`` that one of ``ends`` may begin with."""
    sizes = range(min(max(map(len, ends)) - 1, len(text) - begin), 0, -1)
    return next((size for size in sizes if any(end.startswith(text[-size:]) for end in ends)), 0)


def _read_tagged_scalar(cursor: Cursor, tags: Tags, types: Collection[str], give: Give) -> Wait:
    end = tags.value_end
    limit = MAX_HEAD + len(end)
    while (found := cursor.text.find(end, cursor.at, cursor.at + limit)) < 0:
        if len(cursor.text) - cursor.at >= limit:  # as long as this only texts are
            yield from _read_tagged_text(cursor, tags, give)
            return
        if cursor.ended:
            raise Ended
        yield
    written = cursor.take(found)
    cursor.take(found + len(end))
    give(_as_json(written.removesuffix("\n") if tags.lines else written, types))


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


# --- keys and literals


PYTHON = Literals()


def read_keywords(cursor: Cursor, literals: Literals, give: Give) -> Wait:
    """``key=value, …)``, from behind the opening bracket on."""
    lead = "{"
    while (yield from cursor.space()) != literals.close:
        key = yield from read_word(cursor, _KEY)
        yield from cursor.require(literals.assign)
        give(f'{lead}"{_quoted(key)}": ')
        lead = ", "
        yield from _read_literal(cursor, literals, give)
        if (yield from cursor.space()) == ",":
            cursor.take(cursor.at + 1)
        elif (yield from cursor.space()) != literals.close:
            raise Malformed
    cursor.take(cursor.at + 1)
    if lead == "{":
        give(lead)


def _read_literal(cursor: Cursor, literals: Literals, give: Give) -> Wait:
    """One value, however deep, without recursion."""
    closers: list[str] = []
    while True:
        if (opener := (yield from cursor.space())) in _CLOSERS:
            if (yield from _enter(cursor, literals, give, closers, opener)):
                continue
        elif not (yield from _read_text(cursor, literals, give)):
            yield from _read_atom(cursor, give)
        if (yield from _leave(cursor, literals, give, closers)):
            return


def _read_text(cursor: Cursor, literals: Literals, give: Give) -> Generator[None, None, bool]:
    """A text between quotes, where one begins."""
    if literals.quote:
        quoted = yield from cursor.literal(literals.quote)
        if not quoted and cursor.ended and literals.quote.startswith(cursor.text[cursor.at :].strip()):
            raise Ended
        if quoted:
            yield from _read_tagged_text(cursor, Tags(key_begin="", key_end="", value_end=literals.quote, end=""), give)
            return True
    if (yield from cursor.space()) not in _PLAIN:
        return False
    yield from _read_python_string(cursor, give)
    return True


def _enter(cursor: Cursor, literals: Literals, give: Give, closers: list[str], opener: str) -> Generator[None, None, bool]:
    """Into a list, tuple or dict, up to its first value; False where it has none."""
    if len(closers) == MAX_DEPTH:
        raise Malformed
    closers.append(_CLOSERS[opener])
    cursor.take(cursor.at + 1)
    give("{" if opener == "{" else "[")
    if (yield from cursor.space()) == closers[-1]:
        _close(cursor, give, closers)
        return False
    yield from _read_key(cursor, literals, give, closers)
    return True


def _leave(cursor: Cursor, literals: Literals, give: Give, closers: list[str]) -> Generator[None, None, bool]:
    """After a value: out of what ends here, up to the next value; True where the outermost has ended."""
    while closers:
        character = yield from cursor.space()
        if character == ",":
            cursor.take(cursor.at + 1)
            if (yield from cursor.space()) != closers[-1]:
                give(", ")
                yield from _read_key(cursor, literals, give, closers)
                return False
        elif character != closers[-1]:
            raise Malformed
        _close(cursor, give, closers)
    return True


def _close(cursor: Cursor, give: Give, closers: list[str]) -> None:
    cursor.take(cursor.at + 1)
    give("}" if closers.pop() == "}" else "]")


def _read_key(cursor: Cursor, literals: Literals, give: Give, closers: list[str]) -> Wait:
    """Of a dict; where texts have a quote of their own, keys may stand without."""
    if closers[-1] != "}":
        return
    if not (yield from _read_text(cursor, literals, give)):
        if not literals.quote:
            raise Malformed
        yield from cursor.space()
        give(f'"{_quoted((yield from read_word(cursor, _KEY)))}"')
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
