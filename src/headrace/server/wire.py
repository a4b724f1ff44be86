"""JSON on the wire: bytes in become plain objects, plain objects become bytes that every client can read.

What lives here: decoding under limits, encoding, the error body. What may not: fields of any route (dialects/), HTTP.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from headrace.errors import HeadraceError, InvalidRequest
from headrace.server.answer_types import Error, ErrorDetail

MAX_DEPTH = 64  # nested lists and objects in a body
MAX_CONTAINERS = 100_000  # lists and objects
MAX_STRINGS = 250_000
MAX_ITEMS = 1_500_000  # of all lists and objects together: what the longest prompt in token ids needs

# ASCII only: U+2028, U+2029 and U+0085 leave as escapes, so no client takes them for line ends.
quote = json.encoder.encode_basestring_ascii

# A thread keeps the event loop waiting until a call of C has returned: what is long is worked on in parts.
PART_ITEMS = 1 << 15
_PART_BYTES = 1 << 17
_COUNTED_BYTES = 1 << 20
_SLICE_ITEMS = 256  # of a list that is encoded: with their scores, half a megabyte

_CONTAINERS = frozenset((dict, list))
_decoder = msgspec.json.Decoder()  # strict: no NaN, no Infinity, no lone surrogates, no bytes after the value
_outline = msgspec.json.Decoder(dict[str, msgspec.Raw])  # the same; what the fields hold is not built
_integers = msgspec.json.Decoder(list[int])


def decode_object(body: bytes | bytearray, *, pack: bool = False) -> dict[str, Any]:
    """A request body as a dict. Raises InvalidRequest for anything that is not one JSON object of bounded depth.

    ``pack``: a field that is a long list of 32-bit integers becomes an array of them, without an object for each.
    """
    _check_size(body)
    try:
        value = _decoder.decode(body) if len(body) <= _PART_BYTES else _decode_parts(body, pack)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the text names bytes, never the content
        raise InvalidRequest(
            f"The body is not valid JSON in UTF-8 ({_cause(error)}); send one JSON object.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body is JSON but not an object; send one JSON object.", code="invalid_json")
    check_depth(value)
    return value


def _decode_parts(body: bytes | bytearray, pack: bool) -> Any:
    """As the decoder does, but with the interpreter free in between."""
    try:
        fields = _outline.decode(body)
    except msgspec.ValidationError:  # no object
        return _decoder.decode(body)
    return {name: _decode_value(bytes(raw), pack) for name, raw in fields.items()}


def _decode_value(value: bytes, pack: bool) -> Any:
    """A long list of numbers part by part: a million of them would take the interpreter for a tenth of a second."""
    if len(value) <= _PART_BYTES or value[:1] != b"[" or value.count(b"[") > 1 or b"{" in value or b'"' in value:
        return _decoder.decode(value)
    ids: array[int] = array("i")
    try:
        for part in _list_parts(value) if pack else ():
            ids.extend(_integers.decode(part))
    except (msgspec.ValidationError, OverflowError):  # other numbers
        ids = array("i")
    return ids or [item for part in _list_parts(value) for item in _decoder.decode(part)]


def _list_parts(value: bytes) -> Iterator[bytes]:
    """A list without lists, objects and strings in it, as several."""
    start, last = 1, len(value) - 1
    while start <= last:
        end = value.find(b",", start + _PART_BYTES, last)
        end = last if end < 0 else end
        yield b"[%b]" % value[start:end]
        start = end + 1


def _cause(error: Exception) -> str:
    return "bad UTF-8" if isinstance(error, UnicodeDecodeError) else str(error).partition(" - at ")[0]


def _check_size(body: bytes | bytearray) -> None:
    """Counts before anything is built: a few bytes of JSON can become many objects, each of which takes memory and
    time."""
    if (
        _count(body, b"[") + _count(body, b"{") <= MAX_CONTAINERS
        and _count(body, b'"') <= 2 * MAX_STRINGS
        and _count(body, b",") < MAX_ITEMS
    ):
        return  # strings may hold such characters too, so this is the most there can be
    # every quote that is left begins or ends a string
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    if _count(plain, b'"') > 2 * MAX_STRINGS:
        raise _too_large(f"{MAX_STRINGS} strings")
    outside = b"".join(plain.split(b'"')[::2])
    if _count(outside, b"[") + _count(outside, b"{") > MAX_CONTAINERS:
        raise _too_large(f"{MAX_CONTAINERS} lists and objects")
    if _count(outside, b",") >= MAX_ITEMS:
        raise _too_large(f"{MAX_ITEMS} items")


def _count(text: bytes | bytearray, mark: bytes) -> int:
    return sum(text.count(mark, start, start + _COUNTED_BYTES) for start in range(0, len(text), _COUNTED_BYTES))


def _too_large(what: str) -> InvalidRequest:
    return InvalidRequest(f"The body holds more than {what}; send less at once.", code="invalid_json")


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body nests deeper than {MAX_DEPTH} levels; flatten it.", code="invalid_json")


def _parts(node: Any) -> Iterator[Iterable[Any]]:
    """What a list or an object holds."""
    if type(node) is dict:
        yield node.values()
    else:
        yield from (node[start : start + PART_ITEMS] for start in range(0, len(node), PART_ITEMS))


def check_depth(value: Any) -> None:
    """Level by level, so that no input can exhaust the stack here or further in (templates recurse)."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            for children in _parts(node):
                if not _CONTAINERS.isdisjoint(map(type, children)):  # a long list of ids is passed over without a loop
                    below.extend(child for child in children if type(child) in _CONTAINERS)
        if not below:
            return
        level = below
    raise _too_deep()


def encode(value: Any) -> bytes:
    """Compact ASCII JSON. NaN and Infinity, which would end a client's stream, become null."""
    try:
        data = msgspec.json.encode(value)
        if data.isascii():
            return data
    except (OverflowError, UnicodeEncodeError):  # integers of more than 64 bits, lone surrogates
        pass
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":"), allow_nan=False).encode("ascii")


HOLE = "\x00"
_HOLE_JSON = '"\\u0000"'  # in no other text, for its quotes would be escaped


def around(value: Any) -> list[str]:
    """JSON before, between and behind the HOLEs in a value: what is written once for many events. Quoted text joins
    it."""
    return encode(value).decode().split(_HOLE_JSON)


def encode_object(members: Mapping[str, Any]) -> Iterator[bytes]:
    """As ``encode``, in pieces: a member that is an iterator gives pieces of JSON already."""
    begin = "{"
    for name, value in members.items():
        yield f"{begin}{quote(name)}:".encode("ascii")
        begin = ","
        if isinstance(value, Iterator):
            yield from value
        else:
            yield encode(value)
    yield b"{}" if begin == "{" else b"}"


def encode_list(items: Iterable[Any]) -> Iterator[bytes]:
    """As ``encode`` of a list, some items at a time: nobody waits for the interpreter until a long one is done."""
    rest, begin = iter(items), b"["
    while part := list(itertools.islice(rest, _SLICE_ITEMS)):
        yield begin
        yield encode(part)[1:-1]
        begin = b","
    yield b"[]" if begin == b"[" else b"]"


def joined_lists(*lists: bytes) -> Iterator[bytes]:
    """One list of several that are JSON already."""
    inner = [each[1:-1] for each in lists if len(each) > 2]
    yield b"["
    for number, each in enumerate(inner):
        yield b"," + each if number else each
    yield b"]"


class ErrorShape:
    """How an error reads on a route. A route may say more around the object that all of them have."""

    def body(self, error: HeadraceError) -> bytes:
        return encode(error_object(error))

    def event(self, error: HeadraceError) -> bytes:
        """In a stream that has begun."""
        return b"data: " + self.body(error) + b"\n\n"


def error_object(error: HeadraceError) -> Error:
    """The one shape of an error, at every status and in streams."""
    return Error(ErrorDetail(error.message, error.type, error.param, error.code))
