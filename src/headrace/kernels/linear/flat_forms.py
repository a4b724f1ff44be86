"""Which kernel, and in which form, computes a product of few rows: by the shape of the weight and the number of rows.

What lives here: forms, what rows of the table of those that were measured mean, and the rule for shapes that were not.
What may not: kernels, measuring.

A row is [most rows, kind, rows, columns, depth, ways, warps, stages, late], with nothing behind the number of rows
where the vendor's product is quicker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.kernels.candidate import Shape
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.kernels.linear.forms import FLAT, VECTOR, Form, Forms
from headrace.kernels.linear.measured import Measured, whole_numbers

LARGE = 32768  # columns of a weight that gives every processor many tiles, however large
_CLASSES = (1, 16, 32, MOST_ROWS)  # the most rows of each form that was not measured
MOST_PROGRAMS = 400  # that share tiles: their parts have to be added up


def vector(columns: int, depth: int, ahead: int, warps: int, *, late: bool = False) -> Form:
    return Form(VECTOR, 1, columns, depth, ahead, warps, late=late)


def flat(rows: int, columns: int, depth: int, stages: int, ways: int = 1) -> Form:
    return Form(FLAT, rows, columns, depth, ways, stages=stages, late=True)


def forms_for(shape: Shape, processors: int, table: Mapping[Shape, Forms]) -> Forms:
    """Measured ones where the shape is in the table; else what the measured ones have in common."""
    return table.get(shape) or tuple((most, _rule(shape, most, processors)) for most in _CLASSES)


def without_vendor(forms: Forms, shape: Shape, processors: int) -> Forms:
    """The same with a form for any number of rows up to MOST_ROWS: no product of the vendor's takes in what stands
    around it."""
    rest = ((MOST_ROWS, None),) if forms[-1][0] < MOST_ROWS else ()
    return tuple(
        (most, form or _rule(shape, min(each for each in _CLASSES if most <= each), processors))
        for most, form in (*forms, *rest)
    )


def _rule(shape: Shape, most: int, processors: int) -> Form:
    if most == 1 and shape.outs < processors and shape.ins % 2048 == 0:
        return vector(1, 2048, 0, 4)  # a router's
    if most == 1 and shape.ins % 1024 == 0:
        return vector(2 if shape.gated else 4, 1024, 0, 4)
    rows = max(16, most)
    if shape.gated:
        return flat(rows, 64, 128 if rows < 64 else 64, 3 if rows < 64 else 4)
    tiles = -(-shape.outs // 64)
    ways = next((ways for ways in (1, 2, 4) if tiles * ways > processors // 2), 4)
    return flat(rows, 64, 128, 5 if rows < 64 else 6, ways if shape.ins >= 512 * ways else 1)


def candidate_forms(shape: Shape, most: int) -> tuple[Form, ...]:
    """The forms worth trying for up to so many rows: those that were quickest somewhere, and their neighbours."""
    forms = [*(_vectors() if most == 1 else ()), *_flats(shape, max(16, most))]
    return tuple(form for form in forms if form.fits(shape))


def _vectors() -> list[Form]:
    sizes = (
        (4, 1024, 0, 4),
        (2, 1024, 0, 4),
        (2, 1024, 1, 4),
        (4, 512, 0, 2),
        (4, 512, 2, 2),
        (2, 512, 2, 2),
        (8, 512, 1, 4),
        (2, 2048, 1, 4),
    )
    return [vector(*size, late=late) for size in sizes for late in (False, True)]


def _flats(shape: Shape, rows: int) -> list[Form]:
    if shape.gated:
        sizes = [(64, 128, 3), (64, 128, 4), (64, 64, 4), (64, 64, 6)]
    else:
        sizes = [(64, 128, 4), (64, 128, 5), (64, 128, 6), (64, 256, 4 if rows < 64 else 2)]
        sizes += [(128, 128, 4), (128, 64, 5)] if shape.outs >= LARGE else []
    tiles = -(-shape.outs // 64)
    ways = [each for each in (1, 2, 4) if each == 1 or (not shape.gated and tiles * each <= MOST_PROGRAMS)]
    return [flat(rows, *size, each) for size in sizes for each in ways if size[0] == 64 or each == 1]


def _row(most: int, form: Form | None) -> list[Any]:
    if form is None:
        return [most]
    return [most, form.kind, form.rows, form.columns, form.depth, form.ways, form.warps, form.stages, form.late]


def _form(row: list[Any]) -> tuple[int, Form | None]:
    if len(row) == 1:
        return whole_numbers(row)[0], None
    most, kind, *sizes, late = row
    if kind not in (VECTOR, FLAT) or type(late) is not bool:
        raise ValueError(f"{row} is no form")
    most, rows, columns, depth, ways, warps, stages = whole_numbers([most, *sizes])
    if most > rows:
        raise ValueError(f"{row} computes {rows} rows of {most}")
    return most, Form(kind, rows, columns, depth, ways, warps, stages, late)


MEASURED = Measured("flat", _form, lambda row: _row(*row))
