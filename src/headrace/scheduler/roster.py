"""The roster: every live sequence, where it stands, and the row it sits in; its record (one answer in the making), and the
queue it waits in: a heap a lane (a tenant …) in the policy's order, and one of lanes; what left it meanwhile (aborts)
is skipped, not searched for.

    waiting --admit--> running --(fully planned)--> in flight only --> finished
       ^------preempt-----'                                              ^
       '-------------------------- abort, refusal -----------------------'

Rows and blocks that a step in flight still names come back when that step is retired.

Longest answers first: the order of requests that are all there at once and that are not streamed, where all lengths
are known.

A batch ends with its last answer. One that is long and begins late keeps a device waiting that computes nothing else;
so those that take longest begin first, and the short ones fill what is left (list scheduling by longest processing
time: Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969).

Known means that nothing but ``max_tokens`` ends an answer. Where answers end by themselves, that says too little of
their lengths: in simulations of answers that end anywhere before it, this order took 2 to 4 % longer than the given
one, for it brings prompts one by one into many steps.

Where not everything fits into the cache, requests that begin alike stay together: a prefix whose blocks have gone is
computed again.

What lives here: the record, the states and the passages between them, the heaps, that order, and a bounded log of the
last passages for people (who was admitted, who was pushed out, what the head of the queue waits for), in numbers. What
may not: whose turn it is (step_planner.py), what an order means (policies/), what results mean (scheduler.py), words
(the dashboard's), torch.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from headrace.cache.manager import CacheManager, SequenceKV
from headrace.cost.cost_model import StepSpeed
from headrace.request import NO_SLOT, Finished, FinishReason, Request, RequestTimes, SamplingParams, SequenceStatus
from headrace.scheduler.limits import SchedulerLimits
from headrace.scheduler.repetition import RepetitionDetector

if TYPE_CHECKING:
    from headrace.scheduler.policies.protocol import DynamicPolicy
    from headrace.scheduler.repetition import RepetitionDetector

NEVER = -1
ALWAYS = 2**62


@dataclass(slots=True, eq=False)
class Sequence:
    """``num_tokens`` counts known ids and the placeholders of steps in flight; ``num_computed_tokens`` advances when
    planned. ``forced_ids``: what the placeholders are bound to be, where that is known; of several, one is sampled and the
    others follow it.

        0 ........ num_prompt_tokens ........ len(token_ids) ........ num_tokens <= max_num_tokens
                                              | known         | placeholders: sampled, not collected yet
    """

    request: Request
    index: int
    stop_ids: frozenset[int]  # EOS (unless ignored) and the request's own
    max_num_tokens: int
    order: tuple[float, ...]  # the policy's: smaller goes first
    kv: SequenceKV
    token_ids: array[int]
    request_id: int = 0
    seed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    row: int | None = None
    structured: bool = False  # each of its tokens waits for a mask: planning them is never without thought
    adapter_slot: int = NO_SLOT  # while it runs
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    last_step: int = NEVER  # the last step that names it
    ignore_through: int = NEVER  # results of steps up to this one are dropped
    fast_until: int = 0  # while num_tokens is at most this, planning one more token needs no thought
    check_at: int = 0  # while fewer ids are known, a new one needs no thought
    forced_ids: tuple[int, ...] = ()
    drafts: bool = False  # several of its tokens may be verified in a step
    slack: int = 0  # drafts in flight: both counts above are upper bounds, and too high by this at most
    row_lags: bool = False  # its row lacks ids that no step has sampled
    extra_outputs: bool = True  # its outputs carry more than tokens (first token, logprobs)
    num_cached_tokens: int = 0
    num_scored_tokens: int = 0  # prompt logprobs delivered
    num_preemptions: int = 0
    sibling_rows: list[int] = field(default_factory=list)  # reserved for n > 1 until the prompt is computed
    forked: bool = False
    first_scheduled: float | None = None
    first_token: float | None = None
    repetition: RepetitionDetector | None = None  # where the request wants loops to end

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.seed = (self.request.seed + self.index * 0x9E3779B97F4A7C15) & (2**64 - 1)
        self.structured = self.request.params.structured_outputs is not None
        self.drafts = self.request.params.speculative is not False
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_scores(self) -> bool:
        """Prompt logprobs were asked for and not all are told yet: the prompt's positions must be computed, not
        found."""
        asked = self.request.params.prompt_logprobs is not None and self.index == 0
        return asked and self.num_scored_tokens < self.num_prompt_tokens - 1

    def finish_record(
        self, reason: FinishReason, now: float, stop_reason: int | str | None = None, message: str | None = None
    ) -> Finished:
        times = RequestTimes(self.request.arrival_time, self.first_scheduled, self.first_token, now)
        return Finished(reason, stop_reason, message, self.num_preemptions, times)


_COMPACT_ABOVE = 64
_Heap = list[tuple[tuple[float, ...], int, Sequence]]
_Place = tuple[float, tuple[float, ...], int, str]  # rank, the head's order and number, lane


def _lane_of_all(sequence: Sequence) -> str:
    return ""


def _rank_of_all(lane: str) -> float:
    return 0.0


class WaitingQueue:
    """Sequences in ascending ``order``, lane by lane. ``len`` counts those still waiting.

    ``lane_of`` never changes for a sequence. ``rank`` of a lane may rise at any time, and the lane of the least rank
    goes first; so its place is looked up anew only when it comes up. By default there is one lane."""

    def __init__(
        self, lane_of: Callable[[Sequence], str] = _lane_of_all, rank: Callable[[str], float] = _rank_of_all
    ) -> None:
        self._lane_of, self._rank = lane_of, rank
        self._pushed = 0
        self._gone = 0
        self._lanes: dict[str, _Heap] = {}
        self._places: list[_Place] = []  # each lane's is here, perhaps beside ones that it has no more
        self._size = 0

    def __len__(self) -> int:
        return self._size - self._gone

    def __iter__(self) -> Iterator[Sequence]:
        return (
            entry[2] for heap in self._lanes.values() for entry in heap if entry[2].status is SequenceStatus.WAITING
        )

    def push(self, sequence: Sequence) -> None:
        self._pushed += 1  # breaks ties between equals, so that sequences are never compared
        self._size += 1
        lane = self._lane_of(sequence)
        heap = self._lanes.setdefault(lane, [])
        heapq.heappush(heap, (sequence.order, self._pushed, sequence))
        if heap[0][2] is sequence:
            heapq.heappush(self._places, self._place(lane))
            if len(self._places) > _COMPACT_ABOVE + 2 * len(self._lanes):
                self._places = sorted(map(self._place, self._lanes))

    def peek(self) -> Sequence | None:
        while self._places:
            lane = self._places[0][-1]
            self._drop_ended(lane)
            if lane in self._lanes and self._place(lane) == self._places[0]:
                return self._lanes[lane][0][2]
            heapq.heappop(self._places)
            if lane in self._lanes:
                heapq.heappush(self._places, self._place(lane))
        return None

    def _place(self, lane: str) -> _Place:
        return (self._rank(lane), *self._lanes[lane][0][:2], lane)

    def _drop_ended(self, lane: str) -> None:
        heap = self._lanes.get(lane, [])
        while heap and heap[0][2].status is not SequenceStatus.WAITING:
            heapq.heappop(heap)
            self._gone -= 1
            self._size -= 1
        if not heap:
            self._lanes.pop(lane, None)

    def pop(self) -> Sequence:
        """What ``peek`` has just shown."""
        lane = heapq.heappop(self._places)[-1]
        sequence = heapq.heappop(self._lanes[lane])[2]
        self._size -= 1
        self._drop_ended(lane)
        if lane in self._lanes:
            heapq.heappush(self._places, self._place(lane))
        return sequence

    def discard(self) -> None:
        """One waiting sequence has just been marked finished; its entry goes when it comes up, or when such are the
        majority."""
        self._gone += 1
        if self._gone > _COMPACT_ABOVE and self._gone * 2 > self._size:
            self.reorder()

    def reorder(self) -> None:
        """Their orders have changed. Equals stay in the order in which they came."""
        lanes = {
            lane: [(sequence.order, pushed, sequence) for _, pushed, sequence in _waiting(heap)]
            for lane, heap in self._lanes.items()
        }
        self._lanes = {lane: heap for lane, heap in lanes.items() if heap}
        for heap in self._lanes.values():
            heapq.heapify(heap)
        self._places = sorted(map(self._place, self._lanes))
        self._size, self._gone = sum(map(len, self._lanes.values())), 0

    def in_order(self, coming: Iterable[Sequence] = ()) -> list[Sequence]:
        """As they would be admitted as things stand, if these came, too."""
        return sorted([*self._sorted(), *coming], key=self._place_of)

    def _sorted(self) -> list[Sequence]:
        return [entry[2] for heap in self._lanes.values() for entry in sorted(_waiting(heap))]

    def _place_of(self, sequence: Sequence) -> tuple[float, ...]:
        return (self._rank(self._lane_of(sequence)), *sequence.order)

    def ahead_of(self, sequence: Sequence) -> list[Sequence]:
        """Those who would be admitted before this one as things stand, in no order: whole lanes that go first, and
        those before it in its own."""
        own = self._lane_of(sequence)
        first = {lane for lane in self._lanes if lane != own and self._rank(lane) < self._rank(own)}
        return [
            each
            for each in self
            if (each.order < sequence.order if self._lane_of(each) == own else self._lane_of(each) in first)
        ]


def _waiting(heap: _Heap) -> _Heap:
    return [entry for entry in heap if entry[2].status is SequenceStatus.WAITING]


# --- all at once


def longest_first(requests: Seq[Request], *, block_tokens: int, capacity: float) -> Seq[Request]:
    """The same requests; those of equal length in the given order. ``capacity``: tokens that the cache holds;
    ``block_tokens``: of the shortest prefix that it finds."""
    if len({_length(each) for each in requests}) < 2 or not all(_is_known(each.params) for each in requests):
        return requests
    if sum(len(each.prompt_token_ids) + each.params.n * _length(each) for each in requests) <= capacity:
        return sorted(requests, key=_length, reverse=True)
    return _families_first(requests, block_tokens)


def _length(request: Request) -> int:
    return request.params.max_tokens or 0  # resolved: it is never None here


def _is_known(params: SamplingParams) -> bool:
    if params.structured_outputs is not None:
        return False  # a grammar's end is one before min_tokens, too
    ends_early = not params.ignore_eos or params.stop or params.stop_token_ids or params.repetition_detection
    return not ends_early or params.min_tokens == params.max_tokens


def _families_first(requests: Seq[Request], tokens: int) -> list[Request]:
    """Those that share their first ``tokens`` ids come one after another, and among them those that share twice as
    many, and so on. The family of the longest answer goes first."""
    families: dict[bytes, list[Request]] = {}
    for each in requests:
        families.setdefault(each.prompt_token_ids[:tokens].tobytes(), []).append(each)
    ordered = []
    for family in families.values():
        splits = len(family) > 1 and any(len(each.prompt_token_ids) > tokens for each in family)
        ordered.append(_families_first(family, 2 * tokens) if splits else sorted(family, key=_length, reverse=True))
    ordered.sort(key=lambda family: _length(family[0]), reverse=True)
    return [each for family in ordered for each in family]


# --- the log

CAPACITY = 256  # entries; older ones are forgotten

Kind = Literal[
    "admitted", "resumed", "preempted", "refused", "turned_away", "aborted", "failed", "overfull", "runs_begin", "runs_end",
    "waits_batch", "waits_rows", "waits_budget", "waits_blocks", "waits_time", "waits_adapter",
]  # fmt: skip


class Entry(NamedTuple):
    """``values`` by kind, in tokens unless said.

    admitted: prompt, cached, microseconds waited; resumed: to compute, cached; preempted: to compute again, used
    blocks, blocks; waits_rows: rows wanted, free; waits_budget: tokens a step; waits_blocks: tokens, used blocks,
    blocks; refused, turned_away: prompt; failed: sequences of the step; waits_time: microseconds a step may take;
    overfull: single tokens that alone take longer, and that; runs_begin, runs_end: microseconds a token with runs of
    drafts in flight over stages, and without. The request is -1 where it is about none. ``tenant``:
    whose request it is; "" where that is not known.
    """

    number: int
    time: float
    kind: Kind
    request_id: int
    values: tuple[int, ...]
    tenant: str = ""


class DecisionLog:
    """``now`` is set by whoever knows the time. A wait is told once, not at every step that it lasts.

    ``tenant_of``: whose a request is that waits or runs.
    """

    __slots__ = ("_entries", "_numbers", "_tenant_of", "_wait", "now")

    def __init__(self, tenant_of: Callable[[int], str] = lambda request_id: "") -> None:
        self.now = 0.0
        self._tenant_of = tenant_of
        self._entries: deque[Entry] = deque(maxlen=CAPACITY)
        self._numbers = count(1)
        self._wait: tuple[str, int] | None = None

    def add(self, kind: Kind, request_id: int, *values: int, tenant: str | None = None) -> None:
        """``tenant``: of a request that neither waits nor runs."""
        whose = self._tenant_of(request_id) if tenant is None else tenant
        self._entries.append(Entry(next(self._numbers), self.now, kind, request_id, values, whose))

    def add_wait(self, kind: Kind, request_id: int, *values: int) -> None:
        if self._wait != (kind, request_id):
            self._wait = (kind, request_id)
            self.add(kind, request_id, *values)

    def after(self, number: int) -> Iterable[Entry]:
        """Entries with higher numbers, oldest first."""
        return [entry for entry in self._entries if entry.number > number]


# --- the roster


def _order(sequence: Sequence) -> tuple[float, ...]:
    return (*sequence.order, sequence.index)


def _outlives_eos(params: SamplingParams) -> bool:
    """A grammar's end is an end also where EOS is ignored: nothing could follow."""
    return params.ignore_eos and params.structured_outputs is None


class Roster:
    """See the module. ``running`` is in ascending order: its last is the first to be preempted. ``policy``: who is
    told, if anybody."""

    def __init__(
        self,
        cache: CacheManager,
        limits: SchedulerLimits,
        eos_token_ids: frozenset[int],
        policy: DynamicPolicy | None = None,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.max_sequence_tokens = self.longest(None)
        self.requests: dict[int, list[Sequence]] = {}
        self.waiting = WaitingQueue() if policy is None else policy.create_queue()
        self.running: list[Sequence] = []
        self.free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.dropped_rows: list[int] = []  # to be told to the workers with the next plan
        self.retired = NEVER  # the last step collected
        self.some_ended = False  # ``running`` holds sequences that have ended or are fully planned
        self.num_preemptions = 0
        self.now = 0.0  # of the call that is under way
        self.speed = StepSpeed()  # likewise
        self.log = DecisionLog(self._tenant_of)
        self._policy = policy
        self.leaving_rows: list[tuple[int, int]] = []  # (last step that names it, row)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for siblings in self.requests.values() for sequence in siblings)

    def _tenant_of(self, request_id: int) -> str:
        siblings = self.requests.get(request_id)
        return siblings[0].request.tenant if siblings else ""

    # --- coming

    def longest(self, adapter: str | None) -> int:
        """The longest sequence that model and cache allow."""
        capacity = self.cache.capacity_tokens(self.limits.max_num_batched_tokens, adapter)
        return min(self.limits.max_model_len, capacity) + self.limits.pooling

    def create(self, request: Request, index: int, order: tuple[float, ...]) -> Sequence:
        """A waiting sequence, not yet entered."""
        params = request.params
        loops = params.repetition_detection
        longest = self.max_sequence_tokens if request.adapter is None else self.longest(request.adapter)
        asked = longest if params.max_tokens is None else len(request.prompt_token_ids) + params.max_tokens
        return Sequence(
            request=request,
            index=index,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if _outlives_eos(params) else self.eos_token_ids),
            max_num_tokens=min(asked, longest),
            order=order,
            kv=self.cache.create(request.cache_salt, request.adapter),
            token_ids=request.prompt_token_ids[:],
            repetition=RepetitionDetector(loops, len(request.prompt_token_ids)) if loops is not None else None,
        )

    def enter(self, sequence: Sequence) -> None:
        self.requests[sequence.request_id] = [sequence]
        self.waiting.push(sequence)

    def admit_head(self, num_rows: int) -> Sequence:
        """The head of the queue starts to run, with a row of its own and rows reserved for its siblings."""
        sequence = self.waiting.pop()
        sequence.status = SequenceStatus.RUNNING
        sequence.row = self.free_rows.pop()
        sequence.sibling_rows = [self.free_rows.pop() for _ in range(num_rows - 1)]
        insort(self.running, sequence, key=_order)
        return sequence

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """n > 1: the prompt is computed, each further answer becomes a running sequence in its reserved row."""
        siblings = []
        for index, row in enumerate(sequence.sibling_rows, start=1):
            twin = self.create(sequence.request, index, sequence.order)
            if self.limits.keeps_kv:  # else each recomputes everything into blocks of its own
                twin.kv = self.cache.fork(sequence.kv, sequence.num_computed_tokens)
            if self.cache.adapters is not None:
                twin.kv.resident = self.cache.adapters.join(sequence.kv.resident)
            twin.num_computed_tokens = sequence.num_computed_tokens
            twin.status, twin.row, twin.forked = SequenceStatus.RUNNING, row, True
            twin.adapter_slot = sequence.adapter_slot
            twin.first_scheduled, twin.num_cached_tokens = sequence.first_scheduled, sequence.num_cached_tokens
            self.requests[sequence.request_id].append(twin)
            insort(self.running, twin, key=_order)
            siblings.append(twin)
            self.tell_admitted(twin)
        sequence.sibling_rows = []
        sequence.forked = True
        return siblings

    def tell_admitted(self, sequence: Sequence) -> None:
        """What is computed of it stands in its record."""
        if self._policy is not None:
            self._policy.admitted(sequence, self.now)

    def sort(self) -> None:
        """Orders of those who run have changed."""
        self.running.sort(key=_order)

    def refresh(self, sequence: Sequence) -> None:
        """Recomputes how long planning and accepting this sequence's tokens need no thought."""
        plain = self.limits.keeps_kv and not (
            sequence.kv.tail_shared or sequence.sibling_rows or sequence.wants_scores or sequence.structured
        )
        sequence.fast_until = min(sequence.kv.capacity, sequence.max_num_tokens - 2) if plain else NEVER
        next_link = (
            (sequence.kv.num_linked_blocks + 1) * self.cache.block_tokens if self.cache.prefix_caching else ALWAYS
        )
        next_look = sequence.repetition.next_look if sequence.repetition is not None else ALWAYS
        sequence.check_at = min(sequence.max_num_tokens, next_link, next_look)

    def link(self, sequence: Sequence) -> None:
        """Lets others find the full blocks of its known tokens; what a step in flight is still writing is lost if that
        step fails."""
        written_by = sequence.last_step if sequence.last_step > self.retired else None
        self.cache.link(
            sequence.kv,
            sequence.token_ids,
            min(sequence.num_computed_tokens - sequence.slack, len(sequence.token_ids)),
            written_by,
        )

    def force_tokens(self, sequence: Sequence, run: Seq[int]) -> None:
        """Its sample in flight is bound to be the first token of ``run``, which the others follow. One that may end the
        answer is sampled."""
        end = next((at for at, token in enumerate(run) if token in sequence.stop_ids), len(run))
        run = run[: min(end, sequence.max_num_tokens - len(sequence.token_ids))]
        if len(run) > 1:
            sequence.forced_ids = tuple(run)
            sequence.num_tokens += len(run) - 1
            sequence.row_lags = sequence.extra_outputs = True
            self.some_ended = self.some_ended or sequence.num_tokens == sequence.max_num_tokens

    def take_back(self, sequence: Sequence, drafted: int, refuted: int) -> None:
        """A step has told how many tokens it sampled for a sequence: ``refuted`` fewer than it was planned for."""
        sequence.num_tokens -= refuted
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted
        sequence.num_computed_tokens -= refuted
        wanted = sequence.num_tokens + drafted + 1  # by the next step, if it drafts as many
        if sequence.kv.capacity >= wanted + self.cache.block_tokens and self.limits.grows:
            self.cache.give_back(sequence.kv, wanted, sequence.last_step)
            self.refresh(sequence)

    # --- going

    def preempt_last(self) -> Sequence:
        """Preemption by recompute: blocks and row go back, tokens stay, and the sequence waits again."""
        sequence = self.running.pop()
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self.log.add(
            "preempted", sequence.request_id, sequence.num_tokens, self.cache.num_used_blocks, self.cache.num_blocks
        )
        self.requeue(sequence)
        return sequence

    def requeue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self._give_back(sequence)
        sequence.num_computed_tokens = 0
        self.refresh(sequence)
        if self._policy is not None:
            self._policy.left(sequence, self.now)
        self.waiting.push(sequence)

    def end(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Nothing of it is planned or accepted any more. Untrusted: what it wrote is not to be reused."""
        if sequence.status is SequenceStatus.WAITING:
            # first: the queue may look through all it holds for those that still wait
            sequence.status = SequenceStatus.FINISHED
            self.waiting.discard()
        elif trusted:
            self.link(sequence)
        else:
            self.cache.forget_written_by(sequence.kv)
        sequence.status = SequenceStatus.FINISHED
        sequence.ignore_through = ALWAYS
        self.some_ended = True
        if self._policy is not None:
            self._policy.left(sequence, self.now)
        self._give_back(sequence)
        siblings = self.requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request_id]

    def drop_ended(self) -> None:
        if self.some_ended:
            self.running = [
                s for s in self.running if s.status is SequenceStatus.RUNNING and s.num_tokens < s.max_num_tokens
            ]
            self.some_ended = False

    def roll_back_all(self, through: int) -> None:
        """Forgets what steps up to ``through`` would have told; whoever was running is computed anew."""
        for sequence in list(self):
            sequence.ignore_through = through
            sequence.num_tokens, sequence.forced_ids, sequence.slack = len(sequence.token_ids), (), 0
            if sequence.status is SequenceStatus.RUNNING:
                self.requeue(sequence)
        self.running = []

    def retire(self, step_id: int) -> None:
        """A step was collected: what only it named comes back."""
        self.retired = step_id
        self.cache.retire(step_id)
        if self.leaving_rows:
            self._return_rows()

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.free(sequence.kv, sequence.last_step)
        for row in [sequence.row, *sequence.sibling_rows]:
            if row is not None:
                self.dropped_rows.append(row)
                self.leaving_rows.append((sequence.last_step, row))
        sequence.row, sequence.sibling_rows = None, []
        self._return_rows()

    def _return_rows(self) -> None:
        entries, self.leaving_rows = self.leaving_rows, []
        for last_step, row in entries:
            if last_step <= self.retired:
                self.free_rows.append(row)
            else:
                self.leaving_rows.append((last_step, row))
