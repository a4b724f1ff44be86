"""Decoded JSON as msgspec structs: what the bodies of all routes have in common (fields that are a struct's, known ones
that are refused, and nothing else), queries, and the one translator of what msgspec says is wrong into errors that name
the place.

What lives here: reading, the errors' words, token ids. What may not: fields of a route, what is told of them
(fields.toml).
"""

from __future__ import annotations

import re
import tomllib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct

from headrace.errors import InvalidRequest
from headrace.sampling_params import shown
from headrace.server.wire import PART_ITEMS

_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
_EXPECTED = re.compile(
    r"Expected `(?P<kinds>.+?)`(?:, got `(?P<got>\w+)`| (?P<length>of length )?(?P<bound>[<>]=?) (?P<limit>\S+))"
)
_PLACE = re.compile(r"(?P<said>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*?)(?P<member>\[\.\.\.\])?`)?$", re.S)
_STEP = re.compile(r"\[(\d+)\]|\.(\w+)")


def read(kind: Any, value: Any, where: str = "", *, strict: bool = True) -> Any:
    """``where``: what the client calls the value; "" for a body. ``strict``: numbers are no texts. Raises
    InvalidRequest."""
    try:
        return msgspec.convert(value, kind, strict=strict, str_keys=True)
    except msgspec.ValidationError as error:
        raise _translated(kind, value, where, str(error)) from None


def _translated(kind: Any, value: Any, where: str, text: str) -> InvalidRequest:
    found = _PLACE.match(text)
    assert found is not None, text
    said, path = found["said"], found["path"] or ""
    place = (where + path).lstrip(".")
    given, nodes = _looked_up(kind, value, path)
    if said.startswith("Invalid"):
        words = [str(word).lower() for node in nodes for word in node.get("enum", ()) if word is not None]
        part = place.removesuffix(".type") if path.endswith("].type") or path == ".type" else ""
        return _unknown_word(place, part, given, words)
    if said.startswith("Object"):
        name = said.partition("`")[2].rstrip("`")[:100]
        return _wrong_member(
            f"{place}.{name}".lstrip("."),
            "missing" in said,
            [name for node in nodes for name in node.get("properties", ())],
        )
    if found["key"] or found["member"]:
        return _unexpected(place, f"{'a key' if found['key'] else 'a value'} of {place}", said, None)
    return _unexpected(place, place, said, given)


def _wrong_member(name: str, missing: bool, known: list[str]) -> InvalidRequest:
    if missing:
        return InvalidRequest(f"{name} is missing; it is required.", param=name, code="missing_required_parameter")
    others = f" or use {', '.join(known)}" if known else ""
    return InvalidRequest(f"{name} is not supported; leave it out{others}.", param=name, code="unsupported_parameter")


def _unexpected(param: str, name: str, said: str, given: Any) -> InvalidRequest:
    """``given``: the value; None where it is not known."""
    found = _EXPECTED.match(said)
    if found is None:  # a number beyond what floats and 64 bits hold
        return InvalidRequest(f"{name} is out of range; give a smaller number.", param=param)
    wanted = " or ".join(_WORDS[kind] for kind in found["kinds"].split(" | ") if kind in _WORDS)
    if found["got"]:
        what = shown(given) if isinstance(given, str) else _WORDS.get(found["got"], "null")
        return InvalidRequest(f"{name} must be {wanted}, not {what}.", param=param, code="invalid_type")
    limit = f"at {'most' if '<' in found['bound'] else 'least'} {found['limit']}"
    if found["length"]:
        unit = "characters" if found["kinds"] == "str" else "entries"
        return InvalidRequest(f"{name} has {len(given)} {unit}; give {limit}.", param=param)
    rule = "must be" if given is None else f"is {shown(given)}; give"
    return InvalidRequest(f"{name} {rule} {wanted} of {limit}.", param=param)


def _unknown_word(place: str, part: str, given: Any, taken: list[str]) -> InvalidRequest:
    """``part``: what is of that type, where the type says what it is."""
    if part:
        kinds = ", ".join(taken)
        return InvalidRequest(
            f"{part} is of type {given[:40]!r}; this server takes {kinds} here.", param=part, code="unsupported_content"
        )
    return InvalidRequest(f"{place} is {shown(given)}; give {' or '.join(taken)}.", param=place)


def _looked_up(kind: Any, value: Any, path: str) -> tuple[Any, list[dict[str, Any]]]:
    """What stands at that path, and the schemas of what may stand there."""
    (schema,), parts = msgspec.json.schema_components([kind])
    nodes: list[Any] = [schema]
    for index, name in _STEP.findall(path):
        children = [
            node.get("items") if index else node.get("properties", {}).get(name)
            for node in _branches(nodes, parts, value)
        ]
        nodes = [child for child in children if child]
        value = value[int(index)] if index else value[name]
    return value, list(_branches(nodes, parts, value))


def _branches(nodes: Iterable[dict[str, Any]], parts: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    """The schemas of a value, where it says itself which of several it is that one."""
    for node in nodes:
        held = parts[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        by_tag = held.get("discriminator", {"propertyName": "", "mapping": {}})
        tag = value.get(by_tag["propertyName"]) if isinstance(value, dict) else None
        one = by_tag["mapping"].get(tag) if isinstance(tag, str) else None
        if "anyOf" in held:
            yield from _branches([{"$ref": one}] if one else held["anyOf"], parts, value)
        else:
            yield held


_MAX_FIELDS = 8

Query = TypeVar("Query", bound=Struct)


def read_query(query: bytes, kind: type[Query]) -> Query:
    """Raises InvalidRequest naming the parameter."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        known = ", ".join(kind.__struct_fields__)
        raise InvalidRequest(f"The query has more than {_MAX_FIELDS} parameters; use {known}.", param="query") from None
    names = [name for name, _ in pairs]
    twice = next((name for name in kind.__struct_fields__ if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"{twice} is given more than once; give it once.", param=twice)
    found: Query = read(kind, dict(pairs), strict=False)
    return found


_ID_FIELDS = frozenset(("prompt", "tokens", "allowed_token_ids"))  # whose readers take packed ids
# Objects of ours, of which a null member asks for nothing. What others hold is the template's, or the client's own.
OBJECTS = frozenset(("stream_options", "structured_outputs", "text", "reasoning", "thinking", "output_config"))

_LARGEST = 2**31 - 1
Label = Annotated[str, Meta(max_length=4096)]
TokenId = Annotated[int, Meta(ge=0, le=_LARGEST)]
Ids = Annotated[
    Any, Meta(extra_json_schema={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _LARGEST}})
]  # may be packed

_TEXT, _ID = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": _LARGEST}


def many(item: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The schema of a list of these."""
    return {"type": "array", "minItems": 1, "maxItems": most, "items": item}


def prompts_schema(most: int) -> dict[str, Any]:
    """Of what ``read_prompts`` takes."""
    ids = {"type": "array", "minItems": 1, "items": _ID}
    return {"anyOf": [_TEXT, ids, many(_TEXT, most), many(ids, most)]}


def texts_schema(most: int) -> dict[str, Any]:
    return {"anyOf": [_TEXT, many(_TEXT, most)]}


TOLD = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is known elsewhere and not supported here: an error, unless its value asks for nothing."""

    instead: str
    unless: Sequence[Any] = ()
    code: str = "unsupported_parameter"

    def check(self, name: str, value: Any) -> None:
        if value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in self.unless):
            raise InvalidRequest(f"{name} is not supported: {self.instead}.", param=name, code=self.code)


def refused(*tables: str) -> Mapping[str, Refused]:
    """What stands in these tables of fields.toml."""
    entries = {name: entry for table in tables for name, entry in TOLD["refused"][table].items()}
    return {name: Refused(entry) if isinstance(entry, str) else Refused(**entry) for name, entry in entries.items()}


class Body(Struct):
    """The fields of a route. Null says the same as leaving a field out: it is gone before the struct is made."""

    refused: ClassVar[Mapping[str, Refused]] = {}
    one_of: ClassVar[tuple[str, ...]] = ()  # fields of which exactly one is given
    aliases: ClassVar[Mapping[str, str]] = {}  # other names of fields, where these are not given by their own

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All that are known, taken or not."""
        return (*cls.__struct_fields__, *cls.refused)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Raises InvalidRequest naming the field."""
        taken, given = cls.__struct_fields__, {}
        for called, value in raw.items():
            meant = cls.aliases.get(called, called)
            name = called if meant in raw else meant
            if name in taken:
                if value is not None:
                    given[name] = _plain(name, value)
            elif name in cls.refused:
                cls.refused[name].check(name, value)
            else:
                raise InvalidRequest(
                    f"{name[:100]!r} is not a field of this route; leave it out or check its spelling.",
                    param=name[:100],
                    code="unknown_parameter",
                )
        body: Self = read(cls, given)
        return body


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, array) and name not in _ID_FIELDS:
        return value.tolist()
    if name in OBJECTS and isinstance(value, dict):
        return {key: member for key, member in value.items() if member is not None}
    return value


def check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} holds {count} entries; send at most {most} at once.", param=name)


def read_prompts(name: str, given: Any, most: int) -> list[str | array[int]]:
    """One text, one list of ids, or a list of either (not both kinds)."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | array) or not given:
        told = f"{name} must be a text, token ids, or a list of either, and not empty."
        raise InvalidRequest(told, param=name, code="invalid_type")
    if isinstance(given[0], int):
        return [read_ids(name, given)]
    check_count(name, len(given), most)
    if isinstance(given[0], str):
        if not all(isinstance(each, str) for each in given):
            raise InvalidRequest(f"{name} mixes texts with something else; give texts alone.", param=name)
        return list(given)
    return [read_ids(name, each) for each in given]


def read_ids(name: str, value: Any) -> array[int]:
    """The ids without their objects: what takes the list apart, a part at a time, leaves the interpreter to the event
    loop in between."""
    if isinstance(value, array):
        return value
    if not isinstance(value, list):
        raise _no_ids(name)
    ids: array[int] = array("i")
    for start in range(0, len(value), PART_ITEMS):
        part = value[start : start + PART_ITEMS]
        if set(map(type, part)) != {int}:
            raise _no_ids(name)
        if not -(2**31) <= min(part) <= max(part) < 2**31:
            raise InvalidRequest(
                f"{name} holds an id that is no 32-bit integer; give the model's own token ids.", param=name
            )
        ids.extend(part)
    while value:
        del value[-PART_ITEMS:]
    return ids


def _no_ids(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be a list of token ids (integers); check its items.", param=name)
