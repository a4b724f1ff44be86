"""Which algorithms of cuBLASLt were measured to be best for long steps: shipped ones, and those of this machine.

What lives here: what a row of the tables means, where they are. What may not: measuring (bench/tune_vendor.py), calling the library.

A row is [least rows, rows it was measured with, settings…]. From so many rows on the algorithm with these settings (cublaslt.py) computes
the product; below, where there are none, and for other shapes, torch chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cost.profile import profile_folder
from headrace.kernels.tables import Weight, keep_rows, read_rows, weight_key, weight_of, whole_numbers
from headrace.kernels.vendor.cublaslt import Settings

SHIPPED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True)
class Choice:
    """From ``least`` rows on: the algorithm with these settings among those offered for ``measured`` rows; torch's choice for none."""

    least: int
    measured: int
    settings: Settings


Table = Mapping[Weight, tuple[Choice, ...]]


def measured_choices(device: str) -> Table:
    """By shape of the weight; what was measured on this machine goes before what is shipped."""
    return {**read_choices(SHIPPED, device), **read_choices(kept_choices(), device)}


def kept_choices() -> Path:
    """The file of this machine's own measurements."""
    return profile_folder().parent / "vendor_products.json"


def read_choices(path: Path, device: str) -> dict[Weight, tuple[Choice, ...]]:
    return read_rows(path, device, weight_of, _choice)


def keep_choices(path: Path, device: str, found: Table) -> None:
    """Adds to the file, in place of what it had for these shapes."""
    rows = {weight_key(weight): [(each.least, each.measured, *each.settings) for each in choices] for weight, choices in found.items()}
    keep_rows(path, device, weight_of, _choice, rows)


def _choice(row: list[Any]) -> Choice:
    least, measured, *settings = whole_numbers(row)
    if len(settings) not in (0, 9):
        raise ValueError(f"{row} are not two counts of rows and nine settings or none")
    return Choice(least, measured, tuple(settings))
