"""Why a request is where it is: its state, its place in the queue, what those who wait are short of, and how many steps
that may last.

What lives here: pure functions over the scheduler's state, called when asked, and seconds from their counts.
What may not: changing anything, words, pricing steps (observe/metrics.py).

Who starts with the next step, and what the first that does not is short of, the planner itself says
(``StepPlanner.find_start``), of a step that is not computed. So the answer is the reason and not a guess.

How long answers will be is not known, so when a request starts is predicted by two bounds: the earliest, when only what
must be computed is, at the pace of quick steps; and the latest, when those before it use up all the tokens they may
have, at that of slow ones. Either is None where nothing is known.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from headrace.observe.metrics import StepRecord
from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies import DynamicPolicy
from headrace.scheduler.roster import Sequence
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.step_planner import Wait, rows_wanted

_NO_WAITS: Mapping[int, Wait] = MappingProxyType({})
LOOKED_UP = 64  # of those that wait: how much of their prompts is cached; of the others one token is counted


@dataclass(frozen=True, slots=True)
class RequestState:
    """``position`` counts from 1, None while running; ``later_first`` of those before it came later (priority, or
    preempted ones).

    ``wait``: of the first that does not start with the next step. ``tokens_ahead`` are computed before its own first
    token, if the cache saves none; ``tokens_before`` of others at least before it starts. ``steps_at_least``,
    ``steps_at_most``: results to come until there is room for it, besides steps that its prompts ahead fill; at most:
    if all before it use up their max_tokens; None where not even that tells. ``drafts``: why tokens of it are verified
    several at a time, or not; empty where this engine drafts nothing. ``num_computed``, ``num_cached``: of the prompt.
    ``budget``: tokens of a step; ``share`` of them are prompts' at least. ``timed``: steps are bounded in time.
    """

    request_id: int
    running: bool
    position: int | None
    num_waiting: int
    later_first: int
    num_prompt: int
    num_computed: int
    num_cached: int
    num_outputs: tuple[int, ...]
    num_preemptions: int
    wait: Wait | None
    tokens_ahead: int
    tokens_before: int
    steps_at_least: int
    steps_at_most: int | None
    budget: int
    share: int
    timed: bool = False
    steps_in_flight: int = 0
    drafts: str = ""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What is known of one that waits from those before it; as in RequestState. ``place`` counts from 0."""

    place: int
    later_first: int
    bounds: tuple[int, int, int, int | None]  # tokens ahead and before, steps at least and at most


class RequestsSnapshot:
    """All requests at one moment. ``arriving``: those that the scheduler hears of with its next step, or once what
    they wait for has come (``waits``, by request)."""

    def __init__(
        self, scheduler: Scheduler, arriving: Seq[Request] = (), waits: Mapping[int, Wait] = _NO_WAITS
    ) -> None:
        scheduler.settle()
        self._scheduler, self._roster, self._limits = scheduler, scheduler.roster, scheduler.limits
        coming = [scheduler.expected(each, number) for number, each in enumerate(arriving) if scheduler.takes(each)]
        self._queue = scheduler.roster.waiting.in_order(coming)
        self._waits = waits
        self._arriving = {each.request_id: each for each in coming}
        self._starting, self._wait = _next_step(scheduler, self._queue)
        self._ahead: dict[int, _Ahead] | None = None  # by request, once one that waits is asked about

    def explain(self, request_id: int) -> RequestState | None:
        """None for a request that is not here."""
        arriving = self._arriving.get(request_id)
        siblings = self._roster.requests.get(request_id, []) if arriving is None else [arriving]
        if not siblings:
            return None
        if any(each.status is SequenceStatus.RUNNING for each in siblings):
            first = siblings[0]
            computed = min(first.num_computed_tokens, first.num_prompt_tokens)
            return self._state(siblings, None, 0, computed, None, (first.num_prompt_tokens - computed, 0, 0, 0))
        if self._ahead is None:
            self._ahead = _look_ahead(self._scheduler, self._queue, self._starting)
        ahead, outside = self._ahead[request_id], self._waits.get(request_id)
        wait = outside or (Wait("next_step") if ahead.place < self._starting else self._wait)
        bounds = ahead.bounds if outside is None else (ahead.bounds[0], 0, 0, None)  # no step brings it
        return self._state(siblings, ahead.place + 1, ahead.later_first, 0, wait, bounds)

    def _state(
        self,
        siblings: list[Sequence],
        position: int | None,
        later: int,
        computed: int,
        wait: Wait | None,
        bounds: tuple[int, int, int, int | None],
    ) -> RequestState:
        first, budget = siblings[0], self._limits.max_num_batched_tokens
        share = budget - min(self._limits.max_num_seqs, len(self._roster.running) + (position or 0))
        outputs = tuple(each.num_output_tokens for each in siblings)
        if first.request_id in self._arriving:
            outputs = (0,) * first.request.params.n
        return RequestState(
            first.request_id, position is None, position, len(self._queue), later,
            first.num_prompt_tokens, computed, first.num_cached_tokens, outputs, sum(each.num_preemptions for each in siblings),
            wait, *bounds, budget, share, self._limits.max_step_seconds is not None, len(self._scheduler.in_flight),
            _drafts(self._scheduler, first),
        )  # fmt: skip


def _drafts(scheduler: Scheduler, sequence: Sequence) -> str:
    if scheduler.speculation is None:
        return ""
    if not sequence.drafts:
        return "none: the request asks for none"
    length = scheduler.speculation.length(len(scheduler.roster.running))
    if not length:
        return "none: at this load they cost more than they bring, or how steps go without is being timed"
    said, runs = f"{length} tokens a step", scheduler.speculation.runs
    if runs is None or not all(runs.speeds):
        return said
    begun = "others follow" if runs.on else "none follow"
    return f"{said}; {begun} while they are verified: {runs.speeds[0]:.4g} tokens/s if so, {runs.speeds[1]:.4g} if not"


def _next_step(scheduler: Scheduler, queue: Seq[Sequence]) -> tuple[int, Wait]:
    """How many start with it, and what the first that does not is short of."""
    planner, roster = scheduler.planner, scheduler.roster
    if not planner.batch_is_open and (roster.running or scheduler.in_flight):
        return 0, Wait("batch", 0, len(roster.running))
    plan, before = planner.plan_running(), planner.no_claims()
    for count, sequence in enumerate(queue):
        found = planner.find_start(sequence, plan, before)
        if isinstance(found, Wait):
            return count, found
        headroom = len(roster.running) + before.running
        taken = planner.blocks_to_take(sequence, found, headroom, before)
        plan.add_work(sequence, found.num_tokens, planner.chunk(sequence, found.num_tokens, plan))
        before.blocks = [each + more for each, more in zip(before.blocks, taken, strict=True)]
        if before.adapters is not None:
            before.adapters.take(sequence.request.adapter)
        before.rows, before.running = before.rows + rows_wanted(sequence), before.running + 1
    return len(queue), Wait("next_step")


# --- how long it may last


def _look_ahead(scheduler: Scheduler, queue: Seq[Sequence], starting: int) -> dict[int, _Ahead]:
    """By request, of all that wait."""
    roster, found = scheduler.roster, dict[int, _Ahead]()
    fixed = not isinstance(scheduler.policy, DynamicPolicy)  # else those before it now may not be before it then
    rows, blocks, distinct = _Rows(scheduler), _Blocks(scheduler), _Distinct()
    tokens = _tokens_of(roster.running)
    before = sum(
        distinct.add(each.token_ids, each.num_computed_tokens)
        for each in roster.running
        if each.num_computed_tokens < len(each.token_ids)
    )
    arrivals: list[float] = []
    for place, own in enumerate(queue):
        tokens += _tokens_of([own])
        at_least, at_most = rows.take(own)
        at_most = blocks.at_most(own, at_most)
        pushes = bool(roster.running) and scheduler.policy.preempts(own, roster.running[-1])
        least = max(0, at_least - len(scheduler.in_flight)) if fixed and not pushes else 0
        later = len(arrivals) - bisect_right(arrivals, own.request.arrival_time)
        most = 0 if place < starting else at_most if scheduler.by_arrival else None  # else others may come before it
        bounds = tokens, before if fixed and not pushes else 0, least, most
        found.setdefault(own.request_id, _Ahead(place, later, bounds))
        insort(arrivals, own.request.arrival_time)
        before += distinct.add(own.token_ids, scheduler.planner.lookup(own).num_tokens) if place < LOOKED_UP else 1
    return found


class _Rows:
    """When rows are free, in results to come: at the earliest, and if all use up their max_tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        roster, limits, drafts = scheduler.roster, scheduler.limits, scheduler.speculation
        self._drafts = drafts.most if drafts is not None else 0
        lefts = [_left(each, self._drafts) for each in roster.running for _ in range(rows_wanted(each))]
        leaving = limits.max_num_seqs - len(roster.free_rows) - len(lefts)
        free = [(0, 0)] * len(roster.free_rows) + [(0, len(scheduler.in_flight) + 1)] * max(0, leaving)
        self._batch = scheduler.planner.batch_size
        # how many the current batch still takes
        self._open = scheduler.planner.batch_quota if lefts else limits.max_num_seqs
        self._least, self._most = (sorted(each[which] for each in [*free, *lefts]) for which in (0, 1))

    def take(self, sequence: Sequence) -> tuple[int, int]:
        """When there are enough for it, which are then its own as long as it runs."""
        least, most = _left(sequence, self._drafts)
        if self._batch is not None:
            self._next_batch(self._batch)
        return _take(self._least, rows_wanted(sequence), least), _take(self._most, rows_wanted(sequence), most)

    def _next_batch(self, size: int) -> None:
        """Where the last one is complete: it begins when that has ended."""
        if self._open <= 0:
            self._least, self._most = ([max(rows)] * len(rows) for rows in (self._least, self._most))
            self._open = size
        self._open -= 1


def _take(rows: list[int], wanted: int, lasts: int) -> int:
    start = max(heapq.heappop(rows) for _ in range(min(wanted, len(rows))))
    for _ in range(wanted):
        heapq.heappush(rows, start + lasts)
    return start


class _Blocks:
    """Where blocks may be short, those who wait go one after another in the worst case."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._cache, self._rows, running = scheduler.cache, scheduler.limits.max_num_seqs, scheduler.roster.running
        self._largest, self._all = 0, 0
        self._serial = max((_left(each)[1] for each in running), default=0)
        for each in running:
            self._add(each)

    def _add(self, sequence: Sequence) -> None:
        tokens = sequence.max_num_tokens * rows_wanted(sequence)
        self._largest, self._all = max(self._largest, tokens), self._all + tokens

    def at_most(self, own: Sequence, by_rows: int) -> int:
        self._add(own)
        serial, most = self._serial, min(self._all, self._largest * self._rows)
        self._serial += _left(own)[1]
        scarce = any(
            most > (pool.num_blocks - self._rows) * spec.block_size
            for spec, pool in zip(self._cache.specs, self._cache.pools, strict=True)
        )
        return max(serial, by_rows) if scarce else by_rows


class _Distinct:
    """Prompts that begin alike are computed once."""

    def __init__(self) -> None:
        self._seen: list[array[int]] = []  # sorted, so that whoever begins most alike is a neighbour

    def add(self, ids: array[int], cached: int) -> int:
        """Tokens to compute that those before did not bring."""
        place = bisect_left(self._seen, ids)
        common = max((_alike(ids, each) for each in self._seen[max(0, place - 1) : place + 1]), default=0)
        self._seen.insert(place, ids)
        return max(1, len(ids) - max(common, cached))


def _alike(one: array[int], other: array[int]) -> int:
    """How many they begin with alike, by halves."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda count: one[: count + 1] != other[: count + 1])


def _left(sequence: Sequence, drafts: int = 0) -> tuple[int, int]:
    """Results until it has ended: at least, where all of so many drafts a step are right, and at most."""
    params, most = sequence.request.params, max(1, sequence.max_num_tokens - len(sequence.token_ids))
    ends_early = bool(sequence.stop_ids or params.stop) or sequence.structured or sequence.repetition is not None
    least = max(1, min(most, params.min_tokens - sequence.num_output_tokens)) if ends_early else most
    return -(-least // (1 + drafts * sequence.drafts)), most


def _tokens_of(sequences: Seq[Sequence]) -> int:
    """Known tokens that are still to be computed; what the cache may save is not counted."""
    return sum(max(0, len(sequence.token_ids) - sequence.num_computed_tokens) for sequence in sequences)


# --- in seconds

RECENT = 256  # steps that the pace is taken from
QUICK, SLOW = 0.02, 0.9  # of the steps are quicker than quick ones, and than slow ones
SHRINKING = 0.5  # of a quick step: a static batch gets quicker as it shrinks
MARGIN = 1.5  # times what recent steps took for a prompt's token, where steps are bounded in time


@dataclass(frozen=True, slots=True)
class Pace:
    """Of recent steps, in seconds. ``quick``, ``slow``: so many of them are below. ``full``: slow ones that computed
    prompts, had they been full. ``full_quick``: quick ones of those that were at least half full. ``token``: of a
    prompt."""

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


def predicted_start(state: RequestState, pace: Pace | None) -> dict[str, Any]:
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
