"""A device that only says how long it would take: the core, scheduler and cache over it are the real ones.

Time is virtual. Handing over a step takes the host ``host_seconds``; the device begins a step when it has it and has ended the one before.
So at depth 0 the device waits for the host, and from depth 1 on it does not, as far as its steps are longer.

Tokens are a function of (sequence, position), so answers depend on neither batches, preemption nor depth, and hardly any two begin alike.

What lives here: the modelled executor and its counts. What may not: prices (step_time.py), scheduling, torch.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.clock import Clock
from headrace.cost.prices import RESTED
from headrace.engine.executor import ExecutorInfo, Ticket
from headrace.planner.step_time import StepPrice
from headrace.request import StepPlan, StepResult, TokenMasks

PAUSE = 1e-6  # s that a device waits for more than its host: then there was no work
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

    def add(self, rows: int, tokens: int, price: StepPrice) -> None:
        self.steps += 1
        self.rows += rows
        self.tokens += tokens
        self.most_rows = max(self.most_rows, rows)
        self.busy_seconds += price.seconds
        self.floor_seconds += price.floor_seconds
        self.bytes += price.bytes
        self.flops += price.flops


@dataclass(slots=True)
class _Timed(Ticket):
    result: StepResult
    ready_at: float


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Turns that are alike, as they will be. ``columns``: the tokens of the steps in flight, then of those submitted; by turn: the price of
    the step submitted, when it is ready, and when the turn ends."""

    columns: list[list[int]]
    prices: list[StepPrice]
    ready: list[float]
    ends: list[float]
    rows: int


class ModelledExecutor:
    """Takes the virtual time that ``price`` says; ``price_alike`` says it for steps of one token a row that follow one another; ``ratio`` how many
    times as long a step takes, by its number, when it begins and whether it is of single tokens alone. One device."""

    def __init__(
        self,
        info: ExecutorInfo,
        price: Callable[[StepPlan], StepPrice],
        clock: Clock,
        *,
        host_seconds: float = 0.0,
        price_alike: Callable[[array[int], int], list[StepPrice]] | None = None,
        ratio: Callable[[int, float, bool], float] | None = None,
    ) -> None:
        self.info = info
        self.counts = DeviceCounts()
        self._price = price
        self._price_alike = price_alike
        self._in_flight: deque[_Timed] = deque()
        self._last_rows: array[int] = array("i")
        self._last_seconds = 0.0
        self._clock = clock
        self._ratio = ratio
        self._host_seconds = host_seconds
        self._busy_until = 0.0
        self._rested_at = -math.inf
        self._sequences: dict[int, int] = {}  # row → where its tokens begin

    def submit(self, plan: StepPlan) -> _Timed:
        price = self._price(plan)
        now = self._clock.now()
        began = now + self._host_seconds + price.host_seconds
        pause = now - self._busy_until if now > self._busy_until + PAUSE else 0.0
        if pause > RESTED:
            self._rested_at = now
        price, self._busy_until = _placed(self._felt(price, self.counts.steps, now, pause), began, self._busy_until)
        self._clock.sleep_until(began + price.launch_seconds + price.record_seconds)
        self.counts.add(len(plan.rows), plan.num_tokens, price)
        self._last_rows, self._last_seconds = plan.sample_rows, price.seconds
        for new in plan.rows_added:
            self._sequences[new.row] = new.sequence_id * _SEQUENCE
        tokens, graph = self._tokens(plan), price.graph_tokens
        recorded = price.record_seconds > 0.0
        result = StepResult(plan.step_id, tokens, device_seconds=price.seconds, graph_tokens=graph, recorded_graph=recorded)
        ticket = _Timed(plan.step_id, result, self._busy_until)
        self._in_flight.append(ticket)
        return ticket

    def _felt(self, price: StepPrice, step: int, now: float, pause: float = 0.0) -> StepPrice:
        """What the step takes at this moment."""
        seconds = price.seconds if price.after is None else price.seconds + price.after(pause, now - self._rested_at)
        seconds = seconds if self._ratio is None else seconds * self._ratio(step, now, price.alone)
        return price if seconds == price.seconds else replace(price, seconds=seconds)

    def _tokens(self, plan: StepPlan) -> list[tuple[int, ...]]:
        vocab, sequences = self.info.vocab_size, self._sequences
        starts, counts = plan.starts, plan.counts
        return [
            ((sequences[row] + (starts[work] + counts[work]) * _POSITION) % vocab,)
            for work, row in zip(plan.sample_work, plan.sample_rows, strict=True)
        ]

    def answer_ids(self, request_id: int, start: int, count: int) -> array[int]:
        """The tokens that a request of one answer gets at positions from ``start`` on."""
        positions = np.arange(start, start + count, dtype=np.int64)
        found = array("i")
        found.frombytes(((request_id * _SEQUENCE + positions * _POSITION) % self.info.vocab_size).astype(np.int32).tobytes())
        return found

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        raise AssertionError("a simulated request follows no grammar")

    def collect(self, ticket: Ticket) -> StepResult:
        assert ticket is self._in_flight[0], "tickets are collected in order"
        ticket = self._in_flight.popleft()
        self._clock.sleep_until(ticket.ready_at)
        return ticket.result

    # --- many steps at once

    def turns_before(self, until: float, most: int) -> int:
        """About how many turns like the last one begin before ``until``, at most so many; 0 where they cannot be foreseen."""
        if self._price_alike is None or not self._last_seconds:
            return 0
        return int(min(most, 1.0 + max(0.0, until - self._clock.now()) / self._last_seconds))

    def foresee(self, starts: array[int], turns: int, until: float) -> Foreseen:
        """Turns that submit one token a row from ``starts`` on, each a position further, and collect the oldest step; nothing is done yet.

        A turn that would begin at ``until`` or later is not among them.
        """
        assert self._price_alike is not None, "turns_before says none"
        prices = self._price_alike(starts, turns)
        now, busy, ready, ends = self._clock.now(), self._busy_until, [ticket.ready_at for ticket in self._in_flight], list[float]()
        for turn, price in enumerate(prices):
            if now >= until:
                break
            price = self._felt(price, self.counts.steps + turn, now)
            now = now + self._host_seconds + price.host_seconds  # in this order, as submit adds them
            prices[turn], busy = _placed(price, now, busy)
            ready.append(busy)
            now = max(now + price.launch_seconds, ready[turn])
            ends.append(now)
        columns = [[token for (token,) in ticket.result.tokens] for ticket in self._in_flight]
        columns += self._columns(starts, len(ends))
        return Foreseen(columns, prices, ready[len(self._in_flight) :], ends, len(starts))

    def _columns(self, starts: array[int], steps: int) -> list[list[int]]:
        """What steps from ``starts`` on sample, row by row as the last one."""
        first = np.array([self._sequences[row] for row in self._last_rows]) + (np.asarray(starts, dtype=np.int64) + 1) * _POSITION
        found: list[list[int]] = ((first + np.arange(steps)[:, None] * _POSITION) % self.info.vocab_size).tolist()
        return found

    def leap(self, foreseen: Foreseen, turns: int) -> Sequence[Ticket]:
        """The first ``turns`` of them have been; returns what is in flight then."""
        depth = len(self._in_flight)
        first = self._in_flight[-1].step_id + 1 if depth else 0
        for price in foreseen.prices[:turns]:
            self.counts.add(foreseen.rows, foreseen.rows, price)
        for turn in range(max(0, turns - depth), turns):
            tokens = [(token,) for token in foreseen.columns[depth + turn]]
            result = StepResult(first + turn, tokens, device_seconds=foreseen.prices[turn].seconds)
            self._in_flight.append(_Timed(first + turn, result, foreseen.ready[turn]))
        while len(self._in_flight) > depth:
            self._in_flight.popleft()
        if turns:
            self._busy_until = foreseen.ready[turns - 1]
            self._clock.sleep_until(foreseen.ends[turns - 1])
        return self._in_flight

    def recover(self) -> None:
        raise AssertionError("a simulated step does not fail")

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._sequences.clear()


def _placed(price: StepPrice, began: float, free: float) -> tuple[StepPrice, float]:
    """The price with the seconds that the device is really at the step, and when it has ended it: handed over from ``began`` on, after what
    keeps the device until ``free``. A step ends no sooner than its last kernel is launched."""
    begin = max(free, began)
    end = max(begin + price.seconds, began + price.launch_seconds)
    return (replace(price, seconds=end - begin) if price.launch_seconds else price), end
