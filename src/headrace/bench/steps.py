"""The steps of a run with their floor and prediction, grouped by kind.

What lives here: summing up step records. What may not: recording them (observe/metrics.py),
printing of anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from headrace.observe.metrics import StepRecord

COLUMNS = (
    "steps",
    "count",
    "rows",
    "tokens",
    "floor ms",
    "overlapped ms",
    "predicted ms",
    "measured ms",
    "fraction",
    "host ms",
)


STEADY_STEPS = 500


@dataclass(frozen=True, slots=True)
class SteadyDecode:
    """Decode steps that each followed one with the same rows: their total time, and how much of it the device was
    busy."""

    steps: int
    # from the end of the first one's predecessor to the end of the last, gaps between runs left out
    wall_seconds: float
    busy_seconds: float
    host_seconds: float  # the median step's
    host_seconds_p99: float

    @property
    def idle_share(self) -> float:
        """1 - busy / wall."""
        return max(0.0, 1.0 - self.busy_seconds / self.wall_seconds) if self.wall_seconds > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        return {
            "steady_decode_steps": self.steps,
            "host_ms_per_step": self.host_seconds * 1e3,
            "host_ms_per_step_p99": self.host_seconds_p99 * 1e3,
            "device_idle_share": self.idle_share,
        }

    def __str__(self) -> str:
        host = f"host {self.host_seconds * 1e3:.3f} ms per step (p99 {self.host_seconds_p99 * 1e3:.3f})"
        return f"steady decode, {self.steps} steps: {host}, the device idle {self.idle_share:.1%}"


def steady_decode(records: Iterable[StepRecord], most: int = STEADY_STEPS) -> SteadyDecode | None:
    """The last ``most`` such steps; None if there are none."""
    good = [record for record in records if not record.failed]
    steady = [(before, step) for before, step in pairwise(good) if _follows(before, step)][-most:]
    if not steady:
        return None
    host = sorted(step.host_seconds for _, step in steady)
    return SteadyDecode(
        len(steady),
        sum(step.end - before.end for before, step in steady),
        sum(step.end - step.begin for _, step in steady),
        median(host),
        host[min(len(host) - 1, round(0.99 * len(host)))],
    )


def _follows(before: StepRecord, step: StepRecord) -> bool:
    return step.step_id == before.step_id + 1 and step.rows == before.rows > 0 and before.kind == step.kind == "decode"


def summarise_steps(records: Iterable[StepRecord]) -> list[dict[str, Any]]:
    """Medians by kind; ``fraction`` is None if no limit is known."""
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
        median(record.overlapped_floor_seconds for record in records) * 1e3 if known else None,
        median(record.predicted_seconds for record in records) * 1e3 if known else None,
        median(record.measured_seconds for record in records) * 1e3,
        median(fractions) if known else None,
        median(record.host_seconds for record in records) * 1e3,
    )
    return dict(zip(COLUMNS, values, strict=True))
