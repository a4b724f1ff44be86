"""A second rank: it computes what messages tell it, and must sample what the first one does.

What lives here: that rank, and both ends of its messages. What may not: judging plans (device.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from headrace.engine.executor import DropAdapter, ExecutorInfo, LoadAdapter, Ticket
from headrace.engine.keyed_hash import Links
from headrace.errors import StepFailed
from headrace.parallel import frames
from headrace.processes.messages import Unpacker, pack
from headrace.request import StepPlan, StepResult, TokenMasks
from tests.support.hash_engine import CheckedExecutor
from tests.support.simulation.broken import hold


class Choosing(CheckedExecutor):
    """Beside grammars, a request may have said what its tokens may be."""

    def __init__(self, info: ExecutorInfo, **further: Any) -> None:
        super().__init__(info, **further)
        self._only: dict[int, int] = {}  # by row, where it has: a bit for each

    def _apply(self, plan: StepPlan) -> None:
        for new in plan.rows_added:
            self._only.pop(new.row, None)
            if new.params.allowed_token_ids is not None:
                self._only[new.row] = sum(1 << token for token in new.params.allowed_token_ids)
        super()._apply(plan)

    def _sample(self, plan: StepPlan, heads: list[Links], allowed: Mapping[int, Sequence[int]]) -> StepResult:
        if self._only and heads:
            takers = enumerate(zip(plan.sample_work, plan.sample_rows, strict=True))
            only = {j: [self._only[row]] * len(heads[work]) for j, (work, row) in takers if row in self._only}
            allowed = {**allowed, **only}
        return super()._sample(plan, heads, allowed)

    def recover(self) -> None:
        super().recover()
        self._only.clear()


class Rank:
    """As parallel/leader.py tells one, and parallel/follower.py hears."""

    def __init__(self, info: ExecutorInfo, acceptance: float) -> None:
        self.executor = Choosing(info, acceptance=acceptance)
        self._packer, self._unpacker = frames.PlanPacker(), frames.PlanUnpacker()
        self._orders = Unpacker(frames.Order)
        self._tickets: dict[int, Ticket] = {}

    def submit(self, plan: StepPlan, *, broken: bool) -> None:
        """``broken``: the step fails on all ranks alike."""
        (order,) = self._orders.feed(self._packer.pack(plan))
        assert isinstance(order, frames.Submit)
        told = self._unpacker.unpack(order)
        hold(told == plan, "rank", f"step {plan.step_id} is another one on the second rank")
        self.executor._broken = self.executor._broken or broken
        self._tickets[told.step_id] = self.executor.submit(told)

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        message = pack(frames.Sample(ticket.step_id, masks.samples, masks.words_each, bytes(masks.words)))
        (order,) = self._orders.feed(message)
        assert isinstance(order, frames.Sample)
        told = TokenMasks(order.samples, order.words_each, order.words)
        self.executor.sample(self._tickets[order.step_id], told)

    def collect(self, ticket: Ticket) -> StepResult | None:
        """None: it failed."""
        with suppress(StepFailed):
            return self.executor.collect(self._tickets.pop(ticket.step_id))
        return None

    def control(self, order: LoadAdapter | DropAdapter) -> None:
        field = {"load" if isinstance(order, LoadAdapter) else "drop": order}
        (told,) = self._orders.feed(pack(frames.Control(**field)))  # type: ignore[arg-type]
        assert isinstance(told, frames.Control)
        self.executor.control(told.load or told.drop)  # type: ignore[arg-type]
