"""Tables of what was measured: a JSON file of {device: {"outs x ins": rows}}, a row a list of numbers.

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
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError)

Weight = tuple[int, int]  # [outs, ins]
Row = TypeVar("Row")


def read_rows(path: Path, device: str, row: Callable[[Sequence[int]], Row]) -> dict[Weight, tuple[Row, ...]]:
    """By shape of the weight. ``row`` raises ValueError for numbers that it does not understand."""
    try:
        return _rows(_read(path), device, row)
    except _UNREADABLE as error:
        _log.warning("%s cannot be read (%s): what was measured there is not used; measure again or remove it", path, error)
        return {}


def keep_rows(path: Path, device: str, found: Mapping[Weight, Sequence[Sequence[int]]]) -> None:
    """Adds to the file, in place of what it had for these weights."""
    try:
        held = _read(path)
        _rows(held, device, tuple)
    except _UNREADABLE:
        held = {}
    held.setdefault(device, {}).update({f"{outs} x {ins}": [list(row) for row in rows] for (outs, ins), rows in found.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(_text(held), encoding="utf-8")
    beside.replace(path)


def _read(path: Path) -> dict[str, Any]:
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(held, dict):
        raise ValueError("it holds no object")
    return held


def _rows(held: dict[str, Any], device: str, row: Callable[[Sequence[int]], Row]) -> dict[Weight, tuple[Row, ...]]:
    found = {}
    for key, rows in held.get(device, {}).items():
        outs, ins = map(int, key.split(" x "))
        if not all(isinstance(each, list) and all(type(number) is int for number in each) for each in rows):
            raise ValueError(f"{key} has rows that are no lists of whole numbers")
        found[outs, ins] = tuple(map(row, rows))
    return found


def _text(held: dict[str, Any]) -> str:
    """A line for each weight, so that changes can be read."""
    devices = []
    for device, weights in sorted(held.items()):
        lines = [f"  {json.dumps(key)}: {json.dumps(rows)}" for key, rows in sorted(weights.items())]
        devices.append(f"{json.dumps(device)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(devices) + "\n}\n"
