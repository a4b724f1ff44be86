"""What a request is told of itself: when it will start, while it waits; and which steps computed it, for those that asked (``explain``).

Nobody knows how long answers will be, so the prediction is two bounds: the earliest, when only what must be computed is, at the pace of quick
steps; and the latest, when those before it use up all the tokens they may have, at that of slow ones. Either is None where nothing is known.

What lives here: seconds from counts, counting steps and how near the physical limit they were. What may not: the scheduler's state
(scheduler/explain.py reads it), pricing steps (observe/metrics.py), words (the server's). Nothing is counted while nobody has asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headrace.observe.metrics import StepRecord
from headrace.request import Request, SequenceOutput, StepAccount
from headrace.scheduler.explain import RequestState
from headrace.sequence import Sequence

RECENT = 256  # steps that the pace is taken from
QUICK, SLOW = 0.02, 0.9  # of the steps are quicker than quick ones, and than slow ones
SHRINKING = 0.5  # of a quick step: a static batch gets quicker as it shrinks
MARGIN = 1.5  # times what recent steps took for a prompt's token, where steps are bounded in time
MAX_KEPT = 256  # accounts of requests that have ended


@dataclass(frozen=True, slots=True)
class Pace:
    """Of recent steps, in seconds. ``quick``, ``slow``: so many of them are below. ``full``: slow ones that computed prompts, had they
    been full. ``full_quick``: quick ones of those that were at least half full. ``token``: of a prompt."""

    quick: float
    slow: float
    full_quick: float
    full: float
    token: float
    steps: int


def pace_of(records: Seq[StepRecord], budget: int) -> Pace | None:
    """None before the first step."""
    if not records:
        return None
    every = [_seconds(each) for each in records]
    prompts = [each for each in records if each.tokens > each.decodes]
    filled = [_seconds(each) for each in prompts if 2 * each.tokens >= budget]
    largest = max((each.tokens for each in prompts), default=budget)
    full = _quantile([_seconds(each) for each in prompts if 2 * each.tokens >= largest] or every, SLOW) * max(
        1.0, budget / largest
    )
    tokens = sum(each.tokens - each.decodes for each in prompts)
    token = sum(map(_seconds, prompts)) / tokens if tokens else full / budget
    quick, slow = _quantile(every, QUICK), _quantile(every, SLOW)
    return Pace(quick, slow, _quantile(filled or every, QUICK), max(full, slow), token, len(records))


def _seconds(record: StepRecord) -> float:
    return record.measured_seconds + record.idle_seconds


def _quantile(values: Seq[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def outlook(state: RequestState, pace: Pace | None) -> dict[str, Any]:
    """The state as plain data, with the bounds of its start in seconds from now."""
    earliest = latest = None
    if pace is not None and not state.running:
        earliest, latest = _earliest(state, pace), _latest(state, pace)
    return {
        **asdict(state),
        "earliest": earliest,
        "latest": latest,
        "steps_measured": 0 if pace is None else pace.steps,
    }


def _earliest(state: RequestState, pace: Pace) -> float:
    quick = pace.quick * (SHRINKING if state.wait is not None and state.wait.kind == "batch" else 1.0)
    filled = max(0, state.tokens_before // state.budget - state.steps_in_flight)
    return max(filled * pace.full_quick, state.steps_at_least * quick)


def _latest(state: RequestState, pace: Pace) -> float | None:
    """Steps that prompts fill, and those of answers only; one more, for it may just have missed one."""
    if state.steps_at_most is None or state.share <= 0:
        return None
    filled = -(-state.tokens_ahead // state.share) * pace.full
    if state.timed:
        filled = max(filled, MARGIN * state.tokens_ahead * pace.token)
    return filled + (state.steps_at_most + 1) * pace.slow


# --- which steps computed it



@dataclass(slots=True)
class _Account:
    open_answers: set[int]
    steps: int = 0
    shares: int = 0  # steps whose share of the limit is known
    total_share: float = 0.0
    preemptions: dict[int, int] = field(default_factory=dict)  # by answer

    def add_step(self, share: float | None) -> None:
        self.steps += 1
        if share is not None:
            self.shares += 1
            self.total_share += share

    def read(self) -> StepAccount:
        return StepAccount(self.steps, self.total_share / self.shares if self.shares else None, sum(self.preemptions.values()))


class StepAccounts:
    """True while there are requests to count for."""

    def __init__(self) -> None:
        self._open: dict[int, _Account] = {}
        self._ended: dict[int, StepAccount] = {}  # oldest first

    def __bool__(self) -> bool:
        return bool(self._open)

    def open(self, request: Request) -> None:
        self._open[request.request_id] = _Account(set(range(request.params.n)))

    def end(self, request_id: int, index: int) -> None:
        """One answer of a request has ended."""
        account = self._open.get(request_id)
        if account is not None:
            account.open_answers.discard(index)
            if not account.open_answers:
                self.close(request_id)

    def close(self, request_id: int) -> None:
        account = self._open.pop(request_id, None)
        if account is not None:
            self._ended[request_id] = account.read()
            while len(self._ended) > MAX_KEPT:
                del self._ended[next(iter(self._ended))]

    def count(self, work: Iterable[Sequence], share: float | None) -> None:
        """One step computed tokens of these sequences, at this fraction of the limit."""
        counted = set()
        for sequence in work:
            account = self._open.get(sequence.request_id) if sequence.request.explain else None
            if account is None:
                continue
            account.preemptions[sequence.index] = sequence.num_preemptions
            if sequence.request_id not in counted:
                counted.add(sequence.request_id)
                account.add_step(share)

    def settle(self, outputs: Seq[SequenceOutput]) -> Seq[SequenceOutput]:
        """The same outputs; ends carry what was counted."""
        if not self._open:
            return outputs
        return [out if out.finished is None else self._settled(out) for out in outputs]

    def _settled(self, out: SequenceOutput) -> SequenceOutput:
        account, finished = self._open.get(out.request_id), out.finished
        if account is None or finished is None:
            return out
        settled = out._replace(finished=replace(finished, account=account.read()))
        self.end(out.request_id, out.index)
        return settled

    def find(self, request_id: int) -> StepAccount | None:
        account = self._open.get(request_id)
        return account.read() if account is not None else self._ended.get(request_id)
