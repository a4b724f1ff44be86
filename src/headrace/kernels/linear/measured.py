"""What was measured to compute products best: forms by the device, the operation, the weight's shape and the number of
rows.

What lives here: reading and keeping tables, the shipped one (measured.json) and this machine's own. What may not: what
a row means (whoever has forms), measuring (bench/tune.py).

A table is {device: {operation: {shape: rows}}}, a row a list of numbers and words. A file that cannot be read counts as
empty, with a warning; who keeps something there begins it anew.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from headrace.cost.profile import profile_folder
from headrace.kernels.candidate import Shape

_log = logging.getLogger(__name__)
SHIPPED = Path(__file__).with_name("measured.json")
LIKE = {
    "NVIDIA H100 80GB HBM3": "NVIDIA H200",
    "NVIDIA H200": "NVIDIA H100 80GB HBM3",
}  # one processor: the other's go before rules
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError, RecursionError)

Row = TypeVar("Row")
Table = Mapping[Shape, tuple[Row, ...]]


def kept_file() -> Path:
    """This machine's own measurements."""
    return profile_folder().parent / "measured_forms.json"


@dataclass(frozen=True, slots=True)
class Measured(Generic[Row]):
    """One operation's forms. ``row_of`` raises ValueError for what it does not understand."""

    op: str
    row_of: Callable[[list[Any]], Row]
    values_of: Callable[[Row], Sequence[Any]]

    def table(self, device: str) -> Table[Row]:
        """By shape of the weight; what was measured on this machine goes before what is shipped, and that before what
        another card's is."""
        like = self.read(SHIPPED, LIKE[device]) if device in LIKE else {}
        return {**like, **self.read(SHIPPED, device), **self.read(kept_file(), device)}

    def read(self, path: Path, device: str) -> Table[Row]:
        try:
            return self._understood(_read(path, path.stat().st_mtime_ns if path.exists() else 0).get(device, {}))
        except _UNREADABLE as error:
            _log.warning(
                "%s cannot be read (%s): what was measured there is not used; measure again or remove it", path, error
            )
            return {}

    def keep(self, device: str, found: Table[Row], path: Path | None = None) -> Path:
        """Adds to the file, in place of what it had for these shapes. What ``read`` would not understand is begun
        anew."""
        path = path or kept_file()
        try:
            held = _load(path)
            for each in held.values():
                self._understood(each)
        except _UNREADABLE:
            held = {}
        tables = held.setdefault(device, {}).setdefault(self.op, {})
        tables.update({shape.key: [list(self.values_of(row)) for row in rows] for shape, rows in found.items()})
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(_text(held) + "\n", encoding="utf-8")
        beside.replace(path)
        return path

    def _understood(self, tables: dict[str, Any]) -> dict[Shape, tuple[Row, ...]]:
        found = {}
        for key, rows in tables.get(self.op, {}).items():
            if not all(isinstance(each, list) for each in rows):
                raise ValueError(f"{key} has rows that are no lists")
            found[Shape.of_key(key)] = tuple(map(self.row_of, rows))
        return found


def whole_numbers(row: list[Any]) -> list[int]:
    """The row as it is. Raises ValueError where something else is in it."""
    if not all(type(number) is int for number in row):
        raise ValueError(f"{row} are not whole numbers")
    return row


@lru_cache(maxsize=4)
def _read(path: Path, written: int) -> Mapping[str, Any]:
    """As it was ``written``: a start asks for each operation and card. Nobody changes it."""
    return _load(path)


def _load(path: Path) -> dict[str, Any]:
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(held, dict):
        raise ValueError("it holds no object")
    return held


def _text(held: Any, depth: int = 0) -> str:
    """A line for each row, so that changes can be read."""
    margin, outer = "  " * depth, "  " * (depth - 1)
    if isinstance(held, dict):
        parts: Iterable[str] = (
            f"{margin}{json.dumps(key)}: {_text(value, depth + 1)}" for key, value in sorted(held.items())
        )
        return "{\n" + ",\n".join(parts) + f"\n{outer}}}"
    return "[\n" + ",\n".join(f"{margin}{json.dumps(row)}" for row in held) + f"\n{outer}]"
