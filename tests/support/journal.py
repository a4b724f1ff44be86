"""A record of everything the scheduler was told: replayed on a fresh scheduler it gives the same plans, one for one.

What lives here: recording and replaying. What may not: files, formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.cost.cost_model import StepSpeed
from headrace.request import SequenceOutput, StepPlan, StepResult
from headrace.scheduler.events import Event
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.step_planner import NO_MASKS


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


@dataclass(frozen=True, slots=True)
class Forced:
    runs: Mapping[int, Seq[int]]


@dataclass(slots=True)
class Journal:
    entries: list[Scheduled | Collected | Forced] = field(default_factory=list)

    @classmethod
    def of(cls, scheduler: Scheduler) -> Journal:
        """Of every call from now on."""
        self = cls()
        schedule, update, fail, force = scheduler.schedule, scheduler.update, scheduler.fail, scheduler.force_tokens

        def scheduled(
            now: float,
            events: Iterable[Event] = (),
            speed: StepSpeed | None = None,
            mask_seconds: Mapping[int, float] = NO_MASKS,
        ) -> StepPlan | None:
            told = tuple(events)
            self.entries.append(Scheduled(now, told, speed, dict(mask_seconds)))
            return schedule(now, told, speed, mask_seconds)

        def updated(result: StepResult, now: float) -> Seq[SequenceOutput]:
            self.entries.append(Collected(now, result, ""))
            return update(result, now)

        def failed(message: str, now: float) -> list[SequenceOutput]:
            self.entries.append(Collected(now, None, message))
            return fail(message, now)

        def forced(runs: Mapping[int, Seq[int]]) -> None:
            self.entries.append(Forced(runs))
            force(runs)

        scheduler.schedule, scheduler.update, scheduler.fail = scheduled, updated, failed  # type: ignore[method-assign]
        scheduler.force_tokens = forced  # type: ignore[method-assign]
        return self


def replay(journal: Journal, scheduler: Scheduler) -> list[StepPlan | None]:
    """Feeds a fresh scheduler what another one was told; returns its plans."""
    plans: list[StepPlan | None] = []
    for entry in journal.entries:
        if isinstance(entry, Scheduled):
            plans.append(scheduler.schedule(entry.now, entry.events, entry.speed, entry.mask_seconds))
        elif isinstance(entry, Forced):
            scheduler.force_tokens(entry.runs)
        elif entry.result is None:
            scheduler.fail(entry.error, entry.now)
        else:
            scheduler.update(entry.result, entry.now)
    return plans
