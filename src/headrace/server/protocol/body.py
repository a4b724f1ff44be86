"""A body whose fields are all known to its route and of the types that fields.py says.

What lives here: the one check of names and types for every route, ids and sizes. What may not: what a field means.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.fields import Field, Use
from headrace.server.wire import PART_ITEMS

MAX_LABEL = 4096  # characters of a label
_LARGEST_INTEGER = 2**64
_ID_FIELDS = frozenset(("prompt", "tokens", "allowed_token_ids"))  # whose readers take packed ids

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list, array),
    "object": (dict,),
}


class Body:
    """A body whose fields are all known to its route; null means absent."""

    def __init__(self, raw: Mapping[str, Any], fields: Iterable[Field]) -> None:
        self._fields = {field.name: field for field in fields}
        self._values = {name: _unpacked(name, value) for name, value in raw.items() if value is not None}
        unknown = next((name for name in raw if name not in self._fields), None)
        if unknown is not None:
            raise InvalidRequest(
                f"{unknown[:100]!r} is not a field of this route; leave it out or check its spelling.", param=unknown[:100], code="unknown_parameter"
            )
        for name, value in self._values.items():
            _check(self._fields[name], value)
        # What is left of refused fields asks for nothing.
        self._values = {name: value for name, value in self._values.items() if self._fields[name].use is not Use.REFUSED}

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def require(self, name: str) -> Any:
        if name not in self._values:
            raise InvalidRequest(f"{name} is missing; it is required.", param=name, code="missing_required_parameter")
        return self._values[name]

    def sampling(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if self._fields[name].use is Use.SAMPLING}


def _unpacked(name: str, value: Any) -> Any:
    return value.tolist() if isinstance(value, array) and name not in _ID_FIELDS else value


def _check(field: Field, value: Any) -> None:
    """Types of everything but sampling parameters, which have a validator of their own."""
    if field.use is Use.REFUSED:
        if not any(type(value) is type(neutral) and value == neutral for neutral in field.neutral):
            raise InvalidRequest(f"{field.name} is not supported: {field.help}.", param=field.name, code=field.code)
    elif field.use is Use.SAMPLING:
        check_size(field.name, value)
    else:
        _check_type(field, value)


def _check_type(field: Field, value: Any) -> None:
    names = (field.schema,) if isinstance(field.schema, str) else field.schema
    accepted = tuple(kind for name in names for kind in _TYPES[name])
    if not isinstance(value, accepted) or (isinstance(value, bool) and "boolean" not in names):
        raise InvalidRequest(f"{field.name} must be {_either(names)}, not {_shown(value)}.", param=field.name, code="invalid_type")
    if field.use is Use.LABEL and isinstance(value, str) and len(value) > MAX_LABEL:
        raise InvalidRequest(f"{field.name} has {len(value)} characters; give at most {MAX_LABEL}.", param=field.name)


def check_size(name: str, value: Any) -> None:
    """JSON integers have no bound; beyond 64 bits they are nobody's meaning and overflow floats."""
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise InvalidRequest(f"{name} is an integer beyond 64 bits; give a smaller one.", param=name)


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(f"{'an' if name[0] in 'aio' else 'a'} {name}" for name in names)


def _shown(value: Any) -> str:
    words = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", array: "an array", dict: "an object"}
    return words[type(value)]


def read_ids(name: str, value: Any) -> array[int]:
    """The ids without their objects: what takes the list apart, a part at a time, leaves the interpreter to the event loop in between."""
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
            raise InvalidRequest(f"{name} holds an id that is no 32-bit integer; give the model's own token ids.", param=name)
        ids.extend(part)
    while value:
        del value[-PART_ITEMS:]
    return ids


def _no_ids(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be a list of token ids (integers); check its items.", param=name)
