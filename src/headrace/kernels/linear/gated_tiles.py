"""Which tile computes a gate and what it gates best, for how many rows.

What lives here: tiles, what a row of their table means. What may not: measuring (bench/tune.py), kernels.

A row is [most rows, columns of a tile], with the number of the tile's form behind it if it is not the first; ascending.
0 columns where the vendor's product and an activation of its own are as quick. Beyond the last row, and for weights
that are not there, they always are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from headrace.kernels.linear.measured import Measured, Table, whole_numbers

BEYOND = 2**20  # rows: more than a step has
_DEPTH = 64  # of K, a step
_TALL_STEPS = 5  # a tall tile's first two and last two, and one between


class Form(IntEnum):
    """How tiles are computed; a table has the number."""

    ONE = 0  # two groups of warps share a tile of 128 rows
    TURNS = 1  # they take tiles in turn, each a whole one
    TALL = 2  # they share one of 256 rows, and results of one half leave while the other is multiplied


@dataclass(frozen=True, slots=True)
class Tile:
    """``columns`` of gate and what it gates together."""

    columns: int
    form: Form = Form.ONE

    def __str__(self) -> str:
        return f"{self.columns}{('', ' in turns', ' tall')[self.form]}"

    @property
    def rows(self) -> int:
        return 256 if self.form is Form.TALL else 128

    @property
    def cluster(self) -> int:
        """So many programs share what they read."""
        return 1 if self.form is Form.ONE else 2

    def thin(self, outs: int) -> int:
        """Columns of the tiles for what pairs of tall ones leave of ``outs``; 0: nothing is left, or it gets a pair
        like the others.

        A pair has as many columns of the result as one of its tiles has of gate and what it gates; so have thin ones.
        """
        left = outs % self.columns if self.form is Form.TALL else 0
        return 0 if left % 16 else left

    def takes(self, ins: int) -> bool:
        """Whether weights with so many columns can be read so."""
        return self.form is not Form.TALL or ins > (_TALL_STEPS - 1) * _DEPTH


TOGETHER = tuple(Tile(columns) for columns in (256, 224, 192, 128))  # that are worth trying: for some hundred rows
IN_TURNS = tuple(Tile(columns, Form.TURNS) for columns in (192, 176))  # for a prompt's
TALL = (Tile(192, Form.TALL),)  # and for a long one's
# of numbers of 8 bits: what a column costs beside those of the widest (an H200)
EIGHT_TILES = {Tile(columns, Form.TURNS): cost for columns, cost in ((192, 1.0), (176, 1.05), (160, 1.07), (128, 1.05))}
WIDEST_ROWS = 4096  # beyond, the widest is best whatever its last wave leaves undone
TILES = (*TOGETHER, *IN_TURNS, *TALL)
Tiles = tuple[tuple[int, Tile | None], ...]  # up to so many rows: this tile, or none


def measured_tiles(device: str) -> Table[tuple[int, Tile | None]]:
    """By shape of the gate."""
    found = MEASURED.table(device).items()
    return {
        shape: tuple((most, tile if tile and tile.takes(shape.ins) else None) for most, tile in rows)
        for shape, rows in found
    }


def _row(most: int, tile: Tile | None) -> list[int]:
    return [most, 0] if tile is None else [most, tile.columns, *[int(tile.form)] * (tile.form is not Form.ONE)]


def _tile(row: list[Any]) -> tuple[int, Tile | None]:
    most, *what = whole_numbers(row)
    tiles = {tuple(_row(0, each)[1:]): each for each in (None, *TILES)}
    if tuple(what) not in tiles:
        raise ValueError(f"{what} is none of the tiles {[list(each) for each in tiles]}")
    return most, tiles[tuple(what)]


MEASURED = Measured("gated", _tile, lambda row: _row(*row))
