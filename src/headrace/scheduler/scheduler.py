"""The scheduler: a deterministic state machine that says, step by step, which sequences compute how many tokens.

There are no phases. A sequence has tokens, some of them computed; each step gives it some more to compute, within budgets:

    schedule(now, events) → StepPlan      decides; advances ``num_computed_tokens``; a sampled token is a placeholder until
    update(result, now)   → outputs       the result is collected, up to D steps later
    fail(message, now)    → outputs       the oldest step failed: its requests end, later ones are rolled back

It reads no clock: ``now`` is an input, so a journal of the calls replays exactly. Sequences that need one token go first,
then prompts under way, then the waiting queue (Sarathi-Serve, Agrawal et al. 2024, §4: decodes are never stalled).

What lives here: admission, order, budgets, preemption, and what a result means. What may not: blocks (cache/), torch, text.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headrace.cache.manager import NO_MATCH, CacheManager, PrefixMatch
from headrace.config import SchedulerConfig
from headrace.request import Finished, FinishReason, Request, SequenceOutput, SequenceStatus, StepPlan, StepResult, TokenLogprobs
from headrace.scheduler.events import AbortRequest, AddRequest, Event, FinishSequence
from headrace.scheduler.plan_builder import PlanBuilder
from headrace.scheduler.policies import create_policy
from headrace.scheduler.queue import WaitingQueue
from headrace.sequence import ALWAYS, NEVER, Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the executor and the switches allow. ``max_num_batched_tokens`` is resolved (never None) here."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logits_rows: int
    paged_allocation: bool = True
    kv_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerCounters:
    """Monotone counts since the start, in requests, tokens or events."""

    requests: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found


@dataclass(slots=True)
class _Tally:
    requests: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class InFlight:
    """A planned step whose result is not collected yet, with the sequences behind its arrays."""

    plan: StepPlan
    work: list[Sequence]
    sampled: list[Sequence]


class Scheduler:
    """See the module. ``eos_token_ids`` end a sequence unless its request ignores them."""

    def __init__(self, config: SchedulerConfig, limits: SchedulerLimits, cache: CacheManager, eos_token_ids: frozenset[int]) -> None:
        self.config = config
        self.limits = limits
        self.cache = cache
        self.policy = create_policy(config.scheduling_policy)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # ascending order: the last is the first to be preempted
        self.in_flight: deque[InFlight] = deque()
        self.max_sequence_tokens = min(limits.max_model_len, cache.capacity_tokens(limits.max_num_batched_tokens))
        self._eos = eos_token_ids
        self._requests: dict[int, list[Sequence]] = {}
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._leaving_rows: list[tuple[int, int]] = []  # (last step that names it, row)
        self._dropped_rows: list[int] = []
        self._next_step = 0
        self._retired = NEVER
        self._batch_quota = 0  # static batching: how many the current batch may still admit
        self._stale = False  # ``running`` holds sequences that have ended
        self._rows_lost = False
        self._rejected: list[SequenceOutput] = []
        self._tally = _Tally()

    # --- what callers may ask

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self.in_flight or self._rejected)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return sum(len(sequences) for sequences in self._requests.values()) - len(self.waiting)

    @property
    def counters(self) -> SchedulerCounters:
        tally = self._tally
        return SchedulerCounters(tally.requests, tally.preemptions, tally.prefix_queries, tally.prefix_hits)

    # --- planning

    def schedule(self, now: float, events: Iterable[Event] = ()) -> StepPlan | None:
        """The next step, or None when nothing can be computed now (nothing to do, or it waits for a result)."""
        for event in events:
            self._apply(event, now)
        self._drop_ended()
        plan = PlanBuilder(self._next_step, self.limits.max_num_batched_tokens, self.limits.max_logits_rows)
        self._push_out()
        if self._rows_lost:
            self._restore_rows(plan)
        if self.config.chunked_prefill:
            self._plan_running(plan)
            self._plan_waiting(plan, now)
        else:  # whole prompts first; decoding waits for them
            self._plan_waiting(plan, now)
            if plan.is_empty:
                self._plan_running(plan)
        return None if plan.is_empty else self._submit(plan)

    def _submit(self, plan: PlanBuilder) -> StepPlan:
        built = plan.build(self._dropped_rows)
        self._dropped_rows = []
        self._next_step += 1
        self.in_flight.append(InFlight(built, plan.work, plan.sampled))
        if self._stale:
            self._drop_ended()
        return built

    def _plan_running(self, plan: PlanBuilder) -> None:
        """One token for each sequence that needs one, then what is left of the budget for prompts under way."""
        longer: list[Sequence] = []
        step_id, budget = plan.step_id, plan.budget
        work, starts, sampled = plan.work, plan.starts, plan.sampled
        for sequence in self.running:  # only its tail may be popped meanwhile (preemption)
            total = sequence.num_tokens
            if len(work) >= budget:
                break
            if total <= sequence.plain_until and total - sequence.num_computed_tokens == 1:
                starts.append(total - 1)
                sequence.num_computed_tokens = total
                sequence.num_tokens = total + 1
                sequence.last_step = step_id
                work.append(sequence)
                sampled.append(sequence)
            elif total - sequence.num_computed_tokens == 1 and self.limits.kv_caching and not sequence.sibling_rows:
                self._freeze_plain(plan)
                self._plan_decode(sequence, plan)
            else:
                longer.append(sequence)
        self._freeze_plain(plan)
        plan.budget = budget - len(work)
        for sequence in longer:
            self._plan_longer(sequence, plan)

    def _freeze_plain(self, plan: PlanBuilder) -> None:
        """The loop above leaves one token a row and one sample a row implicit; this writes them out."""
        known = len(plan.counts)
        plan.counts.extend([1] * (len(plan.work) - known))
        plan.sample_work.extend(range(known, len(plan.work)))

    def _plan_decode(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """One token that needs a block, a copy, or is the last: makes room by preempting from the tail."""
        self.cache.trim(sequence.kv, sequence.num_computed_tokens, sequence.last_step)
        while not self._try_plan(sequence, plan, 1):
            if self.cache.num_leaving:
                return  # blocks are on their way back: waiting is cheaper than pushing anyone out
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return

    def _plan_longer(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """A prompt under way takes what is free; it may push out a later sequence that this step does not name."""
        if sequence.status is not SequenceStatus.RUNNING or plan.budget <= 0:
            return
        while not self._try_chunk(sequence, plan):
            victim = self.running[-1]
            if self.cache.num_leaving or victim is sequence or victim.last_step == plan.step_id:
                return
            self._preempt(victim)

    def _try_chunk(self, sequence: Sequence, plan: PlanBuilder) -> bool:
        """Plans as many tokens as budgets and blocks allow. False only for want of blocks."""
        if not self.limits.kv_caching:
            sequence.num_computed_tokens = 0
        start = sequence.num_computed_tokens
        count = self._chunk(sequence, start, plan)
        if count == 0:
            return True
        self.cache.trim(sequence.kv, start, sequence.last_step)
        room = self.cache.tokens_available(sequence.kv) - start
        if room < count and not self.limits.kv_caching:
            return False  # a part would be forgotten before the next step
        return room > 0 and self._try_plan(sequence, plan, min(count, room))

    def _chunk(self, sequence: Sequence, start: int, plan: PlanBuilder) -> int:
        """Tokens to compute from ``start`` within the budgets; 0 when a whole that must not be split does not fit."""
        whole = sequence.num_tokens - start
        count = min(whole, plan.budget)
        if self._wants_scores(sequence):
            count = min(count, plan.logits_budget)
        if count < whole and not (self.config.chunked_prefill and self.limits.kv_caching):
            return 0 if plan.work else whole  # alone, it may exceed the budget
        return count

    def _wants_scores(self, sequence: Sequence) -> bool:
        return sequence.request.params.prompt_logprobs is not None and sequence.index == 0 and sequence.num_scored_tokens < sequence.num_prompt_tokens - 1

    def _try_plan(self, sequence: Sequence, plan: PlanBuilder, count: int) -> bool:
        """Plans ``count`` tokens if blocks suffice; samples when they are the last known ones."""
        start, kv = sequence.num_computed_tokens, sequence.kv
        end = start + count
        assert sequence.row is not None
        if not self.cache.try_prepare(kv, start, end, sequence.row, plan.edits, plan.step_id):
            return False
        sequence.num_computed_tokens = end
        sequence.last_step = plan.step_id
        work_index = plan.add_work(sequence, start, count)
        if self._wants_scores(sequence) and start < sequence.num_prompt_tokens - 1:
            plan.prompt_logprobs.append(work_index)
            plan.logits_budget -= count
        self.cache.link(kv, sequence.token_ids, min(end, len(sequence.token_ids)), plan.step_id)
        if end == sequence.num_tokens and end < sequence.max_num_tokens:
            self._plan_samples(sequence, plan, work_index)
        self._refresh(sequence)
        return True

    def _plan_samples(self, sequence: Sequence, plan: PlanBuilder, work_index: int) -> None:
        """One new token from this chunk's last logits; for n > 1 one for each sibling, which from now on goes alone."""
        takers = [sequence]
        if sequence.sibling_rows:
            takers += self._fork(sequence, plan)
        for taker in takers:
            plan.add_sample(work_index, taker)
            taker.num_tokens += 1
            taker.last_step = plan.step_id
            if taker.num_tokens == taker.max_num_tokens:
                self._stale = True  # fully planned: it leaves ``running`` and waits for its result
            self._refresh(taker)

    def _fork(self, sequence: Sequence, plan: PlanBuilder) -> list[Sequence]:
        siblings = []
        for index, row in enumerate(sequence.sibling_rows, start=1):
            twin = self._create_sequence(sequence.request, index, sequence.order)
            if self.limits.kv_caching:  # else each recomputes everything into blocks of its own
                twin.kv = self.cache.fork(sequence.kv, sequence.num_computed_tokens)
            twin.num_computed_tokens = sequence.num_computed_tokens
            twin.status, twin.row, twin.forked = SequenceStatus.RUNNING, row, True
            twin.first_scheduled, twin.num_cached_tokens = sequence.first_scheduled, sequence.num_cached_tokens
            self._requests[sequence.request_id].append(twin)
            insort(self.running, twin, key=_order)
            plan.add_row(twin)
            self.cache.describe(twin.kv, row, plan.edits)
            siblings.append(twin)
        sequence.sibling_rows = []
        sequence.forked = True
        return siblings

    def _refresh(self, sequence: Sequence) -> None:
        """Recomputes how long planning and accepting this sequence's tokens need no thought."""
        plain = self.limits.kv_caching and not (sequence.kv.tail_shared or sequence.sibling_rows or self._wants_scores(sequence))
        sequence.plain_until = min(sequence.kv.capacity, sequence.max_num_tokens - 2) if plain else NEVER
        next_link = (sequence.kv.num_linked_blocks + 1) * self.cache.block_tokens if self.cache.prefix_caching else ALWAYS
        sequence.checkpoint = min(sequence.max_num_tokens, next_link)

    # --- admission

    def _plan_waiting(self, plan: PlanBuilder, now: float) -> None:
        if not self._batch_is_open():
            return
        while plan.budget > 0:
            sequence = self.waiting.peek()
            if sequence is None or sequence.last_step > self._retired:  # its last tokens are not known yet
                return
            if len(self._free_rows) < self._rows_wanted(sequence):
                return
            match = self._lookup(sequence)
            if self._chunk(sequence, match.num_tokens, plan) == 0 or not self._fits(sequence, match):
                return
            self._admit(sequence, match, plan, now)
            self._try_chunk(sequence, plan)

    def _batch_is_open(self) -> bool:
        """Continuous batching admits at every step; static batching forms a batch only when the last one has ended."""
        if self.config.continuous_batching:
            return True
        if not self.running and not self.in_flight:
            self._batch_quota = min(len(self.waiting), self.limits.max_num_seqs)
        return self._batch_quota > 0

    def _lookup(self, sequence: Sequence) -> PrefixMatch:
        """Scored prompts and recomputing engines cannot use a prefix: they need every position."""
        if not self.limits.kv_caching or self._wants_scores(sequence):
            return NO_MATCH
        return self.cache.lookup(sequence.kv, sequence.token_ids)

    def _fits(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Blocks for all its tokens, and one to grow for everyone running (who has none reserved)."""
        if self.limits.paged_allocation:
            return self.cache.can_admit(match, sequence.num_tokens, headroom=len(self.running))
        return self.cache.can_admit(match, sequence.max_num_tokens, headroom=0)

    @staticmethod
    def _rows_wanted(sequence: Sequence) -> int:
        return 1 if sequence.forked else sequence.request.params.n

    def _admit(self, sequence: Sequence, match: PrefixMatch, plan: PlanBuilder, now: float) -> None:
        self.waiting.pop()
        self._batch_quota -= 1
        sequence.status = SequenceStatus.RUNNING
        sequence.row = self._free_rows.pop()
        sequence.sibling_rows = [self._free_rows.pop() for _ in range(self._rows_wanted(sequence) - 1)]
        self.cache.attach(sequence.kv, match)
        sequence.num_computed_tokens = match.num_tokens
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
            sequence.num_cached_tokens = match.num_tokens
            self._tally.prefix_queries += sequence.num_prompt_tokens
            self._tally.prefix_hits += match.num_tokens
        insort(self.running, sequence, key=_order)
        plan.add_row(sequence)
        self.cache.describe(sequence.kv, sequence.row, plan.edits)
        if not self.limits.paged_allocation:
            self.cache.try_prepare(sequence.kv, match.num_tokens, sequence.max_num_tokens, sequence.row, plan.edits, plan.step_id)
        self._refresh(sequence)

    # --- preemption and ends

    def _push_out(self) -> None:
        """Lets a waiting sequence of a better class take the place of the last ones running, where the policy says so."""
        head = self.waiting.peek()
        if head is None or head.last_step > self._retired:
            return
        while self.running and self.policy.preempts(head.order, self.running[-1].order):
            if self.cache.num_leaving or self._leaving_rows:
                return  # room is on its way
            if len(self._free_rows) >= self._rows_wanted(head) and self._fits(head, self._lookup(head)):
                return
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Preemption by recompute: blocks and row go back (when no step in flight names them), tokens stay."""
        assert self.running[-1] is sequence
        self.running.pop()
        self._tally.preemptions += 1
        sequence.num_preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self._give_back(sequence)
        sequence.num_computed_tokens = 0
        self._refresh(sequence)
        self.waiting.push(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.free(sequence.kv, sequence.last_step)
        for row in [sequence.row, *sequence.sibling_rows]:
            if row is not None:
                self._dropped_rows.append(row)
                self._leaving_rows.append((sequence.last_step, row))
        sequence.row, sequence.sibling_rows = None, []
        self._return_rows()

    def _return_rows(self) -> None:
        still = [entry for entry in self._leaving_rows if entry[0] > self._retired]
        self._free_rows.extend(row for last_step, row in self._leaving_rows if last_step <= self._retired)
        self._leaving_rows = still

    def _end(self, sequence: Sequence, *, trusted: bool = True) -> None:
        """Ends a sequence: nothing of it is planned or accepted any more. Untrusted: what it wrote is not to be reused."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.discard()
        elif trusted:
            written_by = sequence.last_step if sequence.last_step > self._retired else None
            self.cache.link(sequence.kv, sequence.token_ids, min(sequence.num_computed_tokens, len(sequence.token_ids)), written_by)
        else:
            self.cache.forget_written_by(sequence.kv)
        sequence.status = SequenceStatus.FINISHED
        sequence.ignore_through = ALWAYS
        self._stale = True
        self._give_back(sequence)
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]

    def _drop_ended(self) -> None:
        if self._stale:
            self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING and s.num_tokens < s.max_num_tokens]
            self._stale = False

    # --- events

    def _apply(self, event: Event, now: float) -> None:
        if isinstance(event, AddRequest):
            self._add(event.request, now)
        elif isinstance(event, AbortRequest):
            for sequence in list(self._requests.get(event.request_id, ())):
                self._end(sequence)
        elif isinstance(event, FinishSequence):
            self._finish(event)

    def _add(self, request: Request, now: float) -> None:
        self._tally.requests += 1
        sequence = self._create_sequence(request, 0, self.policy.order(request, self._tally.requests))
        refusal = self._refusal(request, sequence)
        if refusal is not None:
            finished = sequence.finish_record(FinishReason.ERROR, now, message=refusal)
            self._rejected.extend(SequenceOutput(request.request_id, index, (), finished=finished) for index in range(request.params.n))
            return
        self._requests[request.request_id] = [sequence]
        self.waiting.push(sequence)

    def _refusal(self, request: Request, sequence: Sequence) -> str | None:
        """Why a request can never run here; front ends check the same before they submit."""
        prompt = sequence.num_prompt_tokens
        if request.request_id in self._requests:
            return f"request id {request.request_id} is in use"
        if prompt < 1 or prompt >= self.max_sequence_tokens:
            return f"the prompt has {prompt} tokens; this engine takes 1 to {self.max_sequence_tokens - 1}"
        if request.params.n > self.limits.max_num_seqs:
            return f"n is {request.params.n}, but only {self.limits.max_num_seqs} sequences can run at once"
        return None

    def _create_sequence(self, request: Request, index: int, order: tuple[int, ...]) -> Sequence:
        params = request.params
        prompt = len(request.prompt_token_ids)
        limit = self.max_sequence_tokens if params.max_tokens is None else min(prompt + params.max_tokens, self.max_sequence_tokens)
        return Sequence(
            request=request,
            index=index,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
            max_num_tokens=limit,
            order=order,
            kv=self.cache.create(request.cache_salt, request.adapter),
            token_ids=request.prompt_token_ids[:],
        )

    def _finish(self, event: FinishSequence) -> None:
        for sequence in list(self._requests.get(event.request_id, ())):
            if sequence.index == event.index:
                del sequence.token_ids[sequence.num_prompt_tokens + event.num_tokens :]
                self._end(sequence)

    # --- results

    def update(self, result: StepResult, now: float) -> list[SequenceOutput]:
        """Takes the oldest step's result: appends tokens, ends what has ended, returns what is new."""
        step = self.in_flight.popleft()
        assert step.plan.step_id == result.step_id, "results must be collected in order"
        self._retire(result.step_id)
        scores = self._accept_scores(step, result) if result.prompt_logprobs else {}
        for j in result.errors:
            step.sampled[j].attentive = True
        outputs = self.take_rejected()
        step_id = result.step_id
        for j, (sequence, tokens) in enumerate(zip(step.sampled, result.tokens, strict=True)):
            if sequence.ignore_through >= step_id:
                continue
            ids = sequence.token_ids
            if sequence.attentive or len(ids) + 1 >= sequence.checkpoint or tokens[0] in sequence.stop_ids:
                outputs.append(self._accept(sequence, j, result, scores.pop(sequence, ()), now))
            else:
                ids.append(tokens[0])
                outputs.append(SequenceOutput(sequence.request_id, sequence.index, tokens))
        outputs.extend(SequenceOutput(s.request_id, s.index, (), prompt_logprobs=entries) for s, entries in scores.items())
        return outputs

    def _accept(self, sequence: Sequence, j: int, result: StepResult, scores: tuple[TokenLogprobs, ...], now: float) -> SequenceOutput:
        """The thorough way to take one row's tokens."""
        if j in result.errors:
            self._end(sequence, trusted=False)
            return SequenceOutput(sequence.request_id, sequence.index, (), finished=sequence.finish_record(FinishReason.ERROR, now, message=result.errors[j]))
        first = sequence.first_token is None
        if first:
            sequence.first_token = now
        accepted, finished = self._append(sequence, result.tokens[j], now)
        if finished is not None:
            self._end(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.cache.link(sequence.kv, sequence.token_ids, min(sequence.num_computed_tokens, len(sequence.token_ids)), None)
            self._refresh(sequence)
        sequence.attentive = sequence.request.params.logprobs is not None
        return SequenceOutput(
            sequence.request_id,
            sequence.index,
            accepted,
            logprobs=result.logprobs[j][: len(accepted)] if j in result.logprobs else (),
            prompt_logprobs=scores,
            num_cached_tokens=sequence.num_cached_tokens if first else None,
            finished=finished,
        )

    def _append(self, sequence: Sequence, tokens: Seq[int], now: float) -> tuple[tuple[int, ...], Finished | None]:
        """Appends until something ends the sequence; returns what was kept, and the end if there is one."""
        for count, token in enumerate(tokens, start=1):
            sequence.token_ids.append(token)
            if token in sequence.stop_ids and sequence.num_output_tokens >= sequence.request.params.min_tokens:
                reason = None if token in self._eos and not sequence.request.params.ignore_eos else token
                return tuple(tokens[:count]), sequence.finish_record(FinishReason.STOP, now, stop_reason=reason)
            if len(sequence.token_ids) >= sequence.max_num_tokens:
                return tuple(tokens[:count]), sequence.finish_record(FinishReason.LENGTH, now)
        return tuple(tokens), None

    def _accept_scores(self, step: InFlight, result: StepResult) -> dict[Sequence, tuple[TokenLogprobs, ...]]:
        """Prompt logprobs, each position once: a prompt recomputed after preemption scores some again."""
        fresh: dict[Sequence, tuple[TokenLogprobs, ...]] = {}
        for work_index, entries in result.prompt_logprobs.items():
            sequence = step.work[work_index]
            if sequence.ignore_through >= result.step_id:
                continue
            known = max(0, sequence.num_scored_tokens - step.plan.starts[work_index])
            if entries[known:]:
                fresh[sequence] = tuple(entries[known:])
                sequence.num_scored_tokens += len(entries) - known
        return fresh

    def take_rejected(self) -> list[SequenceOutput]:
        """Refused requests, to be told to their clients."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _retire(self, step_id: int) -> None:
        self._retired = step_id
        self.cache.retire(step_id)
        if self._leaving_rows:
            self._return_rows()

    def fail(self, message: str, now: float) -> list[SequenceOutput]:
        """The oldest step failed: its sequences end with an error, all others start over (their rows may have missed edits)."""
        step = self.in_flight.popleft()
        step_id = step.plan.step_id
        self.cache.fail(step_id)
        outputs = self.take_rejected()
        for sequence in dict.fromkeys([*step.work, *step.sampled]):
            if sequence.ignore_through < step_id:
                finished = sequence.finish_record(FinishReason.ERROR, now, message=message)
                self._end(sequence, trusted=False)
                outputs.append(SequenceOutput(sequence.request_id, sequence.index, (), finished=finished))
        for sequence in [s for siblings in self._requests.values() for s in siblings]:
            self._roll_back(sequence)
        self.running = []
        self._retire(step_id)
        return outputs

    def _roll_back(self, sequence: Sequence) -> None:
        """Forgets what steps in flight would have told of this sequence; if it was running it is computed anew."""
        sequence.ignore_through = self._next_step - 1
        sequence.num_tokens = len(sequence.token_ids)
        if sequence.status is SequenceStatus.RUNNING:
            self._requeue(sequence)

    # --- rows are a cache

    def rebuild_rows(self) -> None:
        """The workers' rows were lost: the next plan builds them all from this state. Nothing may be in flight."""
        assert not self.in_flight, "rows of a step in flight cannot be rebuilt: their last tokens are not known"
        self._rows_lost = True

    def _restore_rows(self, plan: PlanBuilder) -> None:
        for sequence in self.running:
            assert sequence.row is not None
            plan.add_row(sequence)
            self.cache.describe(sequence.kv, sequence.row, plan.edits)
        self._rows_lost = False


def _order(sequence: Sequence) -> tuple[int, ...]:
    return (*sequence.order, sequence.index)
