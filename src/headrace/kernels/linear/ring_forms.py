"""Which tile, and how K is shared out, for products of up to 64 rows by the ring kernel (ring.cu), and of 65 to 256 rows
with weights in codes (packed_gemm.cu): by the weight and the number of rows.

What lives here: forms, the tables of those that were measured. What may not: kernels, measuring (bench/tune.py).

A row of a table is [most rows, rows, columns, ways, late], ascending; with nothing behind the number of rows where the
forms of kernels/linear/triton_flat.py are as quick, as they are for every weight in bfloat16 that is not there. For
weights in codes, and of 8 bits as their inputs, there are tables by kind, and a rule for the weights that these do not
have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headrace.kernels.candidate import Shape
from headrace.kernels.linear import packing
from headrace.kernels.linear.measured import Measured, whole_numbers
from headrace.kernels.linear.packing import Coding

ROWS = (16, 32, 48, 64)  # of x, that forms are made for
FEWER_ROWS = (8, 16, 32, 64)  # with weights of fewer bits
MOST_EIGHT = 128  # rows of 8 bits, without a gate
MANY_ROWS = (128, 256)  # of GEMMs of codes alone
DEPTH = 64  # of K at once
SHARED_BYTES = 232448  # that a program may have: all of a processor's
_LEAST_PROGRAMS = 60  # fewer do not keep the memory busy
_MOST_WAYS = 4  # of a cluster: of larger ones fewer are at once on some cards than there are tiles
_BLOCK = 8  # rows of x that one program of a cluster finishes at once


@dataclass(frozen=True, slots=True)
class RingForm:
    """``rows`` of x padded, ``columns`` of the weight a tile (with a gate, half of each), K shared by ``ways`` programs.

    ``late``: the next launch is let in when the last weights are being asked for; else at once. ``coding``: of weights
    of few bits; ``eight``: "fp8" or "int8", weights and inputs, or "blocks" of FP8 with scales of their own.
    """

    rows: int
    columns: int
    ways: int = 1
    late: bool = True
    coding: Coding | None = None
    eight: str = ""

    @property
    def many(self) -> bool:
        """Whether packed_gemm.cu computes it."""
        return self.coding is not None and self.rows > FEWER_ROWS[-1]

    def tiles(self, shape: Shape) -> int:
        return -(-shape.outs * (2 if shape.gated else 1) // self.columns)

    def programs(self, shape: Shape, processors: int) -> int:
        """As many as can be at once, each with as many tiles as the others; those that share tiles all at once."""
        tiles = self.tiles(shape)
        return tiles * self.ways if self.ways > 1 else -(-tiles // -(-tiles // processors))

    def fits(self, shape: Shape, processors: int) -> bool:
        """A gate needs all of K in one program, and its rows in eights; those who share a tile are on the device
        together."""
        if shape.ins % (16 if self.eight else 8) or (shape.gated and (shape.outs % 8 or self.ways > 1)):
            return False
        tiles = self.tiles(shape)
        if self.many and (shape.outs % 8 or not (self.columns == 128 or self._fits_half(tiles <= processors))):
            return False
        if self.stages <= self.turns:
            return False
        once = self.ways == self.turns == 1 or tiles * self.ways <= processors
        return once and (self.ways == 1 or shape.ins >= self.depth * self.ways)

    def _fits_half(self, once: bool) -> bool:
        """Half as many columns are of one tile a CTA, of twice as many all of K is; for fewer rows than the most."""
        return self.rows == MANY_ROWS[0] and (once if self.columns == 64 else self.ways == 1)

    @property
    def depth(self) -> int:
        """Of K, a step."""
        return 2 * DEPTH if self.eight else DEPTH if self.coding is None else packing.DEPTH

    @property
    def threads(self) -> int:
        """Those that multiply, and a warp that asks for copies; or four, whose registers the others need."""
        return 384 if self.many else 128 * self.groups + 32

    @property
    def turns(self) -> int:
        """Groups of four warps that take steps of one tile's 64 rows in turn."""
        shared = self.columns == 64 and self.coding is not None and not self.many
        return {64: 2, 32: 3}.get(self.rows, 4) if shared else 1

    @property
    def groups(self) -> int:
        """Of four warps that multiply."""
        return max(self.columns // 64, self.turns)

    @property
    def stage_bytes(self) -> int:
        weights = (
            2 * DEPTH * self.columns if self.coding is None else self.columns // packing.ROWS * self.coding.block_bytes
        )
        return -(-weights // 1024) * 1024 + (1 if self.eight else 2) * self.depth * self.rows

    @property
    def mailbox_bytes(self) -> int:
        """Where parts of those who share a tile arrive."""
        parts = -(-self.rows // _BLOCK // self.ways) * (self.ways - 1) + self.rows // _BLOCK * (self.turns - 1)
        return parts * self.columns * 32

    @property
    def stages(self) -> int:
        """How deep the ring is: what fits, less 1 KiB for where it begins and what the kernel keeps beside it."""
        if self.many:
            step = 4 if self.columns == 64 else 1
            return max(each for each in range(step, 16, step) if self._many_bytes(each) <= SHARED_BYTES - 256)
        beside = 8 * 64 * self.groups + 4 * self.rows * (1 + 4 * self.groups) + 512
        fit = (SHARED_BYTES - 1024 - beside - self.mailbox_bytes) // (self.stage_bytes + 16)
        return fit // self.turns * self.turns

    def _many_bytes(self, stages: int) -> int:
        """``stages`` of 64 of K of x, and as many of a whole step of weights as reach further back."""
        assert self.coding is not None
        return (
            1024
            + stages * 128 * self.rows
            + (stages + 2) // 2 * (self.columns // packing.ROWS) * self.coding.block_bytes
        )

    @property
    def shared_bytes(self) -> int:
        if self.many:
            return self._many_bytes(self.stages)
        return 1024 + self.stages * self.stage_bytes + self.mailbox_bytes


RingForms = tuple[tuple[int, RingForm | None], ...]  # up to so many rows: this form, or those of flat_linear.py


def candidate_forms(
    shape: Shape, rows: int, processors: int, coding: Coding | None = None, eight: str = ""
) -> tuple[RingForm, ...]:
    """The forms worth trying for so many rows, one of ROWS."""
    many = coding is not None and rows in MANY_ROWS
    # of 64 rows 256 columns leave no registers
    most = 256 if many or ((coding is not None or eight) and rows < 64) else 128
    tried = (
        RingForm(rows, *size, late, coding, eight)
        for size in product([each for each in (64, 128, 256) if each <= most], range(1, _MOST_WAYS + 1))
        for late in (False, True)
    )
    return tuple(
        form for form in tried if form.fits(shape, processors) and form.programs(shape, processors) >= _LEAST_PROGRAMS
    )


def forms_at(shape: Shape, processors: int, device: str, coding: Coding | None, eight: str = "") -> RingForms:
    """What was measured for the weight, as far as it can be computed there; of codes and 8 bits, else, what a rule
    says."""
    coding = None if coding is None or eight else replace(coding, ordered=False)
    found = measured(coding, eight).table(device).get(shape, ())
    own = ((most, form and replace(form, coding=coding, eight=eight)) for most, form in found)
    wanted = row_classes(shape, coding, eight) if coding or eight else ()

    def rule(most: int) -> RingForm | None:
        return _rule(shape, most, processors, coding, eight) if most in wanted else None

    known = tuple((most, form if form is None or form.fits(shape, processors) else rule(most)) for most, form in own)
    last = known[-1][0] if known else 0
    return (*known, *((most, rule(most)) for most in wanted if last < most))


def row_classes(shape: Shape, coding: Coding | None, eight: str) -> tuple[int, ...]:
    """The most rows of each; packed_gemm.cu has no gate in its tables."""
    if shape.gated or (coding is not None and not coding.many):
        return FEWER_ROWS
    return (*FEWER_ROWS, MOST_EIGHT) if eight else (*FEWER_ROWS, *MANY_ROWS)


def _rule(shape: Shape, rows: int, processors: int, coding: Coding | None, eight: str) -> RingForm | None:
    """The least that one processor has to read; of equals the widest tile that is not shared by many: of clusters of
    three and four fewer than would fill the card are on it at once (39 and 30 on an H200)."""

    def load(form: RingForm) -> tuple[float, bool, int]:
        return form.columns * -(-form.tiles(shape) // processors) / form.ways, form.ways > 2, -form.columns

    small = RingForm(rows, 128 if coding is not None and rows in MANY_ROWS else 64, 1, True, coding, eight)
    forms = candidate_forms(shape, rows, processors, coding, eight) or (
        (small,) if small.fits(shape, processors) else ()
    )
    crowded = [form for form in forms if form.ways > 2 and form.programs(shape, processors) > 0.89 * processors]
    return min((form for form in forms if form.late and form not in crowded), key=load, default=None)


def measured(coding: Coding | None, eight: str = "") -> Measured[tuple[int, RingForm | None]]:
    """Codes of one width and as many scales take the same work."""
    if coding is None and not eight:
        return MEASURED
    name = (
        eight
        if coding is None or eight
        else f"{coding.bits} bits, {coding.sets} sets{', floats' if coding.floats else ''}"
    )
    return Measured(f"ring, {name}", _form, lambda row: _row(*row))


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
    if (
        type(late) is not bool
        or rows not in (*FEWER_ROWS, *ROWS, MOST_EIGHT, *MANY_ROWS)
        or columns not in (64, 128, 256)
        or not 1 <= ways <= 8
        or most > rows
    ):
        raise ValueError(f"{row} is no form")
    return most, RingForm(rows, columns, ways, late)


MEASURED = Measured("ring", _form, lambda row: _row(*row))
