"""A StepPlan in the making: one step's work collected and frozen, or, where steps are alike, made from the plan before.

While every running sequence computes one token a step and nothing is asked of it but that token, a step's plan is the
plan before with each start one higher, and its result a list of tokens that will be wanted some day. So a cohort
counts steps instead of writing into each sequence's record; what a record would say is made up for when something needs
it:

    a step                    costs a look at
    that is like any other    nothing but its tokens (does one end a sequence?)
    at which some are due     those: their next token needs a block, is the last, fills a block that others may find, or
    a loop is looked for
    at which one ends         all: the cohort is dissolved, and another may form some steps later

What lives here: collecting and freezing, the count, who is due when, making up for records. What may not: deciding what
goes in, what due ones need (step_planner.py, scheduler.py).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence as Seq
from itertools import repeat

from headrace.cache.manager import TableEdits
from headrace.request import NewRow, SequenceStatus, StepPlan
from headrace.scheduler.limits import SchedulerLimits
from headrace.scheduler.roster import Sequence
from headrace.scheduler.step_budget import StepMeter


class PlanBuilder:
    """``work[i]`` computes ``counts[i]`` tokens from ``starts[i]``. ``logits_budget`` is what is left, in rows.

    Where limits say padded, every piece of work takes as much of the token budget as the longest one. ``meter``: where
    the step is bounded in time. ``shared_tokens``: as the plan says it. ``drafts``: by piece of work; None: nothing is
    drafted, in the steps in flight neither.
    """

    __slots__ = (
        "_longest", "_num_tokens", "_padded", "_token_budget", "adapters", "counts", "drafts", "edits", "logits_budget", "masked", "meter",
        "prompt_logprobs",
        "rows_added", "sample_work", "sampled", "shared_tokens", "starts", "step_id", "work",
    )  # fmt: skip

    def __init__(self, step_id: int, limits: SchedulerLimits) -> None:
        self.step_id = step_id
        self.logits_budget = limits.max_logits_rows
        self._token_budget = limits.max_num_batched_tokens
        self._padded = limits.padded
        self._num_tokens = 0
        self._longest = 0
        self.work: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.sample_work: list[int] = []
        self.sampled: list[Sequence] = []
        self.adapters: list[tuple[int, str, tuple[int, ...]]] = []
        self.rows_added: list[NewRow] = []
        self.edits = TableEdits()
        self.prompt_logprobs: list[int] = []
        self.masked: list[int] = []
        self.meter: StepMeter | None = None
        self.shared_tokens: int | None = None
        self.drafts: dict[int, int] | None = None

    @property
    def is_empty(self) -> bool:
        """Edits and new rows make a plan worth sending even when it computes nothing."""
        return not (self.work or self.rows_added or self.edits.row)

    @property
    def room(self) -> int:
        """Tokens that one more piece of work may have."""
        if not self._padded:
            return self._token_budget - self._num_tokens
        share = self._token_budget // (len(self.work) + 1)
        return share if share >= self._longest else 0

    def add_work(self, sequence: Sequence, start: int, count: int) -> int:
        """Plans tokens of one sequence; returns the index of this piece of work."""
        self.work.append(sequence)
        self.starts.append(start)
        self.counts.append(count)
        self._num_tokens += count
        self._longest = max(self._longest, count)
        if self.meter is not None:
            self.meter.add(start, count)
        return len(self.work) - 1

    def complete_plain_work(self, drafts: int = 0) -> None:
        """Work appended directly (one token, so many drafts and one sample each, the planner's hot loops) gets its counts
        and samples."""
        known, total = len(self.counts), len(self.work)
        if total > known:
            self.counts.extend([1 + drafts] * (total - known))
            self.sample_work.extend(range(known, total))
            self._num_tokens += (1 + drafts) * (total - known)
            self._longest = max(self._longest, 1 + drafts)
            if drafts:
                self.drafts = self.drafts or {}
                self.drafts.update(dict.fromkeys(range(known, total), drafts))

    def add_drafts(self, work_index: int, sequence: Sequence, drafts: int) -> None:
        """The last ``drafts`` tokens of a piece of work are proposed by the worker: as long as nothing better is known, all
        of them are right."""
        self.drafts = self.drafts or {}
        self.drafts[work_index] = drafts
        sequence.slack += drafts
        sequence.num_tokens += drafts

    def add_scores(self, work_index: int) -> None:
        """Every position of this piece of work is scored: it spends the logits budget."""
        self.prompt_logprobs.append(work_index)
        self.logits_budget -= self.counts[work_index]

    def add_sample(self, work_index: int, sequence: Sequence) -> None:
        if sequence.structured:
            self.masked.append(len(self.sampled))
        self.sample_work.append(work_index)
        self.sampled.append(sequence)

    def add_row(self, sequence: Sequence) -> None:
        """(Re)builds a sequence's row from what is known of it."""
        assert sequence.row is not None
        request = sequence.request
        sequence.row_lags = False
        self.rows_added.append(
            NewRow(
                row=sequence.row,
                sequence_id=request.request_id,
                token_ids=sequence.token_ids + array("i", sequence.forced_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=request.params,
                seed=sequence.seed,
                stop_token_ids=tuple(sorted(sequence.stop_ids)),
                bad_word_ids=request.bad_word_ids,
                pool=(request.tenant, request.cache_salt),
                adapter_slot=sequence.adapter_slot,
            )
        )

    def reserve(self, count: int) -> None:
        """Tokens that are planned elsewhere take their part of the budget."""
        self._num_tokens += count

    def build(self, rows_dropped: list[int], columns: tuple[array[int], ...] | None = None) -> StepPlan:
        """``columns``: rows, starts, counts, sample_work and sample_rows of other work than was collected here; the
        edits are those that were."""
        if columns is None:
            lists = array("i", self.starts), array("i", self.counts), array("i", self.sample_work)
            columns = (rows_of(self.work), *lists, rows_of(self.sampled))
        rows, starts, counts, sample_work, sample_rows = columns
        edits = self.edits
        return StepPlan(
            step_id=self.step_id,
            adapters=tuple(self.adapters),
            rows_dropped=array("i", rows_dropped),
            rows_added=tuple(self.rows_added),
            table_row=array("i", edits.row),
            table_group=array("i", edits.group),
            table_index=array("i", edits.index),
            table_block=array("i", edits.block),
            copy_group=array("i", edits.copy_group),
            copy_source=array("i", edits.copy_source),
            copy_target=array("i", edits.copy_target),
            rows=rows,
            starts=starts,
            counts=counts,
            sample_work=sample_work,
            sample_rows=sample_rows,
            drafts=array("i") if self.drafts is None else array("i", map(self.drafts.get, range(len(rows)), repeat(0))),
            prompt_logprobs=tuple(self.prompt_logprobs),
            masked=tuple(self.masked),
            shared_tokens=self.shared_tokens,
        )


def rows_of(sequences: list[Sequence]) -> array[int]:
    """Of sequences that run: they have one."""
    return array("i", [sequence.row for sequence in sequences])  # type: ignore[misc]


# --- steps that are alike

MOST_PENDING = 64  # results kept back; then all records are made up for, so that memory is bounded
_BYTES = array("i").itemsize


class Cohort:
    """``members``: the running sequences in their order, each planned for one token a step. Their records are right
    when it is made."""

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
        # Positions of the next step, all at once: lanes of one number, each one higher after every step. None comes
        # near the top of its lane.
        self._starts = int.from_bytes(
            array("i", [member.num_tokens - 1 for member in members]).tobytes(), sys.byteorder
        )
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
        return sorted(
            place for place in self._plan_due.pop(self._planned, ()) if self._plan_due_at[place] == self._planned
        )

    def plan(self, due: list[int], built: PlanBuilder, rows_dropped: list[int]) -> StepPlan:
        """The next step: one token for every member. ``built`` holds what those that were due need; their records have
        it already."""
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
        plan_at = self._planned + max(0, member.fast_until + 1 - member.num_tokens)
        take_at = self._taken_at[place] + max(0, member.check_at - 1 - len(member.token_ids))
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
