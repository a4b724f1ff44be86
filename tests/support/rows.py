"""Rows are a cache on the workers' side: they can be built again from what the scheduler knows, at any time with
nothing in flight.

What lives here: having them built again. What may not: losing them (an executor's ``recover``).
"""

from __future__ import annotations

from headrace.scheduler.plan_builder import PlanBuilder
from headrace.scheduler.scheduler import Scheduler


def rebuild_rows(scheduler: Scheduler) -> None:
    """The next plan builds the rows of all who run."""
    assert not scheduler.in_flight, "rows of a step in flight cannot be rebuilt: their last tokens are not known"
    scheduler._dissolve()
    begin = Scheduler._begin_plan

    def restoring() -> PlanBuilder:
        del scheduler._begin_plan
        plan = begin(scheduler)
        for sequence in scheduler.roster.running:
            scheduler.planner._send_row(sequence, plan)
        return plan

    scheduler._begin_plan = restoring  # type: ignore[method-assign]
