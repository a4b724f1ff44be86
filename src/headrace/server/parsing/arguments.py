"""Arguments that are written between tags, given out as JSON while they come.

What lives here: that way of writing, as a reader on a cursor. What may not: names of calls and what surrounds them
(parser.py), values as JSON or Python write them (values.py).

What is given is the inside of one JSON object, from its opening brace on and without the closing one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from headrace.server.parsing.cursor import MAX_HEAD, Cursor, Ended, Malformed, Reads, Wait
from headrace.server.parsing.formats import Tags
from headrace.server.parsing.values import MAX_TEXT, WORDS, Give, quoted, read_literal, read_until

# JSON types that each parameter of a function may have.
Types = Mapping[str, Collection[str]]

_TEXT = ("string",)
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_ANY = ("string", "integer", "number", "boolean", "null", "object", "array")


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
        give(f'{lead}"{quoted(key)}": ')
        lead = ", "
        yield from _read_tagged_value(cursor, tags, kinds, give)
    if lead == "{":
        give(lead)


def _another(cursor: Cursor, tags: Tags) -> Reads[bool]:
    """Whether one more begins; else the end is taken."""
    if (yield from cursor.literal(tags.key_begin)):
        return True
    rest = cursor.text[cursor.at :].lstrip()
    if cursor.ended and tags.key_begin.startswith(rest):
        raise Ended
    yield from cursor.require(tags.end)
    return False


def read_up_to(cursor: Cursor, end: str) -> Reads[str]:
    """A short text and the marker after it."""
    written = ""
    while not written.endswith(end):
        yield from cursor.peek()
        written += cursor.take(cursor.at + 1)
        if len(written) > MAX_TEXT:
            raise Malformed
    return written[: -len(end)].strip()


def _read_tagged_value(cursor: Cursor, tags: Tags, types: Collection[str], give: Give) -> Wait:
    """A text stays one, as it comes; JSON does where no text may stand; of anything else only the end shows what it
    is."""
    if tags.lines and (yield from cursor.window(1)) == "\n":
        cursor.take(cursor.at + 1)
    if set(types) == {"string"}:
        yield from read_until(cursor, tags.value_end, give, lines=tags.lines)
    elif "string" not in types and (yield from cursor.window(1)) in ("{", "["):
        yield from read_literal(cursor, give)  # of which JSON is a part; some templates write the one, some the other
        yield from cursor.require(tags.value_end)
    else:
        yield from _read_tagged_scalar(cursor, tags, types, give)


def _read_tagged_scalar(cursor: Cursor, tags: Tags, types: Collection[str], give: Give) -> Wait:
    end = tags.value_end
    limit = MAX_HEAD + len(end)
    while (found := cursor.text.find(end, cursor.at, cursor.at + limit)) < 0:
        if len(cursor.text) - cursor.at >= limit:  # as long as this only texts are
            yield from read_until(cursor, tags.value_end, give, lines=tags.lines)
            return
        if cursor.ended:
            raise Ended
        yield
    written = cursor.take(found)
    cursor.take(found + len(end))
    give(_as_json(written.removesuffix("\n") if tags.lines else written, types))


def _as_json(written: str, types: Collection[str]) -> str:
    """JSON of one of ``types`` as it is, Python's words for it in JSON's, everything else as a text."""
    text = WORDS.get(written.strip(), written.strip())
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{quoted(written)}"'
    kind = _KINDS.get(type(value), "null")
    fits = "string" not in types or kind in types or (kind == "integer" and "number" in types)
    return text if fits else f'"{quoted(written)}"'


def _refuse(name: str) -> None:
    raise ValueError(name)
