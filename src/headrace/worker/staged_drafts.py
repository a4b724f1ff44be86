"""Drafts in a pipeline, whose stages are several steps at once.

The first stage proposes, as it embeds tokens and is told what has been sampled. What it knows of rows and has proposed
goes with the step to the other stages, ahead of its hidden states; the last one samples, and what it sampled tells the
first how much of that was right.

A step need not wait for that (PipeInfer, Butler et al. 2024: several runs in flight). Where a plan says that even a
chunk's first token is proposed, the chunk goes on after the drafts that are on their way, from a guess of what is
sampled there:

    stage 0   | t d1 d2        | g d4 d5: g for what is sampled after d2 | from the truth about the first run …
    stage 1                    | t d1 d2 → s1 s2 s3                       | s3 is g: goes on → s4 …; else cancelled

A run whose guess is wrong counts for nothing. By then the last stage knows, and computes nothing where no chunk of a step
is left. Nor do stages between, where that can be known: before a run, stage s hears what was sampled in the step
``stages - s`` before it, which has left the last stage by then if all are as fast. A stage that computes nothing tells
the next one, and sends no hidden states. Keys of such a run are written over, as the next run that counts begins where it
began or before. What each stage does follows from plans and samples alone, never from the time, so ranks of a stage need
not agree.

What lives here: the message, runs in flight, which of them count. What may not: proposing, when a run is planned
(scheduler/step_planner.py), sending hidden states (model_runner.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.parallel.pipeline import Pipe
from headrace.request import DraftsAhead, StepPlan
from headrace.worker.judge import Judge
from headrace.worker.rows import Ints, Rows, as_array, ints
from headrace.worker.speculator import Drafts, Proposal, Proposer, Speculator, with_samples

# Columns of the message, by chunk: tokens before what is proposed; whether the last ones of these are unverified drafts
# (or _VOID, refuted ones, and no hidden states come); how many tokens are proposed, then these.
_LENGTH, _AHEAD, _COUNT, _FIRST = 0, 1, 2, 3
_VOID = 2


class StagedSpeculator(Speculator):
    """``proposer``: the first stage's; others have one that does nothing."""

    _alike = False

    def __init__(self, rows: Rows, proposer: Proposer, pipe: Pipe, judge: Judge | None = None) -> None:
        super().__init__(rows, proposer, judge=judge)
        self._pipe = pipe
        # all but the last stage: tokens of each row with the drafts that are on their way; 0: all that it has is true
        self._ends = rows.column()
        self._turns = rows.column()  # how often each row has begun from the truth

    def leave(self, plan: StepPlan) -> None:
        super().leave(plan)
        gone = [*plan.rows_dropped, *(new.row for new in plan.rows_added)]
        self._ends[gone] = 0
        self._turns[gone] += 1

    def forget(self) -> None:
        super().forget()
        self._ends[:] = 0

    def _drafted(self, plan: StepPlan) -> tuple[StepPlan, Drafts]:
        table = self._lead(plan) if self._pipe.stage == 0 else self._follow(plan)
        lengths, ahead, proposed = table[:, _LENGTH], table[:, _AHEAD] != 0, table[:, _COUNT]
        lists = [row[_FIRST : _FIRST + count].tolist() for row, count in zip(table, proposed, strict=True)]
        rows, work = ints(plan.rows), ints(plan.sample_work)
        self._lengths[rows[~ahead]] = lengths[~ahead]
        self._turns[rows[~ahead]] += 1
        counts = np.maximum(np.subtract(plan.counts, plan.drafts).astype(np.int32), 1)
        counts[ahead] = 0
        starts = np.array(plan.starts, dtype=np.int32)
        starts[work] = lengths[work] - counts[work]
        counts += proposed
        drafts = np.maximum(proposed - ahead, 0)
        guesses = {j: (int(lengths[at]), lists[at][0]) for j, at in enumerate(work.tolist()) if ahead[at] and lists[at]}
        void = bool((table[:, _AHEAD] == _VOID).any())  # for the stage before
        wrong = {work[j] for j, guess in guesses.items() if void or not self._may_be(plan.sample_rows[j], *guess)}
        right = np.array([at for at in np.flatnonzero(proposed) if at not in wrong], dtype=np.int32)
        self._write(rows[right], lengths[right], Proposal(proposed[right], [lists[at] for at in right]))
        cancelled = bool(wrong) and len(wrong) == np.count_nonzero(counts)
        if self._pipe.stage < self._pipe.stages - 1:
            on = np.array([at for at in work if at not in wrong], dtype=np.int32)
            self._ends[rows[on]] = (lengths + proposed)[on]
            table[list(wrong if cancelled else ()), _AHEAD] = _VOID
            self._pipe.send(torch.from_numpy(table).to(self._rows.device))
        tokens = [each[1:] if is_ahead else each for each, is_ahead in zip(lists, ahead, strict=True)]
        empty = frozenset(j for j, at in enumerate(work) if not counts[at])
        if guesses:
            sizes = {work[j]: int(proposed[work[j]]) for j in guesses}
            lost = sum(sizes[at] for at in wrong)
            told = DraftsAhead(sum(sizes.values()) - lost, 0 if cancelled else lost, lost if cancelled else 0)
        own = Proposal(drafts, tokens, ahead=told if guesses else None)
        state: dict[str, Any] = {"guesses": guesses, "empty": empty, "cancelled": cancelled, "unsent": void}
        takers = list(plan.sample_rows)
        found = Drafts(own, drafts[work].tolist(), work.tolist(), takers, turns=self._turns[takers].tolist(), **state)
        return _without_empty(plan, starts, counts, drafts), found

    def _may_be(self, row: int, place: int, token: int) -> bool:
        """As far as this stage knows what has been sampled: the last one knows all."""
        return bool(self._ends[row]) or self._goes_on(row, place, token)

    def _goes_on(self, row: int, place: int, token: int) -> bool:
        """Whether this is the row's last token."""
        equal = self._lengths[row] == place + 1 and bool(self._rows.token_ids[row, place] == token)
        return bool(self._lengths[row] == place + 1) and self.judge.goes_on(row, place, equal=equal)

    def _counts(self, drafts: Drafts, j: int, row: int) -> bool:
        """A stage in between may hear of samples when their row has begun again after them."""
        if drafts.turns[j] != self._turns[row]:
            return False
        return j not in drafts.guesses or self._goes_on(row, *drafts.guesses[j])

    def _take(self, row: int, drafts: int, tokens: Sequence[int]) -> None:
        if self._pipe.stage == self._pipe.stages - 1 or not tokens:
            return
        begin, ids = int(self._lengths[row]), self._rows.token_ids[row]
        end = begin + drafts
        goes_on = self._ends[row] != end and len(tokens) > drafts
        if not (goes_on and self.judge.goes_on(row, end, equal=int(ids[end]) == tokens[-1])):
            self._ends[row] = 0  # nothing is on its way, or it is refuted
        ids[begin : begin + len(tokens)] = torch.tensor(tokens, dtype=ids.dtype, device=ids.device)

    def _lead(self, plan: StepPlan) -> Ints:  # [chunks, columns]
        """Proposes what the next stage is told."""
        starts, counts, most = (np.array(column, dtype=np.int32) for column in (plan.starts, plan.counts, plan.drafts))
        rows, work = ints(plan.rows), ints(plan.sample_work)
        guessed = most == counts
        ahead = guessed & (self._ends[rows] > 0)
        lengths = np.where(ahead, self._ends[rows], self._lengths[rows])
        most -= guessed & ~ahead  # the run before has turned out wrong: where the truth ends is known
        counts -= most
        starts[work] = lengths[work] - counts[work]
        self._proposer.begins(
            replace(plan, starts=as_array(starts), counts=as_array(counts), drafts=as_array(most[:0]))
        )
        table = np.zeros((len(rows), _FIRST + max(plan.drafts, default=0)), dtype=np.int32)
        table[:, _LENGTH], table[:, _AHEAD] = lengths, ahead
        if len(which := np.flatnonzero(most)):
            proposal = self._proposer.propose(rows[which], lengths[which], most[which])
            if self._rows.device.type == "cuda":
                torch.cuda.current_stream(self._rows.device).synchronize()
            for at, tokens in zip(which, proposal.lists(), strict=True):
                table[at, _COUNT], table[at, _FIRST : _FIRST + len(tokens)] = len(tokens), tokens
        return table

    def _follow(self, plan: StepPlan) -> Ints:  # [chunks, columns]
        shape = len(plan.rows), _FIRST + max(plan.drafts, default=0)
        given = self._pipe.receive(torch.empty(shape, dtype=torch.int32, device=self._rows.device))
        return np.array(given.cpu().numpy())


def _without_empty(plan: StepPlan, starts: Ints, counts: Ints, drafts: Ints) -> StepPlan:
    """The plan as it is computed, of chunks that have a token. Those that have none share their step with no others than
    such as are proposed whole, so nothing else of it counts chunks."""
    kept = counts > 0
    assert kept.all() or not (plan.prompt_logprobs or plan.masked)
    work, rows = ints(plan.sample_work), ints(plan.sample_rows)
    sampled, places = kept[work], np.cumsum(kept, dtype=np.int32) - 1
    columns: dict[str, Ints] = {
        "rows": ints(plan.rows),
        "starts": starts,
        "counts": counts,
        "drafts": drafts,
    }
    left: dict[str, Any] = {name: as_array(column[kept]) for name, column in columns.items()}
    left["sample_rows"] = as_array(rows[sampled])
    return with_samples(replace(plan, **left), places[work[sampled]], drafts[kept])
