"""Forms that were measured: those shipped with the package, and those ``headrace bench kernels --tune`` found on this machine.

What lives here: what a row of the tables means, where they are. What may not: measuring (bench/tune.py), what a form means.

Under "out x in" or "out x in, gated" a row is [most rows, kind, rows, columns, depth, ways, warps, stages, late], with nothing behind the
number of rows where the vendor's product is quicker.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.cost.profile import profile_folder
from headrace.kernels.tables import keep_rows, read_rows, whole_numbers
from headrace.kernels.triton.flat_forms import FLAT, VECTOR, Form, Forms, Shape

SHIPPED = Path(__file__).with_name("flat_forms.json")


def measured_forms(device: torch.device) -> Mapping[Shape, Forms]:
    """By shape, for the device's name; what was measured on this machine goes before what is shipped."""
    name = torch.cuda.get_device_name(device)
    return {**read_forms(SHIPPED, name), **read_forms(kept_forms(), name)}


def kept_forms() -> Path:
    """The file of this machine's own measurements."""
    return profile_folder().parent / "flat_forms.json"


def read_forms(path: Path, device: str) -> dict[Shape, Forms]:
    return read_rows(path, device, Shape.of_key, _form)


def keep_forms(path: Path, device: str, found: Mapping[Shape, Forms]) -> None:
    """Adds to the file, in place of what it had for these shapes."""
    keep_rows(path, device, Shape.of_key, _form, {shape.key: [_row(*each) for each in forms] for shape, forms in found.items()})


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
