"""Device figures stored as JSON files: written atomically, and read by the types of their dataclass.

What lives here: that file. What may not: what is in it, where it is stored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
    except FileNotFoundError as error:
        raise ConfigError(f"{what} {path} is not there; give the path of a file that is.") from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {path} cannot be read ({why}); {remedy}.") from error


def made_of(kind: type[T], stored: Mapping[str, Any]) -> T:
    """Inverse of ``dataclasses.asdict`` after a round trip through JSON. No number is negative or infinite. Raises
    ValueError."""
    import msgspec  # not for --help

    if unknown := stored.keys() - {each.name for each in fields(kind)}:
        raise ValueError(f"{min(unknown)} is not known")
    _check(stored)
    try:
        return msgspec.convert(stored, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _check(stored: Mapping[str, Any]) -> None:
    for name, value in stored.items():
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, Mapping):
                _check(each)
            elif isinstance(each, (int, float)) and not 0 <= each < math.inf:
                raise ValueError(f"{name} = {each}, which is not a number of at least 0")
