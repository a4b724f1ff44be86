"""Which algorithms of cuBLASLt were measured to be best for long steps: shipped ones, and those of this machine.

What lives here: reading and keeping the tables. What may not: measuring (bench/tune_vendor.py), calling the library.

The files are JSON: {device: {"outs x ins": [[least rows, rows it was measured with, settings…], …]}}, ascending. From so many rows on the
algorithm with these settings (cublaslt.py) computes the product; below, where there are none, and for other shapes, torch chooses.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cost.profile import profile_folder
from headrace.kernels.vendor.cublaslt import Settings

_log = logging.getLogger(__name__)
_UNREADABLE = (OSError, ValueError, TypeError, AttributeError)
SHIPPED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True)
class Choice:
    """From ``least`` rows on: the algorithm with these settings among those offered for ``measured`` rows; torch's choice for none."""

    least: int
    measured: int
    settings: Settings


Weight = tuple[int, int]  # [outs, ins]
Table = Mapping[Weight, tuple[Choice, ...]]


def measured_choices(device: str) -> Table:
    """By shape of the weight; what was measured on this machine goes before what is shipped."""
    return {**read_choices(SHIPPED, device), **read_choices(kept_choices(), device)}


def kept_choices() -> Path:
    """The file of this machine's own measurements."""
    return profile_folder().parent / "vendor_products.json"


def read_choices(path: Path, device: str) -> dict[Weight, tuple[Choice, ...]]:
    try:
        return _choices(_read(path), device)
    except _UNREADABLE as error:
        _log.warning("%s cannot be read (%s): torch chooses how products are computed; measure again or remove it", path, error)
        return {}


def keep_choices(path: Path, device: str, found: Table) -> None:
    """Adds to the file, in place of what it had for these shapes. One that cannot be read is begun anew."""
    try:
        held = _read(path)
        _choices(held, device)
    except _UNREADABLE:
        held = {}
    rows = {f"{outs} x {ins}": [[each.least, each.measured, *each.settings] for each in choices] for (outs, ins), choices in found.items()}
    held.setdefault(device, {}).update(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(_text(held), encoding="utf-8")
    beside.replace(path)


def _read(path: Path) -> dict[str, Any]:
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(held, dict):
        raise ValueError("it holds no object")
    return held


def _text(held: dict[str, Any]) -> str:
    """A line for each weight, so that changes can be read."""
    devices = []
    for device, weights in sorted(held.items()):
        lines = [f"  {json.dumps(key)}: {json.dumps(rows)}" for key, rows in sorted(weights.items())]
        devices.append(f"{json.dumps(device)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(devices) + "\n}\n"


def _choices(held: dict[str, Any], device: str) -> dict[Weight, tuple[Choice, ...]]:
    return {_weight(key): tuple(map(_choice, rows)) for key, rows in held.get(device, {}).items()}


def _weight(key: str) -> Weight:
    outs, ins = map(int, key.split(" x "))
    return outs, ins


def _choice(row: list[Any]) -> Choice:
    least, measured, *settings = row
    if len(settings) not in (0, 9) or not all(isinstance(each, int) for each in row):
        raise ValueError(f"{row} are not two counts of rows and nine settings or none")
    return Choice(least, measured, tuple(settings))
