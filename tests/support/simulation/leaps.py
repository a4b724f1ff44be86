"""Many turns at once: what a modelled device knows beforehand is known here from the ids alone, and computed after all.

A leap edits no row and asks no device (planner/leap.py). So that what it did to blocks, names and records is held to the same as single turns
are, the plan of each turn is put together from what the scheduler decided, submitted to the device, and collected, in the loop's order.

What lives here: foretelling, computing after. What may not: when to leap (a schedule says), what must hold (device.py, books.py, answers.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from headrace.engine.core import EngineCore
from headrace.request import SequenceOutput
from headrace.scheduler.plan_builder import PlanBuilder
from tests.support.simulation.broken import hold
from tests.support.simulation.device import Device
from tests.support.simulation.oracle import Line

Told = Callable[[list[SequenceOutput]], None]


def can_leap(core: EngineCore, device: Device) -> bool:
    """Turns are alike, and nothing is to go wrong with their steps."""
    known = all(submitted.ticket.result is not None for submitted in core._fifo)  # type: ignore[attr-defined]
    fine = known and device.fail_next is None and device.spoil_next is None
    return fine and core.turns_alike() > 0


class Leap:
    """One of them. ``told``: called with each turn's outputs."""

    def __init__(self, core: EngineCore, device: Device, lines: Mapping[tuple[int, int], Line], told: Told) -> None:
        self._core, self._device, self._lines, self._told = core, device, lines, told
        self._tickets = deque(submitted.ticket for submitted in core._fifo)
        self._begun: list[PlanBuilder] = []  # by the scheduler, for the turn under way
        self._done = 0

    def take(self, turns: int) -> int:
        """How many there were: fewer where blocks became scarce, or the policy wanted to be asked."""
        scheduler, begin = self._core.scheduler, self._core.scheduler._begin_plan

        def noted() -> PlanBuilder:
            self._begun.append(begin())
            return self._begun[-1]

        scheduler._begin_plan = noted  # type: ignore[method-assign]
        try:
            done = self._core.leap(self._columns(turns), lambda turns: self._tickets)
        finally:
            del scheduler._begin_plan
        hold(done == self._done, "leap", f"{done} turns are said, {self._done} were")
        return done

    def _columns(self, turns: int) -> Iterator[list[int]]:
        """By turn, the tokens of the step that it collects."""
        core, cohort = self._core, self._core.scheduler._cohort
        assert cohort is not None, "turns are alike"
        keys = [*zip(cohort.request_ids, cohort.indices, strict=True)]
        while self._done < turns and core.clock.now() < core.scheduler.wake:
            ticket = self._tickets[0] if self._tickets else None
            column = [token for (token,) in ticket.result.tokens] if ticket else [self._lines[key].expect()[0] for key in keys]  # type: ignore[attr-defined]
            self._begun.clear()
            yield column
            plan = self._begun[0] if self._begun else core.scheduler._begin_plan()
            plan.step_id = core.scheduler._next_step - 1
            self._tickets.append(self._device.submit(cohort.plan_behind(plan, 1)))
            result = self._device.collect(self._tickets.popleft())
            hold(result.tokens == [(token,) for token in column], "leap", f"{column} were foretold, {result.tokens} came")
            self._done += 1
            self._told([SequenceOutput(number, index, (token,)) for (number, index), token in zip(keys, column, strict=True)])
