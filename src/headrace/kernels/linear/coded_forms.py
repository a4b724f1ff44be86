"""In which form products with codes of few bits are computed: by the coding, the shape of the weight and the number of
rows.

What lives here: the tables of those that were measured, and the rule for the others. What may not: kernels, measuring.

Forms are those of forms.py, ``columns`` rows of the weight as it lies (a gate's halves in turns), 128 of K a step;
none (nothing behind the number of rows): the weight is widened first, as it is beyond the last one.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.kernels.candidate import Shape
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.kernels.linear.flat_forms import MEASURED as FLATS
from headrace.kernels.linear.forms import FLAT, Form, Forms
from headrace.kernels.linear.measured import Measured
from headrace.kernels.linear.packing import DEPTH, Coding

MOST_TILED = 128  # rows; of more, widening the weight costs less than its codes do in every tile
ROWS = (16, 32, MOST_ROWS, MOST_TILED)  # of forms
_SHARED_BYTES = 200_000  # of a processor, that copies under way may fill


def measured(coding: Coding) -> Measured[tuple[int, Form | None]]:
    """Codes of one width and as many scales take the same work."""
    kind = "floats" if coding.floats else "table" if coding.table else "integers"
    return Measured(f"coded, {coding.bits} bits, {coding.sets} sets, {kind}", FLATS.row_of, FLATS.values_of)


def forms_for(shape: Shape, outs: int, coding: Coding, processors: int, table: Mapping[Shape, Forms]) -> Forms:
    """``outs``: rows of the weight. For any number of rows up to MOST_ROWS there is one: what stands around a product
    is part of it."""
    if shape not in table:
        return tuple((most, _rule(outs, shape.ins, coding, most, processors)) for most in ROWS)
    found = table[shape]
    rest = ((MOST_ROWS, None),) if found[-1][0] < MOST_ROWS else ()
    return tuple(
        (most, form or (_rule(outs, shape.ins, coding, most, processors) if most <= MOST_ROWS else None))
        for most, form in (*found, *rest)
    )


def _rule(outs: int, ins: int, coding: Coding, most: int, processors: int) -> Form:
    rows = next(each for each in ROWS if most <= each)
    columns, warps = (64, 4) if rows <= 32 else (128, 8)  # four warps spill from 64 rows on, where a gate is behind
    tiles, steps = -(-outs // columns), -(-ins // DEPTH)
    ways = (
        next((ways for ways in (1, 2, 4, 8) if tiles * ways >= 3 * processors or steps < 8 * ways), 8)
        if rows <= MOST_ROWS
        else 1
    )
    return Form(FLAT, rows, columns, DEPTH, ways, warps, stages_for(rows, columns, coding), late=True)


def stages_for(rows: int, columns: int, coding: Coding) -> int:
    """Copies under way at once: up to five, as far as four programs have room for them."""
    size = columns * DEPTH * coding.bits // 8 + rows * DEPTH * 2
    return max(2, min(5, _SHARED_BYTES // (4 if rows <= 32 else 2) // size))


def candidate_forms(shape: Shape, outs: int, coding: Coding, most: int) -> tuple[Form, ...]:
    """The forms worth trying for up to so many rows, one of ROWS."""
    steps = -(-shape.ins // DEPTH)
    sizes = [(64, 4), (128, 4)] if most <= 32 else [(64, 4), (128, 4), (128, 8)]
    forms = []
    for columns, warps in sizes:
        ways = [
            each
            for each in (1, 2, 4, 8)
            if each == 1 or (most <= MOST_ROWS and steps >= 4 * each and -(-outs // columns) * each <= 2000)
        ]
        best = stages_for(most, columns, coding)
        forms += [
            Form(FLAT, most, columns, DEPTH, each, warps, stages, late=True)
            for each in ways
            for stages in sorted({max(2, best - 2), best})
        ]
    return tuple(forms)
