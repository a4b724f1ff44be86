"""Tables of what was measured: a JSON file of {device: {what of: rows}}, a row a list of numbers and words.

What lives here: reading and keeping them. What may not: what a row means, measuring.

A file that cannot be read counts as empty, with a warning; who keeps something there begins it anew.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError)

Weight = tuple[int, int]  # [outs, ins]
Key = TypeVar("Key")
Row = TypeVar("Row")


def read_rows(path: Path, device: str, key: Callable[[str], Key], row: Callable[[list[Any]], Row]) -> dict[Key, tuple[Row, ...]]:
    """``key`` and ``row`` raise ValueError for what they do not understand."""
    try:
        return _rows(_read(path), device, key, row)
    except _UNREADABLE as error:
        _log.warning("%s cannot be read (%s): what was measured there is not used; measure again or remove it", path, error)
        return {}


def keep_rows(
    path: Path, device: str, key: Callable[[str], Any], row: Callable[[list[Any]], Any], found: Mapping[str, Sequence[Sequence[Any]]]
) -> None:
    """Adds to the file, in place of what it had under these keys; a file that ``read_rows`` would not understand is begun anew."""
    try:
        held = _read(path)
        for each in held:
            _rows(held, each, key, row)
    except _UNREADABLE:
        held = {}
    held.setdefault(device, {}).update({key: [list(row) for row in rows] for key, rows in found.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(_text(held), encoding="utf-8")
    beside.replace(path)


def weight_key(weight: Weight) -> str:
    return f"{weight[0]} x {weight[1]}"


def weight_of(key: str) -> Weight:
    outs, ins = map(int, key.split(" x "))
    return outs, ins


def whole_numbers(row: list[Any]) -> list[int]:
    """The row as it is. Raises ValueError where something else is in it."""
    if not all(type(number) is int for number in row):
        raise ValueError(f"{row} are not whole numbers")
    return row


def _read(path: Path) -> dict[str, Any]:
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(held, dict):
        raise ValueError("it holds no object")
    return held


def _rows(held: dict[str, Any], device: str, key: Callable[[str], Key], row: Callable[[list[Any]], Row]) -> dict[Key, tuple[Row, ...]]:
    found = {}
    for name, rows in held.get(device, {}).items():
        if not all(isinstance(each, list) for each in rows):
            raise ValueError(f"{name} has rows that are no lists")
        found[key(name)] = tuple(map(row, rows))
    return found


def _text(held: dict[str, Any]) -> str:
    """A line for each row, so that changes can be read."""
    devices = []
    for device, tables in sorted(held.items()):
        lines = [f"  {json.dumps(key)}: [\n    {_lines(rows)}\n  ]" for key, rows in sorted(tables.items())]
        devices.append(f"{json.dumps(device)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(devices) + "\n}\n"


def _lines(rows: list[Any]) -> str:
    return ",\n    ".join(map(json.dumps, rows))
