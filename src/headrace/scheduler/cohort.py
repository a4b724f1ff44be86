"""Sequences that decode side by side, planned and taken as arrays.

While every running sequence computes one token a step and nothing is asked of it but that token, a step's plan is the plan before with
each start one higher, and its result a list of tokens that somebody will want some day. So a cohort counts steps instead of writing into
each sequence's record; what a record would say is made up for when somebody needs it:

    a step                    costs a look at
    that is like any other    nothing but its tokens (does one end a sequence?)
    at which some are due     those: their next token needs a block, is the last, fills a block that others may find, or a loop is looked for
    at which one ends         all: the cohort is dissolved, and another may form some steps later

What lives here: the count, who is due when, making up for records. What may not: what due ones need (planner.py, results.py).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as Seq

from headrace.request import SequenceStatus, StepPlan
from headrace.scheduler.plan_builder import PlanBuilder, rows_of
from headrace.sequence import Sequence

MOST_PENDING = 64  # results kept back; then all records are made up for, so that memory is bounded
_BYTES = array("i").itemsize


class Cohort:
    """``members``: the running sequences in their order, each planned for one token a step. Their records are right when it is made."""

    def __init__(self, members: list[Sequence]) -> None:
        self.members = members
        self.request_ids = [member.request_id for member in members]
        self.indices = [member.index for member in members]
        self.stop_ids = frozenset[int]().union(*(member.stop_ids for member in members))
        self._planned = self._taken = 0  # steps since then
        self._last_step = members[-1].last_step
        self._rows = rows_of(members)
        self._ones = array("i", [1]) * len(members)
        self._every = array("i", range(len(members)))
        # Positions of the next step, all at once: lanes of one number, each one higher after every step. None comes near the top of its lane.
        self._starts = int.from_bytes(array("i", [member.num_tokens - 1 for member in members]).tobytes(), sys.byteorder)
        self._one_each = int.from_bytes(self._ones.tobytes(), sys.byteorder)
        self._pending: list[list[int]] = []  # tokens of the last results
        self._planned_at = [0] * len(members)  # the counts up to which each record is right
        self._taken_at = [0] * len(members)
        self._plan_due: dict[int, list[int]] = {}  # count of steps → places of members
        self._take_due: dict[int, list[int]] = {}
        self._plan_due_at, self._take_due_at = [-1] * len(members), [-1] * len(members)
        for place in range(len(members)):
            self._expect(place)

    # --- steps

    def due_to_plan(self) -> list[int]:
        """Places of those whose next token cannot be planned without thought, in order."""
        return sorted(place for place in self._plan_due.pop(self._planned, ()) if self._plan_due_at[place] == self._planned)

    def plan(self, due: list[int], built: PlanBuilder, rows_dropped: list[int]) -> StepPlan:
        """The next step: one token for every member. ``built`` holds what those that were due need; their records have it already."""
        starts = array("i", self._starts.to_bytes(_BYTES * len(self.members), sys.byteorder))
        plan = built.build(rows_dropped, (self._rows, starts, self._ones, self._every, self._rows))
        self._planned += 1
        self._last_step = plan.step_id
        self._starts += self._one_each
        for place in due:
            self._planned_at[place] = self._planned
            self._expect(place)
        return plan

    def due_to_take(self) -> list[int]:
        """Places of those whose next token cannot be taken without thought, in order."""
        return sorted(place for place in self._take_due.pop(self._taken, ()) if self._take_due_at[place] == self._taken)

    def take(self, tokens: list[int], heeded: list[int]) -> None:
        """The oldest step's tokens, one a member. Those ``heeded`` have theirs in their records already."""
        self._pending.append(tokens)
        self._taken += 1
        for place in heeded:
            self._taken_at[place] = self._taken
            if self.members[place].status is SequenceStatus.RUNNING:
                self._expect(place)
        if len(self._pending) >= MOST_PENDING:
            self.settle_all()

    def _expect(self, place: int) -> None:
        """Finds out from a member's record, which is right, when it needs a thought next."""
        member = self.members[place]
        plan_at = self._planned + max(0, member.plain_until + 1 - member.num_tokens)
        take_at = self._taken_at[place] + max(0, member.checkpoint - 1 - len(member.token_ids))
        if self._plan_due_at[place] != plan_at:
            self._plan_due_at[place] = plan_at
            self._plan_due.setdefault(plan_at, []).append(place)
        if self._take_due_at[place] != take_at:
            self._take_due_at[place] = take_at
            self._take_due.setdefault(take_at, []).append(place)

    # --- records

    def settle(self, place: int) -> Sequence:
        """Makes up for one record."""
        missing = self._taken - self._taken_at[place]
        self._catch_up(place, [step[place] for step in self._pending[-missing:]] if missing else ())
        return self.members[place]

    def settle_all(self) -> None:
        """Makes up for all of them."""
        taken = list(zip(*self._pending, strict=True)) if self._pending else [()] * len(self.members)
        for place, tokens in enumerate(taken):
            missing = self._taken - self._taken_at[place]
            self._catch_up(place, tokens[-missing:] if missing else ())
        self._pending.clear()

    def _catch_up(self, place: int, tokens: Seq[int]) -> None:
        member, steps = self.members[place], self._planned - self._planned_at[place]
        if steps:
            member.num_tokens += steps
            member.num_computed_tokens += steps
            member.last_step = self._last_step
            self._planned_at[place] = self._planned
        if tokens:
            member.token_ids.extend(tokens)
            self._taken_at[place] = self._taken
