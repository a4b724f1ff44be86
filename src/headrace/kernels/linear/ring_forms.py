"""Which tile, and how K is shared out, for products of 2 to 64 rows by the ring kernel (ring.cu): by the weight and the number of rows.

What lives here: forms, the tables of those that were measured. What may not: the kernel, measuring (bench/tune.py).

A row of a table is [most rows, rows, columns, ways, late], ascending; with nothing behind the number of rows where the forms of
kernels/linear/triton_flat.py are as quick, as they are for every weight that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.kernels.candidate import Shape
from headrace.kernels.linear import packing
from headrace.kernels.linear.measured import Measured, whole_numbers
from headrace.kernels.linear.packing import Coding

ROWS = (16, 32, 48, 64)  # of x, that forms are made for
DEPTH = 64  # of K at once
SHARED_BYTES = 232448  # that a program may have: all of a processor's
_LEAST_PROGRAMS = 60  # fewer do not keep the memory busy
_MOST_WAYS = 4  # of a cluster: of larger ones fewer are at once on some cards than there are tiles
_BLOCK = 8  # rows of x that one program of a cluster finishes at once


@dataclass(frozen=True, slots=True)
class RingForm:
    """``rows`` of x padded, ``columns`` of the weight a tile (64 or 128; with a gate, half of each), K shared by ``ways`` programs.

    ``late``: the next launch is let in when the last weights are being asked for; else at once. ``coding``: of weights of few bits.
    """

    rows: int
    columns: int
    ways: int = 1
    late: bool = True
    coding: Coding | None = None

    def tiles(self, shape: Shape) -> int:
        return -(-shape.outs * (2 if shape.gated else 1) // self.columns)

    def programs(self, shape: Shape, processors: int) -> int:
        """As many as can be at once, each with as many tiles as the others; those that share tiles all at once."""
        tiles = self.tiles(shape)
        return tiles * self.ways if self.ways > 1 else -(-tiles // -(-tiles // processors))

    def fits(self, shape: Shape, processors: int) -> bool:
        """A gate needs all of K in one program, and its rows in eights; those who share a tile are on the device together."""
        if shape.ins % 8 or (shape.gated and (shape.outs % 8 or self.ways > 1)):
            return False
        return self.ways == 1 or (self.tiles(shape) * self.ways <= processors and shape.ins >= self.depth * self.ways)

    @property
    def depth(self) -> int:
        """Of K, a step."""
        return DEPTH if self.coding is None else packing.DEPTH

    @property
    def stage_bytes(self) -> int:
        weights = 2 * DEPTH * self.columns if self.coding is None else self.columns // packing.ROWS * self.coding.block_bytes
        return -(-weights // 1024) * 1024 + 2 * self.depth * self.rows

    @property
    def mailbox_bytes(self) -> int:
        """Where parts of those who share a tile arrive."""
        return -(-self.rows // _BLOCK // self.ways) * (self.ways - 1) * self.columns * 32

    @property
    def stages(self) -> int:
        """How deep the ring is: what fits, less 1 KiB for where it begins and what the kernel keeps beside it."""
        beside = 8 * self.columns + 4 * self.rows * (1 + self.columns // 16) + 512
        return (SHARED_BYTES - 1024 - beside - self.mailbox_bytes) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.stages * self.stage_bytes + self.mailbox_bytes


RingForms = tuple[tuple[int, RingForm | None], ...]  # up to so many rows: this form, or those of flat_linear.py


def candidate_forms(shape: Shape, rows: int, processors: int) -> tuple[RingForm, ...]:
    """The forms worth trying for so many rows, one of ROWS."""
    tried = (RingForm(rows, columns, ways, late) for columns in (64, 128) for ways in range(1, _MOST_WAYS + 1) for late in (False, True))
    return tuple(form for form in tried if form.fits(shape, processors) and form.programs(shape, processors) >= _LEAST_PROGRAMS)


def form_of(forms: RingForms, tokens: int) -> RingForm | None:
    """None: nothing of this kind serves so many rows."""
    return next((form for most, form in forms if tokens <= most), None)


def _row(most: int, form: RingForm | None) -> list[Any]:
    return [most] if form is None else [most, form.rows, form.columns, form.ways, form.late]


def _form(row: list[Any]) -> tuple[int, RingForm | None]:
    if len(row) == 1:
        return whole_numbers(row)[0], None
    *numbers, late = row
    most, rows, columns, ways = whole_numbers(numbers)
    if type(late) is not bool or rows not in ROWS or columns not in (64, 128) or not 1 <= ways <= 8 or most > rows:
        raise ValueError(f"{row} is no form")
    return most, RingForm(rows, columns, ways, late)


MEASURED = Measured("ring", _form, lambda row: _row(*row))
