"""Why a request is where it is: its state, its place in the queue, what those who wait are short of, and how many steps that may last.

What lives here: pure functions over the scheduler's state, called when somebody asks. What may not: changing anything, words, seconds.

The next step is planned in numbers alone, by the planner's own order of questions (planner.py, ``_plan_waiting``): who starts with it, and what
the first that does not is short of. So the answer is the reason and not a guess.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from headrace.cache.manager import PrefixMatch
from headrace.request import Request, SequenceStatus
from headrace.scheduler.planner import rows_wanted
from headrace.scheduler.policies import DynamicPolicy
from headrace.scheduler.policies.fcfs import FirstComeFirstServed
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.step_budget import StepMeter
from headrace.sequence import Sequence

WaitKind = Literal["next_step", "batch", "result", "rows", "token_budget", "time", "blocks"]
LOOKED_UP = 64  # of those that wait: how much of their prompts is cached; of the others one token is counted


@dataclass(frozen=True, slots=True)
class Wait:
    """What the first that does not start with the next step needs and how much of it there is: sequence rows, tokens of a step, KV blocks, or
    milliseconds of a step.

    "next_step": nothing is missing. "batch": static batching, the batch before must end. "result": its last tokens are still computed.
    """

    kind: WaitKind
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class RequestState:
    """``position`` counts from 1, None while running; ``later_first`` of those before it came later (priority, or preempted ones).

    ``tokens_ahead`` are computed before its own first token, if the cache saves none; ``tokens_before`` of others at least before it starts.
    ``steps_at_least``, ``steps_at_most``: results to come until there is room for it, besides steps that its prompts ahead fill; at most: if all
    before it use up their max_tokens; None where not even that tells. ``num_computed``, ``num_cached``: of the prompt. ``budget``: tokens of a
    step; ``share`` of them are prompts' at least. ``timed``: steps are bounded in time.
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


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What is known of one that waits from those before it; as in RequestState."""

    place: int
    later_first: int
    tokens_ahead: int
    tokens_before: int
    steps_at_least: int
    steps_at_most: int | None


class Standing:
    """All requests at one moment. ``arriving``: those that the scheduler hears of with its next step."""

    def __init__(self, scheduler: Scheduler, arriving: Seq[Request] = ()) -> None:
        self._scheduler, self._roster, self._limits = scheduler, scheduler.roster, scheduler.limits
        self._queue = scheduler.roster.waiting.in_order(
            [scheduler.expected(each, number) for number, each in enumerate(arriving)]
        )
        self._starting, self._wait = _next_step(scheduler, self._queue)
        self._ahead: dict[int, _Ahead] | None = None  # by request, once one that waits is asked about
        self._arriving = {each.request_id for each in arriving}

    def explain(self, request_id: int) -> RequestState | None:
        """None for a request that is not here."""
        siblings = self._roster.requests.get(request_id, [])
        waiting = [each for each in siblings if each.status is SequenceStatus.WAITING]
        if request_id in self._arriving:
            waiting = siblings = [each for each in self._queue if each.request_id == request_id][:1]
        if not siblings:
            return None
        return self._running(siblings) if len(waiting) < len(siblings) else self._waiting(siblings, waiting[0])

    def _running(self, siblings: list[Sequence]) -> RequestState:
        first = siblings[0]
        left = max(0, first.num_prompt_tokens - first.num_computed_tokens)
        computed = min(first.num_computed_tokens, first.num_prompt_tokens)
        return self._state(siblings, None, 0, computed, None, (left, 0, 0, 0))

    def _waiting(self, siblings: list[Sequence], own: Sequence) -> RequestState:
        if self._ahead is None:
            self._ahead = _look_ahead(self._scheduler, self._queue, self._starting)
        ahead = self._ahead[own.request_id]
        starts = ahead.place < self._starting
        bounds = (ahead.tokens_ahead, ahead.tokens_before, ahead.steps_at_least, ahead.steps_at_most)
        return self._state(
            siblings, ahead.place + 1, ahead.later_first, 0, Wait("next_step") if starts else self._wait, bounds
        )

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
        )  # fmt: skip


def explain(scheduler: Scheduler, request_id: int) -> RequestState | None:
    """Of one request; several are asked about at one Standing."""
    return Standing(scheduler).explain(request_id)


# --- the next step


def _next_step(scheduler: Scheduler, queue: Seq[Sequence]) -> tuple[int, Wait]:
    """How many start with it, and what the first that does not is short of."""
    step, wait = _Step(scheduler), Wait("next_step")
    for count, sequence in enumerate(queue):
        wait = step.wait_of(sequence)
        if wait.kind != "next_step":
            return count, wait
    return len(queue), wait


class _Step:
    """What the next step leaves to those who wait."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._cache, self._limits = scheduler, scheduler.cache, scheduler.limits
        self._roster = roster = scheduler.roster
        self._rows = len(roster.free_rows)
        self._blocks = [pool.num_available for pool in scheduler.cache.pools]
        running = roster.running if scheduler.chunked_prefill else []  # whole prompts go before those who run
        single = [each for each in running if each.num_tokens - each.num_computed_tokens <= 1]
        self._others, self._room = len(roster.running), self._limits.max_num_batched_tokens - len(single)
        self._meter = self._meter_of(single)
        for each in running:
            if each.num_tokens - each.num_computed_tokens > 1:
                self._take(each.num_computed_tokens, each.num_tokens)

    def _meter_of(self, single: list[Sequence]) -> StepMeter | None:
        seconds = self._scheduler.max_step_seconds
        return (
            None if seconds is None else self._scheduler.meter(seconds, [each.num_computed_tokens for each in single])
        )

    def _take(self, start: int, end: int) -> int:
        """As many tokens as there is room and time for."""
        count = min(end - start, self._room)
        if self._meter is not None and count > 0:
            count = self._meter.fits(start, count)
            if count:
                self._meter.add(start, count)
        self._room -= max(0, count)
        return count

    def wait_of(self, sequence: Sequence) -> Wait:
        """In the planner's order. Where it starts, what it takes is gone for those behind it."""
        forming = self._scheduler.continuous or self._scheduler.batch_quota > 0
        if not forming and (self._roster.running or self._scheduler.in_flight):
            return Wait("batch", 0, len(self._roster.running))
        if self._room <= 0:
            return Wait("token_budget", 1, 0)
        if sequence.last_step > self._roster.retired:
            return Wait("result")
        rows = rows_wanted(sequence)
        if self._rows < rows:
            return Wait("rows", rows, self._rows)
        match = self._scheduler.lookup(sequence)
        short = self._blocks_short(sequence, match)
        if short is not None:
            return short
        if not self._scheduler.chunked_prefill and self._room < min(
            sequence.num_tokens - match.num_tokens, self._limits.max_num_batched_tokens
        ):
            return Wait("token_budget", sequence.num_tokens - match.num_tokens, self._room)
        if self._take(match.num_tokens, sequence.num_tokens) <= 0:
            assert self._scheduler.max_step_seconds is not None, "there was room, so it is time that is short"
            return Wait("time", int(self._scheduler.max_step_seconds * 1e3))
        self._rows -= rows
        self._others += self._limits.paged_allocation
        return Wait("next_step")

    def _blocks_short(self, sequence: Sequence, match: PrefixMatch) -> Wait | None:
        """The pool with the least room to spare, if it does not fit; else its blocks are taken."""
        cache = self._cache
        tokens, headroom, whole = self._scheduler.claim_of(sequence)
        headroom = max(headroom, self._others if self._limits.paged_allocation else 0)
        wanted = [
            new + old
            for new, old in zip(cache.blocks_wanted(match, tokens, whole=whole), cache.idle_blocks(match), strict=True)
        ]
        spare, needed, have = min(
            (have - want - headroom, want + headroom, have) for have, want in zip(self._blocks, wanted, strict=True)
        )
        if spare < 0:
            return Wait("blocks", needed, have)
        self._blocks = [have - want for have, want in zip(self._blocks, wanted, strict=True)]
        return None


# --- how long it may last


def _look_ahead(scheduler: Scheduler, queue: Seq[Sequence], starting: int) -> dict[int, _Ahead]:
    """By request, of all that wait."""
    roster, found = scheduler.roster, dict[int, _Ahead]()
    fixed = not isinstance(scheduler.policy, DynamicPolicy)  # else those before it now may not be before it then
    known = isinstance(scheduler.policy, FirstComeFirstServed)  # else others may come before it
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
        most = 0 if place < starting else at_most if known else None
        found.setdefault(
            own.request_id, _Ahead(place, later, tokens, before if fixed and not pushes else 0, least, most)
        )
        insort(arrivals, own.request.arrival_time)
        before += distinct.add(own.token_ids, scheduler.lookup(own).num_tokens) if place < LOOKED_UP else 1
    return found


class _Rows:
    """When rows are free, in results to come: at the earliest, and if all use up their max_tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        roster, limits = scheduler.roster, scheduler.limits
        lefts = [_left(each) for each in roster.running for _ in range(rows_wanted(each))]
        leaving = limits.max_num_seqs - len(roster.free_rows) - len(lefts)
        free = [(0, 0)] * len(roster.free_rows) + [(0, len(scheduler.in_flight) + 1)] * max(0, leaving)
        self._batch = None if scheduler.continuous else limits.max_num_seqs
        self._open = scheduler.batch_quota if lefts else limits.max_num_seqs  # how many the current batch still takes
        self._least, self._most = (sorted(each[which] for each in [*free, *lefts]) for which in (0, 1))

    def take(self, sequence: Sequence) -> tuple[int, int]:
        """When there are enough for it, which are then its own as long as it runs."""
        least, most = _left(sequence)
        if self._batch is not None:
            self._next_batch(self._batch)
        return _take(self._least, rows_wanted(sequence), least), _take(self._most, rows_wanted(sequence), most)

    def _next_batch(self, size: int) -> None:
        """Where the last one is complete: it begins when that has ended."""
        if self._open <= 0:
            self._least, self._most, self._open = (
                [max(self._least)] * len(self._least),
                [max(self._most)] * len(self._most),
                size,
            )
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


def _left(sequence: Sequence) -> tuple[int, int]:
    """Results until it has ended: at least, and at most."""
    params, most = sequence.request.params, max(1, sequence.max_num_tokens - len(sequence.token_ids))
    ends_early = bool(sequence.stop_ids or params.stop) or sequence.structured or sequence.repetition is not None
    return (max(1, min(most, params.min_tokens - sequence.num_output_tokens)) if ends_early else most), most


def _tokens_of(sequences: Seq[Sequence]) -> int:
    """Known tokens that are still to be computed; what the cache may save is not counted."""
    return sum(max(0, len(sequence.token_ids) - sequence.num_computed_tokens) for sequence in sequences)
