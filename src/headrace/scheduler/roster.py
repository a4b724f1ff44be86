"""The roster: every live sequence, where it stands, and the row it sits in.

    waiting --admit--> running --(fully planned)--> in flight only --> finished
       ^------preempt-----'                                              ^
       '-------------------------- abort, refusal -----------------------'

Rows and blocks that a step in flight still names come back when that step is retired.

What lives here: the states and the passages between them, and a bounded log of the last ones for people (who was
admitted, who was pushed out, what the head of the queue waits for), in numbers. What may not: whose turn it is
(step_planner.py), what results mean (results.py), words (the dashboard's).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

from headrace.cache.manager import CacheManager
from headrace.cost.speed import StepSpeed
from headrace.request import Request, SequenceStatus
from headrace.sampling_params import SamplingParams
from headrace.scheduler.limits import SchedulerLimits
from headrace.scheduler.queue import WaitingQueue
from headrace.scheduler.repetition import RepetitionDetector
from headrace.sequence import ALWAYS, NEVER, Sequence

if TYPE_CHECKING:
    from headrace.scheduler.policies.protocol import DynamicPolicy

# --- the log

CAPACITY = 256  # entries; older ones are forgotten

Kind = Literal[
    "admitted", "resumed", "preempted", "refused", "turned_away", "aborted", "failed", "overfull",
    "waits_batch", "waits_rows", "waits_budget", "waits_blocks", "waits_time", "waits_adapter",
]  # fmt: skip


class Entry(NamedTuple):
    """``values`` by kind, in tokens unless said.

    admitted: prompt, cached, microseconds waited; resumed: to compute, cached; preempted: to compute again, used
    blocks, blocks; waits_rows: rows wanted, free; waits_budget: tokens a step; waits_blocks: tokens, used blocks,
    blocks; refused, turned_away: prompt; failed: sequences of the step; waits_time: microseconds a step may take;
    overfull: single tokens that alone take longer, and that. The request is -1 where it is about none. ``tenant``:
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
            if self.limits.kv_caching:  # else each recomputes everything into blocks of its own
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
        plain = self.limits.kv_caching and not (
            sequence.kv.tail_shared or sequence.sibling_rows or sequence.wants_scores or sequence.structured
        )
        sequence.plain_until = min(sequence.kv.capacity, sequence.max_num_tokens - 2) if plain else NEVER
        next_link = (
            (sequence.kv.num_linked_blocks + 1) * self.cache.block_tokens if self.cache.prefix_caching else ALWAYS
        )
        next_look = sequence.repetition.next_look if sequence.repetition is not None else ALWAYS
        sequence.checkpoint = min(sequence.max_num_tokens, next_link, next_look)

    def link(self, sequence: Sequence) -> None:
        """Lets others find the full blocks of its known tokens; what a step in flight is still writing is lost if that
        step fails."""
        written_by = sequence.last_step if sequence.last_step > self.retired else None
        self.cache.link(
            sequence.kv, sequence.token_ids, min(sequence.num_computed_tokens, len(sequence.token_ids)), written_by
        )

    def foretell(self, sequence: Sequence, run: Seq[int]) -> None:
        """Its sample in flight is bound to be the first token of ``run``, which the others follow. One that may end the
        answer is sampled."""
        end = next((at for at, token in enumerate(run) if token in sequence.stop_ids), len(run))
        run = run[: min(end, sequence.max_num_tokens - len(sequence.token_ids))]
        if len(run) > 1:
            sequence.certain = tuple(run)
            sequence.num_tokens += len(run) - 1
            sequence.row_lags = sequence.attentive = True
            self.some_ended = self.some_ended or sequence.num_tokens == sequence.max_num_tokens

    def settle_drafts(self, sequence: Sequence, drafted: int, refuted: int) -> None:
        """A step has told how many tokens it sampled for a sequence: ``refuted`` fewer than it was planned for."""
        sequence.slack -= drafted
        if not refuted:
            return
        sequence.num_tokens -= refuted
        if sequence.status is not SequenceStatus.RUNNING:
            return  # preempted
        sequence.num_computed_tokens -= refuted
        wanted = sequence.num_tokens + drafted + 1  # by the next step, if it drafts as many
        if sequence.kv.capacity >= wanted + self.cache.block_tokens and self.limits.paged_allocation:
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
            sequence.num_tokens, sequence.certain, sequence.slack = len(sequence.token_ids), (), 0
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
