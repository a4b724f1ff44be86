"""The steps of a run beside their floor and prediction, sorted by kind.

What lives here: summing up step records. What may not: recording them (metrics.py), printing of anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from headrace.cost.calibration import Calibration, fit
from headrace.metrics import StepRecord

COLUMNS = ("steps", "count", "rows", "tokens", "floor ms", "predicted ms", "measured ms", "fraction", "host ms")


def summarise_steps(records: Iterable[StepRecord]) -> list[dict[str, Any]]:
    """Medians by kind; ``fraction`` None where no limit is known."""
    groups: dict[str, list[StepRecord]] = {}
    for record in records:
        if not record.failed:
            groups.setdefault(record.kind, []).append(record)
    return [_medians(name, groups[name]) for name in ("decode", "mixed", "prefill") if name in groups]


def _medians(name: str, records: Sequence[StepRecord]) -> dict[str, Any]:
    fractions = [record.fraction for record in records if record.fraction is not None]
    known = bool(fractions)
    values = (
        name,
        len(records),
        median(record.rows for record in records),
        median(record.tokens for record in records),
        median(record.floor_seconds for record in records) * 1e3 if known else None,
        median(record.predicted_seconds for record in records) * 1e3 if known else None,
        median(record.measured_seconds for record in records) * 1e3,
        median(fractions) if known else None,
        median(record.host_seconds for record in records) * 1e3,
    )
    return dict(zip(COLUMNS, values, strict=True))


def calibrate(records: Iterable[StepRecord]) -> Calibration | None:
    """The efficiency and the overhead these steps show; None without a limit or without steps of different size."""
    good = [record for record in records if not record.failed and record.floor_seconds > 0 and record.measured_seconds > 0]
    return fit([record.floor_seconds for record in good], [record.measured_seconds for record in good])


def describe_calibration(found: Calibration | None) -> str:
    if found is None:
        return "no fit: the steps do not differ enough in size, or no limit is known"
    figures = f"{found.efficiency:.0%} of the limit beside {found.overhead * 1e3:.2f} ms a step"
    return f"fit over all steps: {figures}; half of the steps within {found.error:.0%} of it"
