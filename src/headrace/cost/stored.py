"""Device figures stored as JSON files: written atomically, and read by the types of their dataclass.

What lives here: that file. What may not: what is in it, where it is stored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)


def save(value: DataclassInstance, path: Path, **version: int) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps({**version, **asdict(value)}, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    scratch.replace(path)


def load(kind: type[T], path: Path, what: str, remedy: str, **version: int) -> T:
    """Inverse of ``save``. Raises ConfigError."""
    ((key, expected),) = version.items()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if (found := stored.pop(key)) != expected:
            raise ConfigError(
                f"{what} {path} has version {found!r}, but this program reads version {expected}; {remedy}."
            )
        return made_of(kind, stored)
    except KeyError as error:
        raise ConfigError(f"{what} {path} cannot be read ({error} is missing); {remedy}.") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {path} cannot be read ({why}); {remedy}.") from error


def made_of(kind: type[T], stored: Mapping[str, Any]) -> T:
    """Inverse of ``dataclasses.asdict`` after a round trip through JSON. No number is negative or infinite. Raises
    TypeError, ValueError or AttributeError."""
    hints = _field_types(kind)
    return kind(**{name: _made_of(hints.get(name), value, name) for name, value in stored.items()})


@cache
def _field_types(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _made_of(kind: Any, value: Any, name: str) -> Any:
    if isinstance(value, (int, float)) and not 0 <= value < math.inf:
        raise ValueError(f"{name} = {value}, which is not a number of at least 0")
    if kind in (float, int, str):  # most values
        return value
    if get_origin(kind) is UnionType and value is not None:  # something, or None
        kind = get_args(kind)[0]
    if get_origin(kind) is tuple:
        return tuple(_made_of(get_args(kind)[0], each, name) for each in value)
    return made_of(kind, value) if isinstance(kind, type) and is_dataclass(kind) and value is not None else value
