"""Which tile computes a gate and what it gates best, for how many rows: shipped measurements, and those of this machine.

What lives here: what a row of the tables means, where they are. What may not: measuring (bench/tune_gated.py), kernels.

A row is [most rows, columns of a tile], ascending; 0 columns where the vendor's product and an activation of its own are as quick. Beyond
the last row, and for weights that are not there, they always are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cost.profile import profile_folder
from headrace.kernels.tables import Weight, keep_rows, read_rows, weight_key, weight_of, whole_numbers

SHIPPED = Path(__file__).with_name("gated_measured.json")
COLUMNS = (256, 224, 192, 128)  # of a tile, of gate and what it gates together, that are worth trying

Tiles = tuple[tuple[int, int], ...]  # up to so many rows: so many columns


def measured_tiles(device: str) -> dict[Weight, Tiles]:
    """By shape of the gate; what was measured on this machine goes before what is shipped."""
    return {**read_tiles(SHIPPED, device), **read_tiles(kept_tiles(), device)}


def kept_tiles() -> Path:
    """The file of this machine's own measurements."""
    return profile_folder().parent / "gated_products.json"


def read_tiles(path: Path, device: str) -> dict[Weight, Tiles]:
    return read_rows(path, device, weight_of, _tile)


def keep_tiles(path: Path, device: str, found: Mapping[Weight, Tiles]) -> None:
    """Adds to the file, in place of what it had for these shapes."""
    keep_rows(path, device, weight_of, _tile, {weight_key(weight): tiles for weight, tiles in found.items()})


def _tile(row: list[Any]) -> tuple[int, int]:
    most, columns = whole_numbers(row)
    if columns not in (0, *COLUMNS):
        raise ValueError(f"{columns} columns are none of {COLUMNS}")
    return most, columns
