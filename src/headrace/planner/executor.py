"""A device that only says how long it would take: the core, scheduler and cache over it are the real ones.

Time is virtual. Handing over a step takes the host ``host_seconds``; the device begins a step when it has it and has ended the one before.
So at depth 0 the device waits for the host, and from depth 1 on it does not, as far as its steps are longer.

Tokens are a function of (sequence, position), so answers depend on neither batches, preemption nor depth, and hardly any two begin alike.

What lives here: the modelled executor and its counts. What may not: prices (step_time.py), scheduling, torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.clock import Clock
from headrace.engine.executor import ExecutorInfo, Ticket
from headrace.planner.step_time import StepPrice
from headrace.request import StepPlan, StepResult, TokenMasks

_SEQUENCE, _POSITION = 2_654_435_761, 40_503  # odd, so that neighbours are far apart


@dataclass(slots=True)
class DeviceCounts:
    """Sums over all steps so far."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    most_rows: int = 0
    busy_seconds: float = 0.0
    floor_seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, plan: StepPlan, price: StepPrice) -> None:
        rows = len(plan.rows)
        self.steps += 1
        self.rows += rows
        self.tokens += plan.num_tokens
        self.most_rows = max(self.most_rows, rows)
        self.busy_seconds += price.seconds
        self.floor_seconds += price.floor_seconds
        self.bytes += price.bytes
        self.flops += price.flops


@dataclass(slots=True)
class _Timed(Ticket):
    result: StepResult
    ready_at: float


class ModelledExecutor:
    """Takes the virtual time that ``price`` says. One device: steps follow one another."""

    def __init__(self, info: ExecutorInfo, price: Callable[[StepPlan], StepPrice], clock: Clock, *, host_seconds: float = 0.0) -> None:
        self.info = info
        self.counts = DeviceCounts()
        self._price = price
        self._clock = clock
        self._host_seconds = host_seconds
        self._busy_until = 0.0
        self._sequences: dict[int, int] = {}  # row → where its tokens begin

    def submit(self, plan: StepPlan) -> _Timed:
        if self._host_seconds:
            self._clock.sleep_until(self._clock.now() + self._host_seconds)
        price = self._price(plan)
        self.counts.add(plan, price)
        self._busy_until = max(self._busy_until, self._clock.now()) + price.seconds
        for new in plan.rows_added:
            self._sequences[new.row] = new.sequence_id * _SEQUENCE
        result = StepResult(plan.step_id, self._tokens(plan), device_seconds=price.seconds)
        return _Timed(plan.step_id, result, self._busy_until)

    def _tokens(self, plan: StepPlan) -> list[tuple[int, ...]]:
        vocab, sequences = self.info.vocab_size, self._sequences
        starts, counts = plan.starts, plan.counts
        return [
            ((sequences[row] + (starts[work] + counts[work]) * _POSITION) % vocab,)
            for work, row in zip(plan.sample_work, plan.sample_rows, strict=True)
        ]

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        raise AssertionError("a simulated request follows no grammar")

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, _Timed)
        self._clock.sleep_until(ticket.ready_at)
        return ticket.result

    def recover(self) -> None:
        raise AssertionError("a simulated step does not fail")

    def close(self) -> None:
        self._sequences.clear()
