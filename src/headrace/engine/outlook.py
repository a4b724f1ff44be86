"""When a waiting request will start: from what lies before it and how long steps have been taking.

What lives here: seconds from counts. What may not: the scheduler's state (scheduler/explain.py reads it), words (the server's).

Nobody knows how long answers will be, so the prediction is two bounds: the earliest, when only what must be computed is, and the
latest, when those who run use up all the tokens they may have. Either is None where nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.metrics import StepRecord
from headrace.scheduler.explain import RequestState

RECENT = 64  # steps that the pace is taken from


@dataclass(frozen=True, slots=True)
class Pace:
    """Means over recent steps, in seconds. ``full_step``: of those that computed prompts, else of all."""

    step: float
    full_step: float
    steps: int


def pace_of(records: Sequence[StepRecord]) -> Pace | None:
    """None before the first step."""
    if not records:
        return None
    seconds = [record.measured_seconds + record.idle_seconds for record in records]
    prompts = [time for time, record in zip(seconds, records, strict=True) if record.kind != "decode"]
    return Pace(_mean(seconds), max(_mean(prompts), _mean(seconds)), len(records))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def outlook(state: RequestState, pace: Pace | None) -> dict[str, Any]:
    """The state as plain data, with the bounds of its start in seconds from now."""
    earliest = latest = None
    if pace is not None and not state.running:
        prefill = -(-state.tokens_ahead // state.budget) * pace.full_step
        waits_for_others = state.wait is not None and state.wait.kind != "next_step"
        earliest = max(pace.step if waits_for_others else 0.0, prefill - pace.full_step)
        latest = None if state.steps_at_most is None else prefill + state.steps_at_most * pace.step
    return {**asdict(state), "earliest": earliest, "latest": latest, "steps_measured": 0 if pace is None else pace.steps}
