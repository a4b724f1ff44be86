"""Planning one step: whose turn it is, with how many tokens, within tokens, logits rows and blocks.

There are no phases. Sequences that need one token go first, then prompts under way, then the waiting queue, so that decoding
is never stalled (Sarathi-Serve, Agrawal et al. 2024, §4). When blocks run out, sequences are preempted from the tail of the
order; the first in order always goes on, and a sequence never outgrows the whole cache, so somebody always ends.

What lives here: order, budgets, admission, preemption. What may not: what results mean (results.py), blocks (cache/).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from headrace.cache.manager import NO_MATCH, CacheManager, PrefixMatch
from headrace.config import SchedulerConfig
from headrace.request import SequenceStatus
from headrace.scheduler.cohort import Cohort
from headrace.scheduler.limits import SchedulerLimits
from headrace.scheduler.plan_builder import PlanBuilder
from headrace.scheduler.policies import Policy
from headrace.scheduler.roster import Roster
from headrace.scheduler.step_budget import StepFloors, StepMeter
from headrace.sequence import Sequence

# Of a step, while no other is computed: rows of all requests wait for the masks of a few. About what a step takes on a fast device.
MASK_SECONDS = 0.008
NO_MASKS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one that waits wants: new blocks by group, tokens to compute."""

    blocks: list[int]
    tokens: int


class Planner:
    """Fills PlanBuilders from the roster. ``prefix_queries`` and ``prefix_hits`` count tokens at first admission."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: SchedulerLimits,
        roster: Roster,
        cache: CacheManager,
        policy: Policy,
        floors: StepFloors | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.roster = roster
        self.cache = cache
        self.policy = policy
        self._floors = floors
        self.max_step_seconds = limits.max_step_seconds
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._in_want: Sequence | None = None  # a prompt under way that found no room
        self._in_want_since = 0  # the step that it found none in first
        self.batch_quota = 0  # static batching: how many the current batch may still admit

    def fill(self, plan: PlanBuilder, now: float, *, idle: bool, mask_seconds: Mapping[int, float] = NO_MASKS) -> None:
        """``idle``: nothing is in flight. ``mask_seconds``: as Scheduler.schedule has them."""
        self._push_out(plan)
        self._give_room(plan)
        late = self._late(mask_seconds) if mask_seconds else ()
        if self.config.chunked_prefill:
            self._plan_running(plan, late)
            self._plan_waiting(plan, now, idle)
        else:  # whole prompts first; decoding waits for them
            self._plan_waiting(plan, now, idle)
            if plan.is_empty:
                self._plan_running(plan, late)

    # --- those who run

    def can_repeat(self, num_running: int) -> bool:
        """Whether a step of one token for each that runs is what ``fill`` would plan as far as those who wait are concerned."""
        head = self.roster.waiting.peek()
        if head is None:
            return True
        if head.last_step > self.roster.retired or self.policy.preempts(head, self.roster.running[-1]):
            return False
        return len(self.roster.free_rows) < rows_wanted(head) and num_running < self.limits.max_num_batched_tokens

    def repeat(self, cohort: Cohort, plan: PlanBuilder, now: float) -> list[int] | None:
        """Plans what those of a cohort that are due need, and returns their places; None, and nothing is planned, where blocks are scarce."""
        due = cohort.due_to_plan()
        if due and not self.cache.has_room(2 * len(due)):  # a block to grow, a copy of a shared one
            return None
        for place in due:
            self._plan_decode(cohort.settle(place), plan)
        assert len(plan.work) == len(due), "there was room for all"
        plan.reserve(len(cohort.members) - len(due))
        self._plan_waiting(plan, now, idle=False)  # it only says why they wait
        return due

    def _late(self, mask_seconds: Mapping[int, float]) -> Container[Sequence]:
        """Those who are left out of this step because their masks would hold up all others: whoever was planned longest ago goes first, and
        one always goes. A request that is alone holds up nobody."""
        if len(self.roster.requests) == 1:
            return ()
        wanted = [each for each in self.roster.running if each.structured and each.num_tokens > each.num_prompt_tokens]
        left, late = MASK_SECONDS, []
        for place, sequence in enumerate(sorted(wanted, key=lambda each: each.last_step)):
            left -= mask_seconds.get(sequence.request_id, 0.0)
            if left < 0 and place:
                late.append(sequence)
        return frozenset(late)

    def _plan_running(self, plan: PlanBuilder, late: Container[Sequence] = ()) -> None:
        """One token for each sequence that needs one, then what is left of the budget for prompts under way.

        The hot loop: a sequence below ``plain_until`` needs no block, no copy and is not at its last token.
        """
        longer: list[Sequence] = []
        step_id, room = plan.step_id, plan.room
        work, starts, sampled = plan.work, plan.starts, plan.sampled
        for sequence in self.roster.running:  # only its tail may be popped meanwhile (preemption)
            total = sequence.num_tokens
            if len(work) >= room:
                break
            if total <= sequence.plain_until and total - sequence.num_computed_tokens == 1:
                starts.append(total - 1)
                sequence.num_computed_tokens = total
                sequence.num_tokens = total + 1
                sequence.last_step = step_id
                work.append(sequence)
                sampled.append(sequence)
            elif sequence.structured and sequence in late:
                continue
            elif total - sequence.num_computed_tokens == 1 and self.limits.kv_caching and not sequence.sibling_rows:
                plan.complete_plain_work()
                self._plan_decode(sequence, plan)
            else:
                longer.append(sequence)
        plan.complete_plain_work()
        for sequence in longer:
            self._plan_longer(sequence, plan)

    def _plan_decode(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """One token that needs a block, a copy, or is the last: makes room by preempting from the tail."""
        self.cache.trim(sequence.kv, sequence.num_computed_tokens, sequence.last_step)
        while not self._try_plan(sequence, plan, 1):
            if self.cache.num_leaving:
                return  # blocks are on their way back: waiting is cheaper than pushing anyone out
            if self.roster.preempt_last() is sequence:
                return

    def _plan_longer(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """A prompt under way takes what is free; it may push out a later sequence that this step does not name."""
        if sequence.status is not SequenceStatus.RUNNING or plan.room <= 0:
            return
        while not self._try_chunk(sequence, plan):
            victim = self.roster.running[-1]
            if self.cache.num_leaving or victim is sequence or victim.last_step == plan.step_id:
                return self._note_want(sequence, plan)
            self.roster.preempt_last()
        if self._in_want is sequence and sequence.last_step == plan.step_id:
            self._in_want = None

    def _note_want(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """Of several, the first in order."""
        if self._in_want is None or sequence.order < self._in_want.order:
            self._in_want, self._in_want_since = sequence, plan.step_id

    def _give_room(self, plan: PlanBuilder) -> None:
        """Makes room for a prompt under way that has found none, because all who came later were planned before it, or because blocks were on
        their way; but those may be others' by the time they come (behind windows some always are), so they are waited for once."""
        sequence = self._in_want
        if sequence is None or sequence.status is not SequenceStatus.RUNNING or self.roster.running[-1] is sequence:
            self._in_want = None
            return
        if self.cache.num_leaving and self.roster.retired < self._in_want_since - 1:
            return
        if self.cache.tokens_available(sequence.kv) <= sequence.num_computed_tokens or not self.cache.has_room(len(self.roster.running)):
            self.roster.preempt_last()
            self._in_want_since = plan.step_id

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
        count = min(whole, plan.room)
        if sequence.wants_scores:
            count = min(count, plan.logits_budget)
        if self.max_step_seconds is not None and count:
            count = self._meter(plan, self.max_step_seconds).fits(start, count)
        if count < whole and not (self.config.chunked_prefill and self.limits.kv_caching):
            return 0 if plan.work else whole  # alone, it may exceed the budget
        return count

    def _meter(self, plan: PlanBuilder, seconds: float) -> StepMeter:
        """What times this step; made when its first prompt asks, for then all single tokens are planned."""
        if plan.meter is None:
            plan.meter = meter = self.create_meter(seconds, plan.starts)
            if meter.overfull:
                self.roster.log.add_wait("overfull", -1, len(plan.starts), int(seconds * 1e6))
        return plan.meter

    def create_meter(self, seconds: float, starts: Seq[int]) -> StepMeter:
        assert self._floors is not None, "checked at the start"
        return StepMeter(self._floors, self.roster.speed, seconds, starts)

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
        if sequence.wants_scores and start < sequence.num_prompt_tokens - 1:
            plan.add_scores(work_index)
        self.cache.link(kv, sequence.token_ids, min(end, len(sequence.token_ids)), plan.step_id)
        if end == sequence.num_tokens and end < sequence.max_num_tokens:
            self._plan_samples(sequence, plan, work_index)
        self.roster.refresh(sequence)
        return True

    def _plan_samples(self, sequence: Sequence, plan: PlanBuilder, work_index: int) -> None:
        """One new token from this chunk's last logits; for n > 1 one for each sibling, which from now on goes alone."""
        siblings = self.roster.fork(sequence) if sequence.sibling_rows else []
        for sibling in siblings:
            self._send_row(sibling, plan)
        for taker in (sequence, *siblings):
            plan.add_sample(work_index, taker)
            taker.num_tokens += 1
            taker.last_step = plan.step_id
            if taker.num_tokens == taker.max_num_tokens:
                self.roster.stale = True  # fully planned: it leaves ``running`` and waits for its result
        for sibling in siblings:
            self.roster.refresh(sibling)

    def _send_row(self, sequence: Sequence, plan: PlanBuilder) -> None:
        assert sequence.row is not None
        plan.add_row(sequence)
        self.cache.describe(sequence.kv, sequence.row, plan.edits)

    def restore_rows(self, plan: PlanBuilder) -> None:
        """Rows are a cache on the workers' side: all of them, built again from this state."""
        for sequence in self.roster.running:
            self._send_row(sequence, plan)

    # --- those who wait

    def _plan_waiting(self, plan: PlanBuilder, now: float, idle: bool) -> None:
        batch_is_open, log = self._batch_is_open(idle), self.roster.log
        while (sequence := self.roster.waiting.peek()) is not None:
            rows, request_id = len(self.roster.free_rows), sequence.request_id
            if not batch_is_open:
                return log.add_wait("waits_batch", request_id)
            if plan.room <= 0:
                return log.add_wait("waits_budget", request_id, self.limits.max_num_batched_tokens)
            if sequence.last_step > self.roster.retired:  # its last tokens are not known yet
                return
            if rows < rows_wanted(sequence):
                return log.add_wait("waits_rows", request_id, rows_wanted(sequence), rows)
            match = self.lookup(sequence)
            if self._chunk(sequence, match.num_tokens, plan) == 0:
                return self._say_out_of_budget(request_id, plan)
            if not self._fits(sequence, match):
                return log.add_wait("waits_blocks", request_id, sequence.num_tokens, self.cache.num_used_blocks, self.cache.num_blocks)
            self._admit(match, plan, now)
            self._try_chunk(sequence, plan)

    def _say_out_of_budget(self, request_id: int, plan: PlanBuilder) -> None:
        """Of tokens, or of time."""
        seconds = self.max_step_seconds
        if seconds is not None and plan.meter is not None and plan.meter.bound:
            return self.roster.log.add_wait("waits_time", request_id, int(seconds * 1e6))
        return self.roster.log.add_wait("waits_budget", request_id, self.limits.max_num_batched_tokens)

    @property
    def admits(self) -> bool:
        """Static batching does until its batch is formed, and again when that has ended."""
        return self.config.continuous_batching or self.batch_quota > 0 or not self.roster.running

    def _batch_is_open(self, idle: bool) -> bool:
        """Continuous batching admits at every step; static batching forms a batch only when the last one has ended."""
        if self.config.continuous_batching:
            return True
        if idle and not self.roster.running:
            self.batch_quota = min(len(self.roster.waiting), self.limits.max_num_seqs)
        return self.batch_quota > 0

    def lookup(self, sequence: Sequence) -> PrefixMatch:
        """Scored prompts and recomputing engines cannot use a prefix: they need every position."""
        if not self.limits.kv_caching or sequence.wants_scores:
            return NO_MATCH
        return self.cache.lookup(sequence.kv, sequence.token_ids)

    def _fits(self, sequence: Sequence, match: PrefixMatch) -> bool:
        tokens, headroom, whole = self.claim_of(sequence)
        return self.cache.can_admit(match, tokens, headroom, whole=whole)

    def claim_of(self, sequence: Sequence) -> tuple[int, int, bool]:
        """Tokens it wants blocks for; blocks to leave, one to grow for everyone running (who has none reserved); whether it wants its own
        all at once, those behind a window too: where prompts go whole and before those who run. (Alone it may go in parts.)"""
        if not self.limits.paged_allocation:
            return sequence.max_num_tokens, 0, False
        others = len(self.roster.running)
        return sequence.num_tokens, others, others > 0 and not self.config.chunked_prefill

    def _admit(self, match: PrefixMatch, plan: PlanBuilder, now: float) -> None:
        head = self.roster.waiting.peek()
        assert head is not None
        sequence = self.roster.admit_head(rows_wanted(head))
        assert sequence.row is not None
        self.batch_quota -= 1
        self.cache.attach(sequence.kv, match)
        sequence.num_computed_tokens = match.num_tokens
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
            sequence.num_cached_tokens = match.num_tokens
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += match.num_tokens
            waited = max(0, int((now - sequence.request.arrival_time) * 1e6))
            self.roster.log.add("admitted", sequence.request_id, sequence.num_prompt_tokens, match.num_tokens, waited)
        else:
            self.roster.log.add("resumed", sequence.request_id, sequence.num_tokens, match.num_tokens)
        self.roster.tell_admitted(sequence)
        self._send_row(sequence, plan)
        if not self.limits.paged_allocation:
            self.cache.try_prepare(sequence.kv, match.num_tokens, sequence.max_num_tokens, sequence.row, plan.edits, plan.step_id)
        self.roster.refresh(sequence)

    def _push_out(self, plan: PlanBuilder) -> None:
        """Lets waiting sequences of a better class take the places of the last ones running, where the policy says so: as many of these go as
        are needed for those who may begin when their room has come."""
        roster, head = self.roster, self.roster.waiting.peek()
        if head is None or head.last_step > roster.retired or not self.admits:
            return
        budget = self.limits.max_num_batched_tokens * (plan.step_id - roster.retired)
        claims: dict[Sequence, _Claim] = {}
        while roster.running and self.policy.preempts(head, roster.running[-1]) and self._lacks_room(head, budget, claims):
            roster.preempt_last()

    def _lacks_room(self, head: Sequence, budget: int, claims: dict[Sequence, _Claim]) -> bool:
        """Whether those who may push out the last one running want more rows or blocks than are free or on their way. Those whose prompts
        ``budget`` tokens are enough for: the others could not begin by then. ``claims``: of those that were looked at."""
        roster, last = self.roster, self.roster.running[-1]
        rows = len(roster.free_rows) + roster.num_rows_leaving
        blocks, known_to_come = [pool.num_available for pool in self.cache.pools], False
        headroom = len(roster.running) if self.limits.paged_allocation else 0
        for sequence in chain((head,), (each for each in roster.waiting if each is not head and self.policy.preempts(each, last))):
            rows -= rows_wanted(sequence)
            if rows < 0:
                return True
            claim = claims[sequence] = claims.get(sequence) or self._claim(sequence, exact=sequence is head)
            blocks = [have - wanted for have, wanted in zip(blocks, claim.blocks, strict=True)]
            if min(blocks) < headroom and not known_to_come:
                blocks, known_to_come = [have + more for have, more in zip(blocks, self.cache.num_coming(), strict=True)], True
            if min(blocks) < headroom:
                return True
            headroom, budget = headroom + (headroom > 0), budget - claim.tokens
            if budget <= 0:
                return False
        return False

    def _claim(self, sequence: Sequence, *, exact: bool) -> _Claim:
        """Exact: with the blocks that its prefix takes from those that nobody holds. (Several may share them, so only one counts them.)"""
        match = self.lookup(sequence)
        tokens, _, whole = self.claim_of(sequence)
        blocks = self.cache.blocks_wanted(match, tokens, whole=whole)
        if exact:
            blocks = [new + old for new, old in zip(blocks, self.cache.idle_blocks(match), strict=True)]
        return _Claim(blocks, sequence.num_tokens - match.num_tokens)


def rows_wanted(sequence: Sequence) -> int:
    """One for each of its answers, until they go alone."""
    return 1 if sequence.forked else sequence.request.params.n
