"""The scheduler: a deterministic state machine that says, step by step, which sequences compute how many tokens.

A sequence has tokens, some of them computed; each step gives it some more to compute, within budgets:

    schedule(now, events) → StepPlan      decides; advances ``num_computed_tokens``; a sampled token is a placeholder
    until
    update(result, now)   → outputs       the result is collected, up to D steps later
    fail(message, now)    → outputs       the oldest step failed: its requests end, all others start over; without a
                                          message all do
    force_tokens(runs)                    tokens that a grammar forces: known before the step in flight samples the
                                          first of them

It reads no clock: ``now`` is an input, and so is how fast steps and masks have been going, so a journal of the calls
replays exactly.

What lives here: the face of the control plane, and what a step's result means: tokens are appended, ends are found,
scores are told once. What may not: its other parts (step_planner.py, roster.py), blocks, torch, text (engine/output.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from headrace.cache.manager import CacheManager
from headrace.config import SchedulerConfig
from headrace.cost.cost_model import StepSpeed
from headrace.errors import ConfigError
from headrace.request import (
    REPETITION,
    Finished,
    FinishReason,
    Request,
    SequenceOutput,
    SequenceStatus,
    Singles,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenOutputs,
    adapter_name,
)
from headrace.scheduler.events import AbortRequest, AddRequest, Event, ForgetPrefixes, RefuseRequest
from headrace.scheduler.limits import SchedulerCounters, SchedulerLimits
from headrace.scheduler.plan_builder import Cohort, PlanBuilder
from headrace.scheduler.policies import DynamicPolicy, Forecast, Policy, Refusal, create_policy
from headrace.scheduler.repetition import RepetitionDetector
from headrace.scheduler.roster import NEVER, DecisionLog, Kind, Roster, Sequence, longest_first
from headrace.scheduler.step_planner import NO_MASKS, StepPlanner
from headrace.speculative.length import Speculation


@dataclass(frozen=True, slots=True)
class InFlight:
    """A planned step whose result is not collected yet, with the sequences behind its arrays. ``settled``: samples
    whose drafts are known to be left out."""

    plan: StepPlan
    work: list[Sequence]
    sampled: list[Sequence]
    settled: set[int] = field(default_factory=set)


def take_result(roster: Roster, step: InFlight, result: StepResult, now: float) -> list[SequenceOutput]:
    """Reads one step's result; returns what is new. The hot loop takes rows below their ``check_at`` without
    thought."""
    scores = _fresh_scores(step, result) if result.prompt_logprobs else {}
    for j in result.errors:
        step.sampled[j].extra_outputs = True
    outputs = []
    step_id, drafts, counts = result.step_id, step.plan.drafts, step.plan.counts
    for j, (sequence, work, tokens) in enumerate(zip(step.sampled, step.plan.sample_work, result.tokens, strict=True)):
        if sequence.ignore_through >= step_id:
            continue
        if drafts and (drafted := drafts[work]) and j not in step.settled:
            known = drafted < counts[work]  # a token before them, which has one sampled after it
            sequence.slack -= drafted
            if (refuted := drafted + known - (len(tokens) or known)) > 0:
                roster.take_back(sequence, drafted, refuted)
        if not (tokens or j in result.errors):
            continue  # a run that was refuted before it was verified
        plain = not sequence.extra_outputs and sequence.stop_ids.isdisjoint(tokens)
        if plain and len(sequence.token_ids) + len(tokens) < sequence.check_at:
            sequence.token_ids.extend(tokens)
        elif plain and _only_fills_a_block(sequence, tokens):
            _append_plain(roster, sequence, tokens)
        else:
            outputs.append(_accept(roster, sequence, j, result, scores.pop(sequence, ()), now))
            continue
        outputs.append(SequenceOutput(sequence.request_id, sequence.index, tokens))
    outputs.extend(SequenceOutput(s.request_id, s.index, (), prompt_logprobs=entries) for s, entries in scores.items())
    return outputs


def settle_forced(roster: Roster, step: InFlight, samples: Iterable[int]) -> None:
    """These are bound to be one token each: their drafts are left out before there is a result."""
    for j in samples if step.plan.drafts else ():
        drafted = step.plan.drafts[step.plan.sample_work[j]]
        if drafted:
            step.sampled[j].slack -= drafted
            roster.take_back(step.sampled[j], drafted, drafted)
            step.settled.add(j)


def take_cohort_result(
    roster: Roster, cohort: Cohort, result: StepResult, tokens: list[int], now: float
) -> Seq[SequenceOutput]:
    """Reads the result of a step in which every member of a cohort got one token and nothing else; the same as
    ``take_result``."""
    heeded, members = cohort.due_to_take(), cohort.members
    if not cohort.stop_ids.isdisjoint(tokens):
        heeded = sorted({*heeded, *(place for place, token in enumerate(tokens) if token in members[place].stop_ids)})
    outputs = TokenOutputs(cohort.request_ids, cohort.indices, result.tokens)
    taken = {}
    for place in heeded:
        sequence, token = cohort.settle(place), tokens[place : place + 1]
        if sequence.stop_ids.isdisjoint(token) and _only_fills_a_block(sequence, token):
            _append_plain(roster, sequence, token)
        else:
            taken[place] = _accept(roster, sequence, place, result, (), now)
    cohort.take(tokens, heeded)
    if all(output.finished is None for output in taken.values()):
        return outputs  # they are what they would have been without a thought
    return [taken.get(place, output) for place, output in enumerate(outputs)]


def _only_fills_a_block(sequence: Sequence, tokens: Seq[int]) -> bool:
    """It ends neither by length nor by a loop."""
    return sequence.repetition is None and len(sequence.token_ids) + len(tokens) < sequence.max_num_tokens


def _append_plain(roster: Roster, sequence: Sequence, tokens: Seq[int]) -> None:
    """A sequence's next tokens, which end nothing."""
    sequence.token_ids.extend(tokens)
    if sequence.status is SequenceStatus.RUNNING:
        roster.link(sequence)
        roster.refresh(sequence)


def single_tokens(result: StepResult) -> list[int] | None:
    """The tokens of a result that holds one for each sample and nothing else."""
    if result.errors or result.logprobs or result.prompt_logprobs or result.pooled:
        return None
    try:
        return result.tokens.column if isinstance(result.tokens, Singles) else [token for (token,) in result.tokens]
    except ValueError:
        return None


def take_failure(roster: Roster, step: InFlight, message: str, now: float) -> list[SequenceOutput]:
    """Ends every sequence of a failed step that no earlier failure has rolled back already."""
    failed = [s for s in dict.fromkeys([*step.work, *step.sampled]) if s.ignore_through < step.plan.step_id]
    ends = [(_fail(roster, sequence, message, now), siblings_to_come(sequence)) for sequence in failed]
    return [end._replace(index=index) for end, siblings in ends for index in (end.index, *siblings)]


def siblings_to_come(sequence: Sequence) -> range:
    """The answers that would have begun with this prompt: they end with it."""
    return range(0) if sequence.forked else range(1, sequence.request.params.n)


def _fail(roster: Roster, sequence: Sequence, message: str, now: float) -> SequenceOutput:
    finished = sequence.finish_record(FinishReason.ERROR, now, message=message)
    roster.end(sequence, trusted=False)
    return SequenceOutput(sequence.request_id, sequence.index, (), finished=finished)


def _accept(
    roster: Roster, sequence: Sequence, j: int, result: StepResult, scores: tuple[TokenLogprobs, ...], now: float
) -> SequenceOutput:
    """The thorough way to take one row's tokens."""
    if j in result.errors:
        return _fail(roster, sequence, result.errors[j], now)
    first = sequence.first_token is None
    if first:
        sequence.first_token = now
    tokens = result.tokens[j]
    if sequence.forced_ids:
        assert tokens == sequence.forced_ids[:1], "its mask allowed this token alone"
        tokens, sequence.forced_ids = sequence.forced_ids, ()
    accepted, finished = _append(sequence, tokens, roster.eos_token_ids, now)
    if j in result.pooled:
        accepted, finished = (), sequence.finish_record(FinishReason.STOP, now)
    if finished is not None:
        roster.end(sequence)
    elif sequence.status is SequenceStatus.RUNNING:
        roster.link(sequence)
        roster.refresh(sequence)
    sequence.extra_outputs = sequence.request.params.logprobs is not None
    return SequenceOutput(
        sequence.request_id,
        sequence.index,
        accepted,
        logprobs=result.logprobs[j][: len(accepted)] if j in result.logprobs else (),
        prompt_logprobs=scores,
        num_cached_tokens=sequence.num_cached_tokens if first else None,
        finished=finished,
        first_scheduled=sequence.first_scheduled if first else None,
        pooled=result.pooled.get(j, b""),
    )


def _append(
    sequence: Sequence, tokens: Seq[int], eos: frozenset[int], now: float
) -> tuple[tuple[int, ...], Finished | None]:
    """Appends until something ends the sequence; returns what was kept, and the end if there is one."""
    params = sequence.request.params
    for count, token in enumerate(tokens, start=1):
        sequence.token_ids.append(token)
        # nothing else was left
        ended = sequence.num_output_tokens >= params.min_tokens or (sequence.structured and token in eos)
        if token in sequence.stop_ids and ended:
            reason = None if token in eos and (sequence.structured or not params.ignore_eos) else token
            return tuple(tokens[:count]), sequence.finish_record(FinishReason.STOP, now, stop_reason=reason)
        if sequence.repetition is not None and _loops(sequence, sequence.repetition):
            return tuple(tokens[:count]), sequence.finish_record(FinishReason.STOP, now, stop_reason=REPETITION)
        if len(sequence.token_ids) >= sequence.max_num_tokens:
            return tuple(tokens[:count]), sequence.finish_record(FinishReason.LENGTH, now)
    return tuple(tokens), None


def _loops(sequence: Sequence, detector: RepetitionDetector) -> bool:
    """Whether the answer has come to its end by repeating itself."""
    ids = sequence.token_ids
    return (
        len(ids) >= detector.next_look
        and detector.look(ids)
        and sequence.num_output_tokens >= sequence.request.params.min_tokens
    )


def _fresh_scores(step: InFlight, result: StepResult) -> dict[Sequence, tuple[TokenLogprobs, ...]]:
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


STEPS_ALIKE = 4  # before a cohort is made: that costs about what one step costs without


class Scheduler:
    """See the module. ``eos_token_ids`` end a sequence unless its request ignores them."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: SchedulerLimits,
        cache: CacheManager,
        eos_token_ids: frozenset[int],
        forecast: Forecast | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        if limits.max_step_seconds is not None and forecast is None:
            raise ConfigError(
                f"--max-step-ms is {limits.max_step_seconds * 1e3:g}, but this engine cannot tell what a step costs: it computes no model, or its "
                f"device was never measured. Measure it with headrace doctor --profile, or bound steps with --max-num-batched-tokens."
            )
        if limits.max_step_seconds is not None and not limits.keeps_kv:
            raise ConfigError(
                "--max-step-ms needs prompts that may be split, and without kv_caching they are computed whole; leave one of them out."
            )
        self.policy = create_policy(config, forecast)
        self._dynamic = self.policy if isinstance(self.policy, DynamicPolicy) else None
        self.roster = Roster(cache, limits, eos_token_ids, self._dynamic)
        self.in_flight: deque[InFlight] = deque()
        self._longest_first = config.longest_first
        self.by_arrival = type(self.policy) is Policy  # alone: the order of a request is its number
        self.serves_by_arrival = self.by_arrival and config.continuous_batching
        self.planner = StepPlanner(config, limits, self.roster, cache, self.policy, forecast)
        self.speculation = self.planner.speculation = speculation
        self._next_step = 0
        self._num_requests = 0
        self._rejected: list[SequenceOutput] = []
        self._cohort: Cohort | None = None
        self._alike = 0  # steps in a row that planned one token for each that runs

    def settle(self) -> None:
        """Makes up for all records, for whoever looks at how far sequences are."""
        if self._cohort is not None:
            self._cohort.settle_all()

    @property
    def requests(self) -> Mapping[int, list[Sequence]]:
        """The live ones, by id; their sequences' records lag behind until ``settle``."""
        return self.roster.requests

    @property
    def has_work(self) -> bool:
        return bool(self.roster.requests or self.in_flight or self._rejected)

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence that model and cache allow."""
        return self.roster.max_sequence_tokens

    @property
    def num_waiting(self) -> int:
        return len(self.roster.waiting)

    def expected(self, request: Request, behind: int = 0) -> Sequence:
        """What a request would be that comes after so many others. It is not entered."""
        return self._create(request, self._num_requests + 1 + behind)

    def _create(self, request: Request, number: int) -> Sequence:
        order = (number,) if self.by_arrival else self.policy.order(request, number)
        return self.roster.create(request, 0, order)

    @property
    def num_running(self) -> int:
        return sum(map(len, self.roster.requests.values())) - self.num_waiting

    @property
    def wants_speed(self) -> bool:
        """Whether ``schedule`` is to be told how fast steps go."""
        return self.limits.max_step_seconds is not None or (self._dynamic is not None and self._dynamic.heeds_speed)

    @property
    def counters(self) -> SchedulerCounters:
        return SchedulerCounters(
            self._num_requests, self.roster.num_preemptions, self.planner.prefix_queries, self.planner.prefix_hits
        )

    @property
    def log(self) -> DecisionLog:
        return self.roster.log

    def batch_order(self, requests: Seq[Request]) -> Seq[Request]:
        """How requests are best added that are all there at once, if none is streamed; another policy than arrival
        orders them by itself."""
        if not (self._longest_first and self.serves_by_arrival):
            return requests
        # where no prefix is found, none is lost
        capacity = self.cache.num_tokens if self.cache.prefix_caching else math.inf
        return longest_first(requests, block_tokens=self.cache.block_tokens, capacity=capacity)

    # --- planning

    def schedule(
        self,
        now: float,
        events: Iterable[Event] = (),
        speed: StepSpeed | None = None,
        mask_seconds: Mapping[int, float] = NO_MASKS,
    ) -> StepPlan | None:
        """The next step, or None when nothing can be computed now (nothing to do, or it waits for a result).

        ``speed`` None: as before. ``mask_seconds``: what one mask is likely to take, of the requests that want some.
        """
        self.roster.now = self.roster.log.now = now
        if speed is not None:
            self.roster.speed = speed
        again = self._repeat(self._cohort, now) if self._cohort is not None and not events else None
        if again is not None:
            return again
        self._dissolve()
        for event in events:
            self._apply(event, now)
        self.roster.drop_ended()
        if self._dynamic is not None:
            self._consult(self._dynamic, now)
        if not (self.roster.running or len(self.roster.waiting)):
            return None
        plan = self._begin_plan()
        if self._dynamic is not None and self.limits.max_step_seconds is not None:
            self.planner.max_step_seconds = min(self.limits.max_step_seconds, self._dynamic.max_step_seconds)
        self.planner.fill(plan, now, idle=not self.in_flight, mask_seconds=mask_seconds)
        return None if plan.is_empty else self._submit(plan)

    def _begin_plan(self) -> PlanBuilder:
        plan = PlanBuilder(self._next_step, self.limits)
        if any(step.plan.drafts for step in self.in_flight):
            plan.drafts = {}  # how long sequences are is not known for sure
        return plan

    def _submit(self, plan: PlanBuilder) -> StepPlan:
        plan.shared_tokens = self.cache.shared_tokens
        built = plan.build(self.roster.dropped_rows)
        self._follow(InFlight(built, plan.work, plan.sampled))
        self._gather(plan)
        return built

    def _follow(self, step: InFlight) -> None:
        self.roster.dropped_rows = []
        self.roster.drop_ended()
        self._next_step += 1
        self.in_flight.append(step)

    # --- steps that are alike

    def _repeat(self, cohort: Cohort, now: float) -> StepPlan | None:
        """The step before once more, each sequence a token further; None where it takes more thought."""
        if self.roster.some_ended or not self.planner.can_repeat(len(cohort.members)):
            return None
        if self.speculation is not None and self.speculation.length(len(cohort.members)):
            return None
        if self._dynamic is not None and now >= self._dynamic.wake:
            return None
        plan = self._begin_plan()
        due = self.planner.repeat(cohort, plan, now)
        if due is None:
            return None
        plan.shared_tokens = self.cache.shared_tokens
        built = cohort.plan(due, plan, self.roster.dropped_rows)
        if self.roster.some_ended:  # some are fully planned
            self._dissolve()
        self._follow(InFlight(built, cohort.members, cohort.members))
        return built

    def _gather(self, plan: PlanBuilder) -> None:
        """Makes a cohort of those who run once their steps have been alike for a while, the ones in flight included."""
        running = self.roster.running
        alike = (
            bool(running)
            and plan.work == running
            and plan.sampled == running
            and self.limits.keeps_kv
            and not self.limits.padded
        )
        alike = alike and plan.drafts is None and self.limits.stages == 1
        self._alike = self._alike + 1 if alike else 0
        if (
            self._alike <= STEPS_ALIKE
            or any(step.sampled != running for step in self.in_flight)
            or not self.planner.can_repeat(len(running))
        ):
            return
        oldest = self.in_flight[0].plan.step_id
        if any(
            each.extra_outputs or each.structured or each.ignore_through >= oldest or each.fast_until == NEVER
            for each in running
        ):
            return
        members = running[:]
        self._cohort = Cohort(members)
        self.in_flight = deque(InFlight(step.plan, members, members) for step in self.in_flight)

    def _dissolve(self) -> None:
        """Everybody goes alone again, with a record that is as it should be."""
        if self._cohort is not None:
            self.settle()
            self._cohort, self._alike = None, 0

    # --- events

    def _apply(self, event: Event, now: float) -> None:
        if isinstance(event, AddRequest):
            if event.request.adapter is not None and self.cache.adapters is not None:
                self.cache.adapters.expect(event.request.adapter, event.adapter_blocks)
            self._add(event.request, now)
            return
        if isinstance(event, RefuseRequest):
            self._add(event.request, now, Refusal(event.message, param=event.param))
            return
        if isinstance(event, ForgetPrefixes):
            self.cache.forget_all(sequence.kv for sequences in self.roster.requests.values() for sequence in sequences)
            return
        if isinstance(event, AbortRequest) and event.request_id in self.roster.requests:
            self.roster.log.add("aborted", event.request_id)
        for sequence in list(self.roster.requests.get(event.request_id, ())):
            if isinstance(event, AbortRequest):
                self.roster.end(sequence)
            elif sequence.index == event.index:
                del sequence.token_ids[sequence.num_prompt_tokens + event.num_tokens :]
                self.roster.end(sequence)

    def _add(self, request: Request, now: float, refusal: Refusal | None = None) -> None:
        self._num_requests += 1
        sequence = self._create(request, self._num_requests)
        kind: Kind = "refused"
        refusal = refusal or self._refusal(request)
        if refusal is None and self._dynamic is not None:
            self.roster.drop_ended()  # it looks at those who run
            kind, refusal = "turned_away", self._dynamic.arrived(sequence, self.roster)
        if refusal is None:
            self.roster.enter(sequence)
        else:
            self._reject(kind, sequence, refusal, now)

    def _consult(self, policy: DynamicPolicy, now: float) -> None:
        """Its say before a step: it may order anew those who run or wait, and turn away those who wait."""
        for sequence, refusal in policy.consider(self.roster):
            assert sequence.status is SequenceStatus.WAITING, "only who waits is turned away"
            self._reject("turned_away", sequence, refusal, now)
            self.roster.end(sequence)
        self.roster.sort()

    def _reject(self, kind: Kind, sequence: Sequence, refusal: Refusal, now: float) -> None:
        """Its client is told; so are the clients of siblings that would have begun with its prompt."""
        request = sequence.request
        self.roster.log.add(kind, request.request_id, len(request.prompt_token_ids), tenant=request.tenant)
        finished = sequence.finish_record(FinishReason.ERROR, now, message=refusal.message)
        finished = replace(finished, retry_after=refusal.retry_after, param=refusal.param)
        indices = (sequence.index, *siblings_to_come(sequence))
        self._rejected.extend(SequenceOutput(request.request_id, index, (), finished=finished) for index in indices)

    def takes(self, request: Request) -> bool:
        """As far as its numbers say: a policy may turn it away."""
        return self._refusal(request) is None

    def _refusal(self, request: Request) -> Refusal | None:
        """Why a request can never run here; front ends check the same before they submit."""
        prompt = len(request.prompt_token_ids)
        if request.request_id in self.roster.requests:
            return Refusal(f"request id {request.request_id} is in use")
        longest = self.roster.longest(request.adapter)
        if not 1 <= prompt < longest:
            beside = (
                "" if longest == self.max_sequence_tokens else f" beside adapter {adapter_name(request.adapter or '')}"
            )
            told = f"the prompt has {prompt} tokens; this engine takes at most {max(0, longest - 1)}{beside}"
            return Refusal(f"{told}. Shorten it or enlarge the KV cache.", param="prompt")
        if request.params.n > self.limits.max_num_seqs:
            return Refusal(f"n is {request.params.n}, but only {self.limits.max_num_seqs} sequences can run at once")
        return None

    def take_rejected(self) -> list[SequenceOutput]:
        """Refused requests, to be told to their clients."""
        rejected, self._rejected = self._rejected, []
        return rejected

    # --- results

    def update(self, result: StepResult, now: float) -> Seq[SequenceOutput]:
        """Takes the oldest step's result: appends tokens, ends what has ended, returns what is new."""
        self.roster.now = now
        step = self.in_flight.popleft()
        assert step.plan.step_id == result.step_id, "results must be collected in order"
        for j in result.errors:
            # which may not hold it any more: aborted, preempted, slid
            self.cache.forget_written_since(step.sampled[j].kv, result.step_id)
        self.roster.retire(result.step_id)
        drafts = self.speculation
        if drafts is not None and drafts.observe(step.plan, result, now) and drafts.runs is not None:
            kind: Kind = "runs_begin" if drafts.runs.on else "runs_end"
            self.roster.log.add(kind, -1, *(int(1e6 / speed) for speed in drafts.runs.speeds))
        cohort = self._cohort
        tokens = single_tokens(result) if cohort is not None and step.sampled is cohort.members else None
        if cohort is None or tokens is None:
            self._dissolve()
            outputs: Seq[SequenceOutput] = take_result(self.roster, step, result, now)
        else:
            outputs = take_cohort_result(self.roster, cohort, result, tokens, now)
            if self.roster.some_ended:
                self._dissolve()
        return [*self.take_rejected(), *outputs] if self._rejected else outputs

    def force_tokens(self, runs: Mapping[int, Seq[int]]) -> None:
        """What samples of the one step in flight are bound to be, each with the tokens that must follow: all of them
        are known now."""
        (step,) = self.in_flight
        settle_forced(self.roster, step, runs)
        for j, run in runs.items():
            self.roster.force_tokens(step.sampled[j], run)

    def fail(self, message: str | None, now: float) -> list[SequenceOutput]:
        """The oldest step failed: its sequences end with an error, all others start over (their rows may have missed
        edits). None: it was lost, and none ends; what is in the cache is then as little to be trusted."""
        self._dissolve()
        self.roster.now = now
        step = self.in_flight.popleft()
        self.roster.log.add("failed", -1, len(step.work))
        self.cache.fail(step.plan.step_id)
        if message is None:
            self.cache.forget_all(sequence.kv for sequence in self.roster)
        if self.cache.adapters is not None:
            self.cache.adapters.clear()
        outputs = self.take_rejected()
        if message is not None:
            outputs += take_failure(self.roster, step, message, now)
        self.roster.roll_back_all(through=self._next_step - 1)
        self.roster.retire(step.plan.step_id)
        return outputs
