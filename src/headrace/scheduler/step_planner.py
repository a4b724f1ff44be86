"""Planning one step: whose turn it is, with how many tokens, within tokens, logits rows and blocks.

There are no phases. Sequences that need one token go first, then prompts under way, then the waiting queue, so that
decoding is never stalled (Sarathi-Serve, Agrawal et al. 2024, §4). When blocks run out, sequences are preempted from
the tail of the order; the first in order always goes on, and a sequence never outgrows the whole cache, so one always
ends.

Where as many adapters run as a step may have, the first in order that has another one claims the one with the fewest
sequences: that adapter admits none after it, so its place comes free. The others go on. So it is where those that run
would have more than half of the KV cache's blocks: sequences that are to run with them need the rest.

What lives here: order, budgets, admission, preemption, which adapters are in one step. What may not: what results mean
(scheduler.py), blocks (cache/).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Literal

from headrace.cache.adapters import AdapterBlocks
from headrace.cache.manager import NO_MATCH, CacheManager, PrefixMatch
from headrace.config import SchedulerConfig
from headrace.cost.cost_model import Forecast
from headrace.request import SequenceStatus
from headrace.scheduler.limits import SchedulerLimits
from headrace.scheduler.plan_builder import Cohort, PlanBuilder
from headrace.scheduler.policies import Policy
from headrace.scheduler.roster import Roster, Sequence
from headrace.scheduler.step_budget import StepMeter
from headrace.speculative.length import Speculation


class AdapterClaims:
    """As those who start in one pass change what runs, whether or not that is carried out. ``most``: adapters of one
    step; ``running``: of the sequences that run."""

    def __init__(self, books: AdapterBlocks, most: int, running: Iterable[str | None]) -> None:
        self._books = books
        self._most = most
        self._users = Counter(each for each in running if each is not None)
        self._blocks = sum(map(books.size, self._users))
        self._claimed: set[str] = set()

    def admits(self, adapter: str | None) -> bool:
        """Whether one that has it may start; if not, another adapter has been claimed for it, if there was one."""
        if adapter is None:
            return True
        if adapter in self._users:
            return adapter not in self._claimed
        if self._has_room(adapter):
            return self._books.can_place(adapter)
        if len(self._claimed) < len(self._users):
            others = (each for each in self._users if each not in self._claimed)
            self._claimed.add(min(others, key=self._users.__getitem__))
        return False

    def _has_room(self, adapter: str) -> bool:
        """Not after one that had none, however small it is. One adapter may be of any size."""
        few = len(self._users) < self._most and self._blocks + self._books.size(adapter) <= self._books.most_in_use
        return not self._users or (few and not self._claimed)

    def to_take(self, adapter: str | None) -> int:
        """Blocks of the first KV group that one takes with its adapter when it starts."""
        if adapter is None or not self._books.is_shared or adapter in self._users:
            return 0
        return self._books.to_take(adapter)

    def take(self, adapter: str | None) -> None:
        """It starts."""
        if adapter is not None:
            self._blocks += 0 if adapter in self._users else self._books.size(adapter)
            self._users[adapter] += 1


# Of a step, while no other is computed: rows of all requests wait for the masks of a few. About what a step takes on a
# fast device.
MASK_SECONDS = 0.008
NO_MASKS: Mapping[int, float] = MappingProxyType({})


WaitKind = Literal[
    "next_step", "batch", "result", "rows", "token_budget", "time", "blocks", "adapter", "asleep", "prefill"
]
LOOKED_PAST = 256  # of those that wait for their adapters, in one step


@dataclass(frozen=True, slots=True)
class Wait:
    """What one that does not start with a step needs and how much of it there is: sequence rows, tokens of a step, KV
    blocks, or milliseconds of a step.

    "next_step": nothing is missing. "batch": static batching, the batch before must end. "result": its last tokens are
    still computed. "adapter": it comes into host memory, or others have all the room for so many.
    "asleep": the engine is to wake first. "prefill": another replica computes its prompt.
    """

    kind: WaitKind
    needed: int = 0
    available: int = 0


@dataclass(slots=True)
class Starting:
    """What those take who start before it, where no books show that yet: rows, blocks by group, adapters; and how many
    they are."""

    blocks: list[int]
    rows: int = 0
    running: int = 0
    adapters: AdapterClaims | None = None

    def admits(self, sequence: Sequence) -> bool:
        """As far as its adapter goes."""
        return self.adapters is None or self.adapters.admits(sequence.request.adapter)


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one that waits wants: new blocks by group, tokens to compute."""

    blocks: list[int]
    tokens: int


class StepPlanner:
    """Fills PlanBuilders from the roster. ``prefix_queries`` and ``prefix_hits`` count tokens at first admission."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: SchedulerLimits,
        roster: Roster,
        cache: CacheManager,
        policy: Policy,
        forecast: Forecast | None = None,
    ) -> None:
        self.config = config
        self.limits = limits
        self.roster = roster
        self.cache = cache
        self.policy = policy
        self._forecast = forecast
        self.speculation: Speculation | None = None  # where the worker drafts
        self.max_step_seconds = limits.max_step_seconds
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._starved: Sequence | None = None  # of those under way that found no room, the first in order
        self._starved_since = 0  # the step that it found none in first
        self._owed: Sequence | None = None  # for whom blocks are on their way back
        self.batch_quota = 0  # static batching: how many the current batch may still admit

    def fill(self, plan: PlanBuilder, now: float, *, idle: bool, mask_seconds: Mapping[int, float] = NO_MASKS) -> None:
        """``idle``: nothing is in flight. ``mask_seconds``: as Scheduler.schedule has them."""
        self._preempt_for_waiting(plan)
        self._free_room(plan)
        late = self._late(mask_seconds)
        if self.config.chunked_prefill:
            self._plan_running(plan, late)
            self._plan_waiting(plan, now, idle)
        else:  # whole prompts first, and decoding waits for them, but not for blocks that were freed for it
            owed, self._owed = self._owed, None
            if owed is None or owed.status is not SequenceStatus.RUNNING:
                self._plan_waiting(plan, now, idle)
            if plan.is_empty:
                self._plan_running(plan, late)
        if plan.is_empty and self.limits.runs_ahead:
            self._plan_ahead(plan)

    # --- those who run

    def can_repeat(self, num_running: int) -> bool:
        """Whether a step of one token for each that runs is what ``fill`` would plan as far as those who wait are
        concerned."""
        head = self.roster.waiting.peek()
        if head is None:
            return True
        if head.last_step > self.roster.retired or self.policy.preempts(head, self.roster.running[-1]):
            return False
        return len(self.roster.free_rows) < rows_wanted(head) and num_running < self.limits.max_num_batched_tokens

    def repeat(self, cohort: Cohort, plan: PlanBuilder, now: float) -> list[int] | None:
        """Plans what those of a cohort that are due need, and returns their places; None, and nothing is planned, where
        blocks are scarce."""
        due = cohort.due_to_plan()
        if due and not self.cache.has_room(2 * len(due)):  # a block to grow, a copy of a shared one
            return None
        for place in due:
            self._plan_decode(cohort.settle(place), plan)
        assert len(plan.work) == len(due), "there was room for all"
        plan.reserve(len(cohort.members) - len(due))
        self._plan_waiting(plan, now, idle=False)  # it only says why they wait
        return due

    def _late(self, mask_seconds: Mapping[int, float]) -> Collection[Sequence]:
        """Those who make way in this step because their masks would hold up all others, in the order of their turns:
        whoever was planned longest ago goes first, and one never makes way. A single request holds up no other."""
        left, late = MASK_SECONDS, dict[Sequence, float]()
        if not mask_seconds or len(self.roster.requests) == 1 or self.limits.stages > 1:
            return late
        wanted = [each for each in self.roster.running if each.structured and each.num_tokens > each.num_prompt_tokens]
        for place, sequence in enumerate(sorted(wanted, key=lambda each: each.last_step)):
            left -= mask_seconds.get(sequence.request_id, 0.0)
            if left < 0 and place:
                late[sequence] = left
        return late

    def _plan_running(self, plan: PlanBuilder, late: Collection[Sequence]) -> None:
        """One token for each sequence that needs one, then what is left of the budget for prompts under way.

        Who is late makes way only for masks that are made: if those who had the first found no room, or wait for what
        the late ones hold, these go on.
        """
        drafts = self._drafts_each()
        others = self._plan_drafts(plan, late, drafts) if drafts else self._plan_singles(plan, late)
        for sequence in others:
            if not (plan.masked and sequence in late):
                self._plan_longer(sequence, plan)

    def _plan_singles(self, plan: PlanBuilder, late: Collection[Sequence]) -> list[Sequence]:
        """One token for each sequence that needs one. Returns the others: forced ones, late ones, prompts.

        The hot loop: a sequence below ``fast_until`` needs no block, no copy and is not at its last token.
        """
        longer: list[Sequence] = []
        forced: list[Sequence] = []
        step_id, room = plan.step_id, plan.room
        work, starts, sampled = plan.work, plan.starts, plan.sampled
        # only its tail may be popped meanwhile (preemption)
        for sequence in self.roster.running if self.limits.stages == 1 else self._in_turn(plan):
            total = sequence.num_tokens
            if len(work) >= room:
                break
            if total <= sequence.fast_until and total - sequence.num_computed_tokens == 1:
                starts.append(total - 1)
                sequence.num_computed_tokens = total
                sequence.num_tokens = total + 1
                sequence.last_step = step_id
                work.append(sequence)
                sampled.append(sequence)
            elif sequence.structured and sequence in late:
                continue
            elif total - sequence.num_computed_tokens == 1 and self.limits.keeps_kv and not sequence.sibling_rows:
                plan.complete_plain_work()
                self._plan_decode(sequence, plan)
            elif _is_answering(sequence):
                forced.append(sequence)
                room -= 1  # it goes on in its turn, with as much as is left after those who need one token
            else:
                longer.append(sequence)
        plan.complete_plain_work()
        return [*forced, *late, *longer]

    def _in_turn(self, plan: PlanBuilder) -> Iterator[Sequence]:
        """Of those that run, where a pipeline's stages compute as many steps at once: each that goes on from a token is
        planned again once that token is with the first stage, ``stages`` steps later, and each step takes its share of
        them, so that no step is left with none."""
        there = plan.step_id - self.limits.stages
        single = [each.num_tokens - each.num_computed_tokens == 1 for each in self.roster.running]
        room = -(-sum(single) // self.limits.stages)
        for sequence, is_single in zip(self.roster.running, single, strict=False):
            known = len(sequence.token_ids) + len(sequence.forced_ids)
            if sequence.num_tokens > known and sequence.last_step > there:
                continue
            if not is_single:
                yield sequence
            elif room:
                room -= 1
                yield sequence

    def _drafts_each(self) -> int:
        """Drafts of each sequence in this step: as many as are worth it, and as the budget has beside one token of
        each. Where requests wait, half of that is theirs."""
        running = -(-len(self.roster.running) // self.limits.stages)
        if self.speculation is None or not running or not self.limits.keeps_kv or self.limits.padded:
            return 0
        if not any(each.drafts for each in self.roster.running):
            return 0  # all have opted out: plain steps are planned much faster
        spare = self.limits.max_num_batched_tokens - running
        return max(0, min(self.speculation.length(running), spare // (2 if self.roster.waiting else 1) // running))

    def _plan_drafts(self, plan: PlanBuilder, late: Collection[Sequence], most: int) -> list[Sequence]:
        """The same where sequences get their last sampled token and up to ``most`` that the worker proposes after
        it."""
        longer: list[Sequence] = []
        forced: list[Sequence] = []
        work, starts, sampled = plan.work, plan.starts, plan.sampled
        for sequence in self.roster.running if self.limits.stages == 1 else self._in_turn(plan):
            total = sequence.num_tokens
            if sequence.structured and sequence in late:
                continue
            if total - sequence.num_computed_tokens != 1 or sequence.sibling_rows:
                (forced if _is_answering(sequence) else longer).append(sequence)
            elif sequence.drafts and total + most <= sequence.fast_until:
                starts.append(total - 1)
                sequence.num_computed_tokens = total + most
                sequence.num_tokens = total + most + 1
                sequence.slack += most
                sequence.last_step = plan.step_id
                work.append(sequence)
                sampled.append(sequence)
            else:
                plan.complete_plain_work(most)
                if not self._try_drafts(sequence, plan, most):
                    self._plan_decode(sequence, plan)
        plan.complete_plain_work(most)
        return [*forced, *late, *longer]

    def _try_drafts(self, sequence: Sequence, plan: PlanBuilder, most: int) -> bool:
        """Where it has an answer begun, needs a block or is near its end."""
        # a draft is not its last token: who is fully planned has gone
        most = min(most, sequence.max_num_tokens - sequence.num_tokens - 2)
        if not sequence.drafts or most <= 0 or sequence.num_tokens <= sequence.num_prompt_tokens:
            return False
        self._trim(sequence, sequence.num_computed_tokens)
        return self._try_plan(sequence, plan, 1 + most, most)

    def _plan_ahead(self, plan: PlanBuilder) -> None:
        """Where a stage would have nothing to do before tokens are back: drafts after the drafts in flight, from a guess
        of what is sampled there (worker/staged_drafts.py)."""
        most = self._drafts_each()
        if not most or self.speculation is None or not self.speculation.wants_run(len(self.roster.running)):
            return
        most //= self.limits.stages - 1  # of all runs in flight: all before one must be right
        for sequence in self.roster.running:
            start, count = sequence.num_computed_tokens, sequence.max_num_tokens - sequence.num_tokens - 2
            count = min(1 + most, count, plan.room)
            single = sequence.num_tokens - start == 1 and not (sequence.row_lags or sequence.sibling_rows)
            if not (sequence.drafts and sequence.slack and single and count > 0) or sequence.structured:
                continue
            assert sequence.row is not None
            if self.cache.try_prepare(sequence.kv, start, start + count, sequence.row, plan.edits, plan.step_id):
                sequence.num_computed_tokens = start + count
                sequence.last_step = plan.step_id
                work = plan.add_work(sequence, start, count)
                plan.add_drafts(work, sequence, count)
                plan.add_sample(work, sequence)
                self.roster.refresh(sequence)

    def _plan_decode(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """One token that needs a block, a copy, or is the last: makes room by preempting from the tail."""
        if _may_be_last(sequence):
            return
        self._trim(sequence, sequence.num_computed_tokens)
        while not self._try_plan(sequence, plan, 1):
            if self.cache.num_leaving:
                self._owed = sequence  # blocks are on their way back: waiting is cheaper than pushing anyone out
                return
            if self.roster.preempt_last() is sequence:
                return

    def _trim(self, sequence: Sequence, start: int) -> None:
        """Gives back what is not seen any more, however many drafts in flight are refuted."""
        self.cache.trim(sequence.kv, start - sequence.slack, sequence.last_step)

    def _plan_longer(self, sequence: Sequence, plan: PlanBuilder) -> None:
        """A prompt under way takes what is free; it may push out a later sequence that this step does not name."""
        if sequence.status is not SequenceStatus.RUNNING or plan.room <= 0 or _may_be_last(sequence):
            return
        while not self._try_chunk(sequence, plan):
            victim = self.roster.running[-1]
            if self.cache.num_leaving or victim is sequence or victim.last_step == plan.step_id:
                if self._starved is None or sequence.order < self._starved.order:
                    self._starved, self._starved_since = sequence, plan.step_id
                return
            self.roster.preempt_last()

    def _free_room(self, plan: PlanBuilder) -> None:
        """Makes room for a prompt under way that has found none, because all who came later were planned before it, or
        because blocks were on their way; but those may be others' by the time they come (outside windows some always
        are), so they are waited for once."""
        sequence = self._starved
        if sequence is None or sequence.status is not SequenceStatus.RUNNING or self.roster.running[-1] is sequence:
            self._starved = None
            return
        if self.cache.num_leaving and self.roster.retired < self._starved_since - 1:
            return
        if self.cache.tokens_available(sequence.kv) <= sequence.num_computed_tokens or not self.cache.has_room(
            len(self.roster.running)
        ):
            self.roster.preempt_last()
            self._starved_since = plan.step_id

    def _try_chunk(self, sequence: Sequence, plan: PlanBuilder) -> bool:
        """Plans as many tokens as budgets and blocks allow. False only for want of blocks."""
        if not self.limits.keeps_kv:
            sequence.num_computed_tokens = 0
        start = sequence.num_computed_tokens
        count = self.chunk(sequence, start, plan)
        if count == 0:
            return True
        self._trim(sequence, start)
        room = self.cache.tokens_available(sequence.kv) - start
        if room < count and not self.limits.keeps_kv:
            return False  # a part would be forgotten before the next step
        return room > 0 and self._try_plan(sequence, plan, min(count, room))

    def chunk(self, sequence: Sequence, start: int, plan: PlanBuilder) -> int:
        """Tokens to compute from ``start`` within the budgets; 0 when a whole that must not be split does not fit."""
        whole = sequence.num_tokens - start
        count = min(whole, plan.room)
        if sequence.wants_scores:
            count = min(count, plan.logits_budget)
        if self.max_step_seconds is not None and count:
            count = max(self._meter(plan, self.max_step_seconds).fits(start, count), int(_is_answering(sequence)))
        splits = self.config.chunked_prefill or _is_answering(sequence)
        if count < whole and not (splits and self.limits.keeps_kv):
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
        assert self._forecast is not None, "checked at the start"
        return StepMeter(self._forecast, self.roster.speed, seconds, starts)

    def _try_plan(self, sequence: Sequence, plan: PlanBuilder, count: int, drafts: int = 0) -> bool:
        """Plans ``count`` tokens if blocks suffice, the last ``drafts`` of them to be proposed; samples when the others
        are the last known ones."""
        start, kv = sequence.num_computed_tokens, sequence.kv
        end = start + count
        assert sequence.row is not None
        if not self.cache.try_prepare(kv, start, end, sequence.row, plan.edits, plan.step_id):
            return False
        if self._starved is sequence:
            self._starved = None
        if sequence.row_lags:
            plan.add_row(sequence)
        sequence.num_computed_tokens = end
        sequence.last_step = plan.step_id
        work_index = plan.add_work(sequence, start, count)
        if sequence.wants_scores and start < sequence.num_prompt_tokens - 1:
            plan.add_scores(work_index)
        self.cache.link(
            kv, sequence.token_ids, min(end - drafts - sequence.slack, len(sequence.token_ids)), plan.step_id
        )
        if end - drafts == sequence.num_tokens and end < sequence.max_num_tokens:
            if drafts:
                plan.add_drafts(work_index, sequence, drafts)
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
                self.roster.some_ended = True  # fully planned: it leaves ``running`` and waits for its result
        for sibling in siblings:
            self.roster.refresh(sibling)

    def _send_row(self, sequence: Sequence, plan: PlanBuilder) -> None:
        assert sequence.row is not None
        plan.add_row(sequence)
        self.cache.describe(sequence.kv, sequence.row, plan.edits)

    def plan_running(self) -> PlanBuilder:
        """The next step in numbers only, as far as those who wait get what others leave: whole prompts go before those
        who run."""
        plan = PlanBuilder(self.roster.retired + 1, self.limits)
        if not self.config.chunked_prefill:
            return plan
        left = [(each, each.num_tokens - each.num_computed_tokens) for each in self.roster.running]
        for sequence, _ in (pair for pair in left if pair[1] == 1):
            plan.add_work(sequence, sequence.num_computed_tokens, 1)
        if self.max_step_seconds is not None:
            plan.meter = self.create_meter(self.max_step_seconds, plan.starts)
        for sequence, _ in (pair for pair in left if pair[1] > 1):
            if count := self.chunk(sequence, sequence.num_computed_tokens, plan):
                plan.add_work(sequence, sequence.num_computed_tokens, count)
        return plan

    # --- those who wait

    def _plan_waiting(self, plan: PlanBuilder, now: float, idle: bool) -> None:
        if idle and self.batch_size is not None and not self.roster.running:
            self.batch_quota = min(len(self.roster.waiting), self.limits.max_num_seqs)
        is_open, waiting = self.batch_is_open, self.roster.waiting
        before = self.no_claims() if waiting.peek() is not None else None
        aside: list[Sequence] = []
        while (sequence := waiting.peek()) is not None and before is not None:
            found = self.find_start(sequence, plan, before) if is_open else Wait("batch")
            if not isinstance(found, Wait):
                self._admit(found, plan, now, before)
                self._try_chunk(sequence, plan)
                continue
            if not aside:
                self._log_wait(sequence, found)
            if found.kind != "adapter" or len(aside) == LOOKED_PAST:
                break
            aside.append(waiting.pop())  # others may go on meanwhile
        for sequence in aside:
            waiting.push(sequence)
        if plan.work and before is not None and (head := waiting.peek()) is not None:
            self._bring_ahead(head, plan)

    def _bring_ahead(self, head: Sequence, plan: PlanBuilder) -> None:
        """The adapter of the first that waits, into blocks that are free and that no running sequence is about to need."""
        adapter, books = head.request.adapter, self.cache.adapters
        if adapter is None or books is None or books.is_resident(adapter) or not books.can_place(adapter):
            return
        if books.pool.num_free >= books.size(adapter) + len(self.roster.running):
            held, _ = books.take(adapter)
            books.release(held, plan.step_id)
            plan.adapters.append((held.slot, adapter, held.blocks))

    def no_claims(self) -> Starting:
        """Before the first of those who wait."""
        books, running = self.cache.adapters, (each.request.adapter for each in self.roster.running)
        claims = None if books is None else AdapterClaims(books, self.limits.max_adapters, running)
        return Starting([0] * len(self.cache.pools), adapters=claims)

    def find_start(self, sequence: Sequence, plan: PlanBuilder, before: Starting) -> PrefixMatch | Wait:
        """How one that waits starts with this step: after the prefix that is cached. Or what it is short of. Changes
        nothing."""
        if plan.room <= 0:
            return Wait("token_budget", 1)
        if sequence.last_step > self.roster.retired:
            return Wait("result")
        wanted, free = rows_wanted(sequence), len(self.roster.free_rows) - before.rows
        if free < wanted:
            return Wait("rows", wanted, free)
        if not before.admits(sequence):
            return Wait("adapter", 1, self.limits.max_adapters)
        match = self.lookup(sequence)
        if self.chunk(sequence, match.num_tokens, plan) == 0:
            if self.max_step_seconds is not None and plan.meter is not None and plan.meter.bound:
                return Wait("time", int(self.max_step_seconds * 1e3))
            return Wait("token_budget", sequence.num_tokens - match.num_tokens, plan.room)
        short = self._blocks_short(sequence, match, before)
        if short is not None and match.num_tokens and not self.roster.running and not before.running:
            match = NO_MATCH  # by itself it fits; with a window, what is cached and what is new together may not
            short = self._blocks_short(sequence, match, before)
        return short or match

    def _blocks_short(self, sequence: Sequence, match: PrefixMatch, before: Starting) -> Wait | None:
        """Of the group with the least to spare."""
        headroom = len(self.roster.running) + before.running if self.limits.grows else 0
        spare, needed, have = min(
            (pool.num_available - taken - wanted - headroom, wanted + headroom, pool.num_available - taken)
            for pool, taken, wanted in zip(
                self.cache.pools, before.blocks, self.blocks_to_take(sequence, match, headroom, before), strict=True
            )
        )
        return Wait("blocks", needed, have) if spare < 0 else None

    def blocks_to_take(self, sequence: Sequence, match: PrefixMatch, headroom: int, before: Starting) -> list[int]:
        """By group, of those that are free, its adapter's among them. Beside those who run, where prompts go whole,
        it wants its own all at once, those outside a window too. (Alone it may go in parts.)"""
        paged = self.limits.grows
        wanted = self.cache.blocks_to_take(
            match,
            sequence.num_tokens if paged else sequence.max_num_tokens,
            whole=paged and headroom > 0 and not self.config.chunked_prefill,
        )
        if before.adapters is not None:
            wanted[0] += before.adapters.to_take(sequence.request.adapter)
        return wanted

    def _log_wait(self, sequence: Sequence, wait: Wait) -> None:
        log, request_id = self.roster.log, sequence.request_id
        match wait.kind:
            case "batch":
                log.add_wait("waits_batch", request_id)
            case "adapter":
                log.add_wait("waits_adapter", request_id)
            case "rows":
                log.add_wait("waits_rows", request_id, wait.needed, wait.available)
            case "token_budget":
                log.add_wait("waits_budget", request_id, self.limits.max_num_batched_tokens)
            case "time":
                log.add_wait("waits_time", request_id, int((self.max_step_seconds or 0) * 1e6))
            case "blocks":
                log.add_wait(
                    "waits_blocks", request_id, sequence.num_tokens, self.cache.num_used_blocks, self.cache.num_blocks
                )

    @property
    def batch_size(self) -> int | None:
        """Of static batching."""
        return None if self.config.continuous_batching else self.limits.max_num_seqs

    @property
    def batch_is_open(self) -> bool:
        """Continuous batching admits at every step; static batching until its batch is complete."""
        return self.batch_size is None or self.batch_quota > 0

    def lookup(self, sequence: Sequence) -> PrefixMatch:
        """Scored prompts and recomputing engines cannot use a prefix: they need every position."""
        if not self.limits.keeps_kv or sequence.wants_scores:
            return NO_MATCH
        return self.cache.lookup(sequence.kv, sequence.token_ids)

    def _admit(self, match: PrefixMatch, plan: PlanBuilder, now: float, before: Starting) -> None:
        head = self.roster.waiting.peek()
        assert head is not None
        sequence = self.roster.admit_head(rows_wanted(head))
        assert sequence.row is not None
        self.batch_quota -= 1
        self.cache.attach(sequence.kv, match)  # before blocks for its adapter could be taken from it
        self._take_adapter(sequence, plan, before)
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
        if not self.limits.grows:
            self.cache.try_prepare(
                sequence.kv, match.num_tokens, sequence.max_num_tokens, sequence.row, plan.edits, plan.step_id
            )
        self.roster.refresh(sequence)

    def _take_adapter(self, sequence: Sequence, plan: PlanBuilder, before: Starting) -> None:
        adapter, books = sequence.request.adapter, self.cache.adapters
        if adapter is None or before.adapters is None or books is None:
            return
        before.adapters.take(adapter)
        held, missing = books.take(adapter)
        sequence.kv.resident, sequence.adapter_slot = held, held.slot
        if missing:
            plan.adapters.append((held.slot, adapter, held.blocks))

    def _preempt_for_waiting(self, plan: PlanBuilder) -> None:
        """Lets waiting sequences of a better class take the places of the last ones running, where the policy says so:
        as many of these go as are needed for those who may begin when their room has come."""
        roster, head = self.roster, self.roster.waiting.peek()
        if head is None or head.last_step > roster.retired or not (self.batch_is_open or not roster.running):
            return
        before = self.no_claims()
        if not before.admits(head):
            return  # room would not help it
        budget = self.limits.max_num_batched_tokens * (plan.step_id - roster.retired)
        claims: dict[Sequence, _Claim] = {}
        while (
            roster.running
            and self.policy.preempts(head, roster.running[-1])
            and self._lacks_room(head, budget, claims, before)
        ):
            roster.preempt_last()

    def _lacks_room(self, head: Sequence, budget: int, claims: dict[Sequence, _Claim], before: Starting) -> bool:
        """Whether those who may push out the last one running want more rows or blocks than are free or on their way.
        Those whose prompts ``budget`` tokens are enough for: the others could not begin by then. ``claims``: of those
        that were looked at."""
        roster, last = self.roster, self.roster.running[-1]
        rows = len(roster.free_rows) + len(roster.leaving_rows)
        blocks, known_to_come = [pool.num_available for pool in self.cache.pools], False
        headroom = len(roster.running) if self.limits.grows else 0
        for sequence in chain(
            (head,), (each for each in roster.waiting if each is not head and self.policy.preempts(each, last))
        ):
            rows -= rows_wanted(sequence)
            if rows < 0:
                return True
            claim = claims[sequence] = claims.get(sequence) or self._claim(sequence, before, exact=sequence is head)
            blocks = [have - wanted for have, wanted in zip(blocks, claim.blocks, strict=True)]
            if min(blocks) < headroom and not known_to_come:
                blocks = [have + more for have, more in zip(blocks, self.cache.num_coming(), strict=True)]
                known_to_come = True
            if min(blocks) < headroom:
                return True
            headroom, budget = headroom + (headroom > 0), budget - claim.tokens
            if budget <= 0:
                return False
        return False

    def _claim(self, sequence: Sequence, before: Starting, *, exact: bool) -> _Claim:
        """Exact: with the blocks that its prefix takes from the free ones. (Several may share them, so only
        one counts them.)"""
        match, others = self.lookup(sequence), len(self.roster.running)
        blocks = self.blocks_to_take(sequence, match, others, before)
        if not exact:
            blocks = [taken - idle for taken, idle in zip(blocks, self.cache.idle_blocks(match), strict=True)]
        return _Claim(blocks, sequence.num_tokens - match.num_tokens)


def _may_be_last(sequence: Sequence) -> bool:
    """Whether its next token is its last is known once drafts in flight are verified."""
    return sequence.slack > 0 and sequence.num_tokens + 1 >= sequence.max_num_tokens


def _is_answering(sequence: Sequence) -> bool:
    """Where it has several tokens to compute they are forced ones: it goes before prompts, as those who need one token
    do."""
    return sequence.structured and sequence.num_computed_tokens >= sequence.num_prompt_tokens


def rows_wanted(sequence: Sequence) -> int:
    """One for each of its answers, until they go alone."""
    return 1 if sequence.forked else sequence.request.params.n
