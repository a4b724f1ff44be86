"""A record of everything the scheduler was told: replayed on a fresh scheduler it gives the same plans, one for one.

What lives here: recording and replaying. What may not: files, formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.cost.speed import StepSpeed
from headrace.request import StepPlan, StepResult
from headrace.scheduler.events import Event
from headrace.scheduler.planner import NO_MASKS
from headrace.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Scheduled:
    now: float
    events: tuple[Event, ...]
    speed: StepSpeed | None = None
    mask_seconds: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Collected:
    """``result`` None: the step failed with ``error``."""

    now: float
    result: StepResult | None
    error: str


@dataclass(slots=True)
class Journal:
    entries: list[Scheduled | Collected] = field(default_factory=list)

    def scheduled(self, now: float, events: Seq[Event], speed: StepSpeed | None = None, mask_seconds: Mapping[int, float] = NO_MASKS) -> None:
        self.entries.append(Scheduled(now, tuple(events), speed, dict(mask_seconds)))

    def collected(self, now: float, result: StepResult | None, error: str) -> None:
        self.entries.append(Collected(now, result, error))


def replay(journal: Journal, scheduler: Scheduler) -> list[StepPlan | None]:
    """Feeds a fresh scheduler what another one was told; returns its plans."""
    plans: list[StepPlan | None] = []
    for entry in journal.entries:
        if isinstance(entry, Scheduled):
            plans.append(scheduler.schedule(entry.now, entry.events, entry.speed, entry.mask_seconds))
        elif entry.result is None:
            scheduler.fail(entry.error, entry.now)
        else:
            scheduler.update(entry.result, entry.now)
    return plans
