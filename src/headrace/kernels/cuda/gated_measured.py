"""Which tile computes a gate and what it gates best, for how many rows: shipped measurements, and those of this machine.

What lives here: what a row of the tables means, where they are. What may not: measuring (bench/tune_gated.py), kernels.

A row is [most rows, columns of a tile], with a 1 behind it for tiles that are taken in turns; ascending. 0 columns where the vendor's product
and an activation of its own are as quick. Beyond the last row, and for weights that are not there, they always are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cost.profile import profile_folder
from headrace.kernels.tables import Weight, keep_rows, read_rows, weight_key, weight_of, whole_numbers

SHIPPED = Path(__file__).with_name("gated_measured.json")


@dataclass(frozen=True, slots=True)
class Tile:
    """``columns`` of gate and what it gates together. ``turns``: two groups of warps take tiles in turn, each a whole one."""

    columns: int
    turns: bool = False


TOGETHER = tuple(Tile(columns) for columns in (256, 224, 192, 128))  # that are worth trying: for some hundred rows
IN_TURNS = tuple(Tile(columns, turns=True) for columns in (192, 176))  # and for a prompt's
TILES = (*TOGETHER, *IN_TURNS)
Tiles = tuple[tuple[int, Tile | None], ...]  # up to so many rows: this tile, or none


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
    keep_rows(path, device, weight_of, _tile, {weight_key(weight): [_row(*each) for each in tiles] for weight, tiles in found.items()})


def _row(most: int, tile: Tile | None) -> list[int]:
    return [most, 0] if tile is None else [most, tile.columns, *[1] * tile.turns]


def _tile(row: list[Any]) -> tuple[int, Tile | None]:
    most, columns, *turns = whole_numbers(row)
    tile = Tile(columns, turns == [1])
    if turns not in ([], [1]) or (tile not in TILES and row[1:] != [0]):
        raise ValueError(f"{row[1:]} is none of the tiles {[_row(0, each)[1:] for each in TILES]}")
    return most, tile if columns else None
