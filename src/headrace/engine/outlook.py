"""When a waiting request will start: from what lies before it and how long steps have been taking.

What lives here: seconds from counts. What may not: the scheduler's state (scheduler/explain.py reads it), words (the server's).

Nobody knows how long answers will be, so the prediction is two bounds: the earliest, when only what must be computed is, at the pace of quick
steps; and the latest, when those before it use up all the tokens they may have, at that of slow ones. Either is None where nothing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.metrics import StepRecord
from headrace.scheduler.explain import RequestState

RECENT = 256  # steps that the pace is taken from
QUICK, SLOW = 0.02, 0.9  # of the steps are quicker than quick ones, and than slow ones
SHRINKING = 0.5  # of a quick step: a static batch gets quicker as it shrinks
MARGIN = 1.5  # times what recent steps took for a prompt's token, where steps are bounded in time


@dataclass(frozen=True, slots=True)
class Pace:
    """Of recent steps, in seconds. ``quick``, ``slow``: so many of them are below. ``full``: slow ones that computed prompts, had they
    been full. ``full_quick``: quick ones of those that were at least half full. ``token``: of a prompt."""

    quick: float
    slow: float
    full_quick: float
    full: float
    token: float
    steps: int


def pace_of(records: Sequence[StepRecord], budget: int) -> Pace | None:
    """None before the first step."""
    if not records:
        return None
    every = [_seconds(each) for each in records]
    prompts = [each for each in records if each.tokens > each.decodes]
    filled = [_seconds(each) for each in prompts if 2 * each.tokens >= budget]
    largest = max((each.tokens for each in prompts), default=budget)
    full = _quantile([_seconds(each) for each in prompts if 2 * each.tokens >= largest] or every, SLOW) * max(
        1.0, budget / largest
    )
    tokens = sum(each.tokens - each.decodes for each in prompts)
    token = sum(map(_seconds, prompts)) / tokens if tokens else full / budget
    quick, slow = _quantile(every, QUICK), _quantile(every, SLOW)
    return Pace(quick, slow, _quantile(filled or every, QUICK), max(full, slow), token, len(records))


def _seconds(record: StepRecord) -> float:
    return record.measured_seconds + record.idle_seconds


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def outlook(state: RequestState, pace: Pace | None) -> dict[str, Any]:
    """The state as plain data, with the bounds of its start in seconds from now."""
    earliest = latest = None
    if pace is not None and not state.running:
        earliest, latest = _earliest(state, pace), _latest(state, pace)
    return {
        **asdict(state),
        "earliest": earliest,
        "latest": latest,
        "steps_measured": 0 if pace is None else pace.steps,
    }


def _earliest(state: RequestState, pace: Pace) -> float:
    quick = pace.quick * (SHRINKING if state.wait is not None and state.wait.kind == "batch" else 1.0)
    filled = max(0, state.tokens_before // state.budget - state.steps_in_flight)
    return max(filled * pace.full_quick, state.steps_at_least * quick)


def _latest(state: RequestState, pace: Pace) -> float | None:
    """Steps that prompts fill, and those of answers only; one more, for it may just have missed one."""
    if state.steps_at_most is None or state.share <= 0:
        return None
    filled = -(-state.tokens_ahead // state.share) * pace.full
    if state.timed:
        filled = max(filled, MARGIN * state.tokens_ahead * pace.token)
    return filled + (state.steps_at_most + 1) * pace.slow
