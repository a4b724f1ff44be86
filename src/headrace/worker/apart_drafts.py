"""A draft model on a device of its own, or a thread of its own on the target's CPU.

Dovetail (Zhang et al. 2024) drafts on one device for a target on another, where only one of the two fits or is fast.
PipeInfer (Butler et al. 2024) goes on drafting while the target verifies, as if all drafts were right, and cancels what
is refuted. Both are here, because both need the same: rows, block tables, keys and values of the draft's own, edited by
the same plans, and a thread in which all of its work is done in order.

    target   | verifies drafts 1–4          | verifies drafts 6–9            | 5: what it samples after 4
    draft    | draws 5–9 ahead …            | draws 10–14 ahead … ✗          | ✗: 8 is refuted, so this run ends

Between the two devices go token ids alone, and the target's are the truth: before each proposal the draft's rows learn
what has been sampled. Where that is what was drawn ahead, the next drafts are there already; where it is not, the run
ends at its next token, and what it drew is dropped. So drafts are the same whether anything is drawn ahead or not. A
run lies in the row's own blocks, and ends where these do.

What lives here: the two sides, the runs, what is counted of them. What may not: passes of the draft (draft_model.py),
acceptance (speculator.py), whether a run pays (speculative/ahead.py), which device has room (drafting.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.request import DraftsAhead, StepPlan
from headrace.speculative.ahead import RUNS, RunsAhead
from headrace.worker.draft_model import DraftModel
from headrace.worker.rows import Ints, Rows, ints
from headrace.worker.speculator import Proposal, Proposer

_MOST_HELD = 32  # steps that draft nothing, which are told together
_MOST_WAITING = 2  # times the tokens of a step, of prompts: beyond, they are computed once drafts follow them


class ApartDrafts(Proposer):
    """The target's side, which waits for the other only where it needs drafts. ``most_tokens``: of one pass over what
    the draft has not computed."""

    def __init__(self, target: Rows, side: DraftSide, *, threads: int, most_tokens: int) -> None:
        self._target = target
        self.side = side
        self._most_tokens = most_tokens
        self._known = target.column()  # tokens of each row that both sides have
        self._stop = Event()
        self._begun: deque[tuple[Future[None], int]] = deque()
        self._held: list[Callable[[], None]] = []
        self._pool = ThreadPoolExecutor(1, "headrace-draft", torch.set_num_threads, (threads,))

    def begins(self, plan: StepPlan) -> None:
        self._stop.set()
        before = {new.row: int(self._known[new.row]) for new in plan.rows_added}
        for new in plan.rows_added:
            self._known[new.row] = len(new.token_ids)
        rows, ends = ints(plan.rows), np.add(plan.starts, plan.counts).astype(np.int32)
        longer = np.flatnonzero((np.asarray(plan.counts) > 1) & (ends > self._known[rows]))
        told = self._truth(rows[longer], ends[longer])
        waiting = sum(tokens for each, tokens in self._begun if not each.done())
        compute = waiting <= _MOST_WAITING * self._most_tokens
        self._held.append(partial(self.side.begins, plan, before, told, compute))
        if max(plan.counts, default=0) > 1 or len(self._held) >= _MOST_HELD:
            self._do(self._take_held(), tokens=plan.num_tokens if compute else 0)

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        self._stop.set()
        self._stop, made = Event(), Future[Proposal]()
        self._do(partial(self._make, made, self._take_held(), self._truth(rows, lengths), most, self._stop))
        return made.result()

    def _make(self, made: Future[Proposal], before: Callable[[], None], told: Truth, most: Ints, stop: Event) -> None:
        """The drafts that are waited for; then what may follow, which is not."""
        try:
            before()
            made.set_result(self.side.propose(told, most, self._most_tokens))
        except BaseException as error:
            made.set_exception(error)
        else:
            self.side.run_ahead(told.rows, told.ends + most, most, stop)

    def left(self, row: int, length: int) -> None:
        self._held.append(partial(self.side.left, row, length))

    def forget(self) -> None:
        """Waits for the other side, whatever has become of its work."""
        self._stop.set()
        while self._begun:
            self._begun.popleft()[0].exception()
        self._known[:] = 0
        self._held.clear()
        self._do(self.side.forget).result()

    def _truth(self, rows: Ints, ends: Ints) -> Truth:
        """What the target's rows hold beyond what both sides know, up to ``ends``; both know it from now on."""
        starts = self._known[rows]
        self._known[rows] = np.maximum(starts, ends)
        return Truth(rows, starts, ends, held(self._target, rows, starts, ends))

    def _take_held(self) -> Callable[[], None]:
        """Work that has not been waited for, in order: waking the other thread takes longer than most of it."""
        held, self._held = self._held, []

        def work() -> None:
            for each in held:
                each()

        return work

    def _do(self, work: Callable[[], None], *, tokens: int = 0) -> Future[None]:
        """Behind all that was given before. Raises what became of that. ``tokens``: that it computes of prompts."""
        while self._begun and self._begun[0][0].done():
            self._begun.popleft()[0].result()

        def done() -> None:
            with torch.inference_mode():
                work()

        self._begun.append((future := self._pool.submit(done), tokens))
        return future


class Truth:
    """Tokens ``ids`` [n, most] of ``rows`` from ``starts`` to ``ends``."""

    __slots__ = ("ends", "ids", "rows", "starts")

    def __init__(self, rows: Ints, starts: Ints, ends: Ints, ids: Ints) -> None:
        self.rows, self.starts, self.ends, self.ids = rows, starts, ends, ids

    @property
    def there(self) -> NDArray[np.bool_]:  # [n, most]
        there: NDArray[np.bool_] = np.arange(self.ids.shape[1])[None] < (self.ends - self.starts)[:, None]
        return there


def held(rows: Rows, which: Ints, starts: Ints, ends: Ints) -> Ints:  # [n, most], on the host
    """Tokens that rows hold; what is beyond a row's end means nothing."""
    found: Ints = rows.held(which, starts, max(0, int((ends - starts).max(initial=0)))).cpu().numpy()
    return found


class DraftSide:
    """All that is the draft's, for the thread that has it. ``model`` drafts over ``rows``. ``ahead``: it goes on while
    its drafts are verified."""

    def __init__(self, model: DraftModel, rows: Rows, block_size: int, *, ahead: bool) -> None:
        self.model = model
        self.rows = rows
        self._block_size = block_size
        self._ahead = ahead
        self._runs = RunsAhead()
        self._ends = rows.column()  # of what was drawn after each row's last token
        self._drawn = rows.column()  # of that, ahead
        self._spared = 0  # tokens of runs that were cancelled before they were drawn

    def begins(self, plan: StepPlan, before: dict[int, int], told: Truth, compute: bool) -> None:
        """``before``: tokens that rows had which are built (again). ``compute``: prompts, now."""
        self.rows.apply(plan)
        for row, known in before.items():
            self.model.correct(np.array([row]), np.array([known]))
            self._ends[row] = self._drawn[row] = 0
        self._learn(told)
        self.model.begins(plan, compute=compute)

    def propose(self, told: Truth, most: Ints, most_tokens: int) -> Proposal:
        refuted = self._learn(told)
        rows, lengths = told.rows, told.ends
        ready: Ints = np.clip(self._ends[rows] - lengths, 0, most)
        self.model.catch_up(rows, lengths, most_tokens)
        made = self.model.propose(rows, lengths, most, ready)
        self._settle()
        self._ends[rows] = np.maximum(self._ends[rows], lengths + made.counts)
        spared, self._spared = self._spared, 0
        ahead = DraftsAhead(int(np.minimum(ready, made.counts).sum()), refuted, spared) if self._ahead else None
        return replace(made, tokens=made.lists(), stand=False, ahead=ahead)

    def _learn(self, told: Truth) -> int:
        """What is true of rows. Returns how many tokens that were drawn ahead are not."""
        if not told.ids.size:
            return 0
        there = told.there
        wrong = there & (held(self.rows, told.rows, told.starts, told.ends) != told.ids)
        first = np.where(wrong.any(axis=1), told.starts + wrong.argmax(axis=1), told.ends).astype(np.int32)
        chunk, at = np.nonzero(there)
        self.rows.put(told.rows[chunk], (told.starts[chunk] + at).astype(np.int32), told.ids[there])
        self.model.count(told.rows, [list(ids[each]) for ids, each in zip(told.ids, there, strict=True)])
        self.model.correct(told.rows, first)
        refuted = told.rows[(first < told.ends) | (self._ends[told.rows] < told.ends)]
        lost, runs = int(self._drawn[refuted].sum()), int((self._drawn[told.rows] > 0).sum())
        wrong = int((self._drawn[refuted] > 0).sum())
        self._runs.told(runs - wrong, wrong)
        self._ends[refuted] = 0
        self._drawn[told.rows] = 0
        return lost

    def run_ahead(self, rows: Ints, ends: Ints, most: Ints, stop: Event) -> None:
        """Draws what may follow upon drafts that end at ``ends``, until it is told to stop, a token of all rows at
        once."""
        if not self._ahead or not self._runs.wanted(int(most.max())):
            return
        chosen = self.model.may_go_on(rows) & (self._ends[rows] >= ends)
        rows, begun, most = rows[chosen], self._ends[rows[chosen]], most[chosen]
        room = -(-ends[chosen] // self._block_size) * self._block_size
        limits = np.minimum(np.minimum(room, self.rows.token_ids.shape[1]), ends[chosen] + RUNS * (most + 1))
        now = begun.copy()
        while len(live := np.flatnonzero(now < limits)) and not stop.is_set():
            self.model.go_on(rows[live], now[live])
            now[live] += 1
            self._settle()  # else all would be queued before anything can be cancelled
        self._ends[rows] = now
        self._drawn[rows] = now - ends[chosen]
        self._spared += int(np.maximum(limits - now, 0).sum())

    def _settle(self) -> None:
        """Waits for a device that has a queue."""
        if self.rows.device.type == "cuda":
            torch.cuda.current_stream(self.rows.device).synchronize()

    def left(self, row: int, length: int) -> None:
        self.model.left(row, length)

    def forget(self) -> None:
        self.model.forget()
        self.rows.clear()
        self._ends[:] = self._drawn[:] = 0
