"""A device that only says how long it would take: the core, scheduler and cache over it are the real ones.

Time is virtual. Handing over a step takes the host ``host_seconds``, less what it does once it has collected one; the
device begins a step when it has it and has ended the one before. So at depth 0 the device waits for the host, and from
depth 1 on it does not, as far as its steps are longer.

Tokens are a function of (sequence, position), so answers depend on neither batches, preemption nor depth, and hardly
any two begin alike.

What lives here: the modelled executor and its counts. What may not: prices (step_time.py), scheduling, torch.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.clock import Clock
from headrace.cost.prices import RESTED
from headrace.engine.executor import AdapterOutcome, Control, ExecutorInfo, ExportBlocks, Ticket
from headrace.planner.drafts import Drafting, ModelledDrafts, ModelledRuns
from headrace.planner.step_time import StepPrice
from headrace.request import StepPlan, StepResult, TokenMasks
from headrace.speculative.settings import chance

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

    def add(self, rows: int, tokens: int, price: StepPrice, seconds: float) -> None:
        """``seconds``: that the device was really at it."""
        self.steps += 1
        self.rows += rows
        self.tokens += tokens
        self.most_rows = max(self.most_rows, rows)
        self.busy_seconds += seconds
        self.floor_seconds += price.floor_seconds
        self.bytes += price.bytes
        self.flops += price.flops

    def join(self, other: DeviceCounts) -> None:
        """Those of another device, too."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "most_rows" else mine + theirs)


def _share(number: int) -> float:
    """From 0 to 1, by a hash (the finaliser of MurmurHash3, Appleby)."""
    for constant in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        number = (number ^ number >> 33) * constant & 2**64 - 1
    return (number ^ number >> 33) / 2**64


@dataclass(slots=True)
class _Timed(Ticket):
    result: StepResult
    ready_at: float
    host_behind: float = 0.0


class ModelledExecutor:
    """Takes the virtual time that ``price`` says; ``ratio``: how many times as long a step takes, by its number, when
    it begins and whether it is of single tokens alone. One device, and where plans draft perhaps another for that."""

    def __init__(
        self,
        info: ExecutorInfo,
        price: Callable[[StepPlan], StepPrice],
        clock: Clock,
        *,
        host_seconds: float = 0.0,
        ratio: Callable[[int, float, bool], float] | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.info = info
        self.counts = DeviceCounts()
        self._price = price
        self._in_flight: deque[_Timed] = deque()
        self._clock = clock
        self._ratio = ratio
        self._host_seconds = host_seconds
        self.collected_at = 0.0  # the last step
        self._host_free = 0.0  # when the host had done what came behind it
        self._busy = [0.0] * info.stages  # until when
        self._ends: deque[float] = deque(maxlen=info.stages)  # of so many steps, whose tokens the next one goes on from
        self._rested_at = -math.inf
        self._sequences: dict[int, int] = {}  # row → where its tokens begin
        self._lengths: dict[int, int] = {}  # row → its tokens, where some are drafted
        self._drafting = drafting or Drafting()
        self._drafts = ModelledDrafts(self._drafting)
        self._runs = ModelledRuns(info.stages)

    def submit(self, plan: StepPlan) -> _Timed:
        price = self._price(plan)
        now = self._clock.now()
        began = now + self._host_seconds + price.host_seconds - price.host_behind
        pause = now - self._busy[0] if now > max(self._busy[0], self._host_free) + PAUSE else 0.0
        if pause > RESTED:
            self._rested_at = now
        for new in plan.rows_added:
            self._sequences[new.row], self._lengths[new.row] = new.sequence_id * _SEQUENCE, len(new.token_ids)
            self._drafts.forget(new.row)
            self._runs.forget(new.row)
        seconds, drafting, ahead = self._felt(price, now, pause), 0.0, None
        if plan.drafts:
            drafting, ahead = self._drafts.verified(plan, seconds, self._lengths, self._is_right)
        guesses = [int(one == all) for one, all in zip(plan.drafts, plan.counts, strict=False)]  # beside drafts
        drafted = [max(0, plan.drafts[work] - guesses[work]) for work in plan.sample_work] if plan.drafts else []
        self._runs.begin()
        tokens = self._drafted(plan) if self.info.max_drafts else self._tokens(plan)
        told = self._runs.told()
        ahead, cancelled = told or ahead, told is not None and not any(tokens)
        goes_on = 1 in plan.counts or any(plan.drafts)
        seconds, end = self._computed(price, seconds, began, drafting=drafting, goes_on=goes_on, cancelled=cancelled)
        self._clock.sleep_until(began + price.launch_seconds + price.record_seconds)
        self.counts.add(len(plan.rows), plan.num_tokens, price, seconds)
        result = StepResult(plan.step_id, tokens, device_seconds=seconds, graph_tokens=price.graph_tokens,
                            recorded=price.record_seconds > 0.0, drafted=drafted, ahead=ahead)  # fmt: skip
        ticket = _Timed(plan.step_id, result, end, price.host_behind)
        self._in_flight.append(ticket)
        return ticket

    def _computed(
        self, price: StepPrice, seconds: float, began: float, *, drafting: float, goes_on: bool, cancelled: bool
    ) -> tuple[float, float]:
        """(seconds that a device is at it, when the last has ended). A stage begins when it has what the one before
        computed; a step, once the tokens that it ``goes_on`` from are there. ``drafting``: by the first stage, first.
        ``cancelled``: when the last comes to it."""
        slower = seconds / price.seconds if price.stages else 1.0
        each, hop = [slower * every for every in price.stages] or [seconds], price.hop_seconds
        each[0] += drafting
        if cancelled:
            each[-1] = 0.0
        first = self._ends[0] + hop if price.stages and goes_on and len(self._ends) == len(each) else 0.0
        end = max(began, first)
        for stage, taken in enumerate(each):
            begin = max(self._busy[stage], end + (hop if stage else 0.0))
            end = begin + taken
            if end < began + price.launch_seconds:  # it ends no sooner than its last kernel is launched
                end = began + price.launch_seconds
                each[stage] = end - begin
            self._busy[stage] = end
        self._ends.append(end)
        return sum(each) / len(each), end

    def _felt(self, price: StepPrice, now: float, pause: float) -> float:
        """Seconds that the step takes at this moment."""
        seconds = price.seconds if price.after is None else price.seconds + price.after(pause, now - self._rested_at)
        return seconds if self._ratio is None else seconds * self._ratio(self.counts.steps, now, price.decode)

    def _drafted(self, plan: StepPlan) -> list[tuple[int, ...]]:
        """As many as are accepted, and the one behind them; rows are as long as they have got tokens."""
        vocab, found = self.info.vocab_size, list[tuple[int, ...]]()
        for work, row in zip(plan.sample_work, plan.sample_rows, strict=True):
            first, length = self._sequences[row], self._lengths[row]
            drafts = -(-plan.drafts[work] // self._drafting.tree) if plan.drafts else 0
            if drafts and plan.drafts[work] == plan.counts[work]:  # it begins with a guess
                if not self._runs.goes_on(row, drafts, right=self._is_right(row, length - 1)):
                    found.append(())
                    continue
                drafts -= 1
            right = next((at for at in range(drafts) if not self._is_right(row, length + at, at)), drafts)
            self._runs.verified(row, whole=right == drafts)
            found.append(tuple((first + (length + at) * _POSITION) % vocab for at in range(right + 1)))
            self._lengths[row] = length + right + 1
        return found

    def _is_right(self, row: int, place: int, at: int = 0) -> bool:
        return _share(self._sequences[row] + place * _POSITION) < chance(self._drafting.acceptance, at)

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
        found.frombytes(
            ((request_id * _SEQUENCE + positions * _POSITION) % self.info.vocab_size).astype(np.int32).tobytes()
        )
        return found

    def drafts(self, ticket: Ticket) -> Sequence[Sequence[int]]:
        return ()

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        raise AssertionError("a simulated request follows no grammar")

    def collect(self, ticket: Ticket) -> StepResult:
        assert ticket is self._in_flight[0], "tickets are collected in order"
        ticket = self._in_flight.popleft()
        self._runs.collected += 1
        self._clock.sleep_until(ticket.ready_at)
        self.collected_at = self._clock.now()
        self._host_free = self.collected_at + ticket.host_behind
        self._clock.sleep_until(self._host_free)
        return ticket.result

    def recover(self) -> None:
        raise AssertionError("a simulated step does not fail")

    def prepare(self) -> bool:
        return False

    def control(self, order: Control) -> None:
        assert isinstance(order, ExportBlocks), (
            "a simulated device holds no adapters; blocks are handed over in no time"
        )

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        return []

    def close(self) -> None:
        self._sequences.clear()
