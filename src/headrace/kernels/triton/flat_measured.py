"""Forms that were measured: those shipped with the package, and those ``headrace bench kernels --tune`` found on this machine.

What lives here: reading and keeping them. What may not: measuring (bench/tune.py), what a form means.

The files are JSON: {device: {"out x in" or "out x in, gated": [[most rows, kind, rows, columns, depth, ways, warps, stages, late], …]}},
with nothing behind the number of rows where the vendor's product is quicker. A file that cannot be read counts as empty, with a warning.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.cost.profile import profile_folder
from headrace.kernels.triton.flat_forms import Form, Forms, Shape

_log = logging.getLogger(__name__)
SHIPPED = Path(__file__).with_name("flat_forms.json")


def measured_forms(device: torch.device) -> Mapping[Shape, Forms]:
    """By shape, for the device's name; what was measured on this machine goes before what is shipped."""
    name = torch.cuda.get_device_name(device)
    return {**read_forms(SHIPPED, name), **read_forms(kept_forms(), name)}


def kept_forms() -> Path:
    """The file of this machine's own measurements."""
    return profile_folder().parent / "flat_forms.json"


def read_forms(path: Path, device: str) -> dict[Shape, Forms]:
    try:
        return {_shape(key): tuple(map(_form, rows)) for key, rows in _read(path).get(device, {}).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("%s cannot be read (%s): its forms of products are not used; measure them again or remove it", path, error)
        return {}


def keep_forms(path: Path, device: str, found: Mapping[Shape, Forms]) -> None:
    """Adds to the file, in place of what it had for these shapes."""
    try:
        held = _read(path)
    except (OSError, ValueError):
        held = {}
    held.setdefault(device, {}).update({_key(shape): [_row(*each) for each in forms] for shape, forms in found.items()})
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
    """A line for each form, so that changes can be read."""
    devices = []
    for device, shapes in sorted(held.items()):
        lines = [f"  {json.dumps(key)}: [\n    {_lines(rows)}\n  ]" for key, rows in sorted(shapes.items())]
        devices.append(f"{json.dumps(device)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(devices) + "\n}\n"


def _lines(rows: list[Any]) -> str:
    return ",\n    ".join(map(json.dumps, rows))


def _key(shape: Shape) -> str:
    return f"{shape.outs} x {shape.ins}{', gated' if shape.gated else ''}"


def _shape(key: str) -> Shape:
    size, _, gated = key.partition(", ")
    outs, ins = map(int, size.split(" x "))
    return Shape(outs, ins, gated == "gated")


def _row(most: int, form: Form | None) -> list[Any]:
    if form is None:
        return [most]
    return [most, form.kind, form.rows, form.columns, form.depth, form.ways, form.warps, form.stages, form.late]


def _form(row: list[Any]) -> tuple[int, Form | None]:
    return (row[0], None) if len(row) == 1 else (row[0], Form(*row[1:]))
