"""A StepPlan in the making.

What lives here: collecting one step's work and freezing it. What may not: deciding what goes in (planner.py).
"""

from __future__ import annotations

from array import array
from itertools import repeat

from headrace.cache.manager import TableEdits
from headrace.request import NewRow, StepPlan
from headrace.scheduler.limits import SchedulerLimits
from headrace.scheduler.step_budget import StepMeter
from headrace.sequence import Sequence


class PlanBuilder:
    """``work[i]`` computes ``counts[i]`` tokens from ``starts[i]``. ``logits_budget`` is what is left, in rows.

    Where limits say padded, every piece of work takes as much of the token budget as the longest one. ``meter``: where the step is bounded in time.
    ``shared_tokens``: as the plan says it. ``drafts``: by piece of work; None: nothing is drafted, in the steps in flight neither.
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
        self.adapters: list[tuple[int, str]] = []
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

    def complete_plain_work(self) -> None:
        """Work appended directly (one token and one sample each, the planner's hot loop) gets its counts and samples."""
        known, total = len(self.counts), len(self.work)
        if total > known:
            self.counts.extend([1] * (total - known))
            self.sample_work.extend(range(known, total))
            self._num_tokens += total - known
            self._longest = max(self._longest, 1)

    def add_drafts(self, work_index: int, sequence: Sequence, drafts: int) -> None:
        """The last ``drafts`` tokens of a piece of work are proposed by the worker: as long as nobody knows better, all of them are right."""
        self.drafts = self.drafts or {}
        self.drafts[work_index] = drafts
        sequence.slack += drafts
        sequence.num_tokens += drafts

    def add_drafting(self, sequence: Sequence, start: int, drafts: int) -> None:
        """The last token of a sequence that has the blocks it needs, drafts behind it, and what is sampled from them."""
        work_index = self.add_work(sequence, start, 1 + drafts)
        self.add_drafts(work_index, sequence, drafts)
        sequence.num_computed_tokens = start + 1 + drafts
        sequence.num_tokens += 1
        sequence.last_step = self.step_id
        self.sample_work.append(work_index)
        self.sampled.append(sequence)

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
                token_ids=sequence.token_ids + array("i", sequence.certain),
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
        """``columns``: rows, starts, counts, sample_work and sample_rows of other work than was collected here; the edits are those that were."""
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
