"""The scheduler: a deterministic state machine that says, step by step, which sequences compute how many tokens.

A sequence has tokens, some of them computed; each step gives it some more to compute, within budgets:

    schedule(now, events) → StepPlan      decides; advances ``num_computed_tokens``; a sampled token is a placeholder until
    update(result, now)   → outputs       the result is collected, up to D steps later
    fail(message, now)    → outputs       the oldest step failed: its requests end, all others start over

It reads no clock: ``now`` is an input, so a journal of the calls replays exactly.

What lives here: the face of the control plane. What may not: its parts (planner.py, roster.py, results.py), blocks, torch, text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace.cache.manager import CacheManager
from headrace.config import SchedulerConfig
from headrace.request import FinishReason, Request, SequenceOutput, StepPlan, StepResult
from headrace.scheduler.events import AbortRequest, AddRequest, Event, RefuseRequest
from headrace.scheduler.limits import SchedulerCounters, SchedulerLimits
from headrace.scheduler.log import DecisionLog
from headrace.scheduler.plan_builder import PlanBuilder
from headrace.scheduler.planner import Planner
from headrace.scheduler.policies import create_policy
from headrace.scheduler.results import InFlight, take_failure, take_result
from headrace.scheduler.roster import Roster


class Scheduler:
    """See the module. ``eos_token_ids`` end a sequence unless its request ignores them."""

    def __init__(self, config: SchedulerConfig, limits: SchedulerLimits, cache: CacheManager, eos_token_ids: frozenset[int]) -> None:
        self.limits = limits
        self.cache = cache
        self.policy = create_policy(config.scheduling_policy)
        self.roster = Roster(cache, limits, eos_token_ids)
        self.in_flight: deque[InFlight] = deque()
        self._planner = Planner(config, limits, self.roster, cache, self.policy)
        self._next_step = 0
        self._num_requests = 0
        self._rows_lost = False
        self._rejected: list[SequenceOutput] = []

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

    @property
    def admits(self) -> bool:
        """Those who wait may start, as far as there is room."""
        return self._planner.admits

    @property
    def num_running(self) -> int:
        return sum(1 for _ in self.roster) - self.num_waiting

    @property
    def counters(self) -> SchedulerCounters:
        return SchedulerCounters(self._num_requests, self.roster.num_preemptions, self._planner.prefix_queries, self._planner.prefix_hits)

    @property
    def log(self) -> DecisionLog:
        return self.roster.log

    # --- planning

    def schedule(self, now: float, events: Iterable[Event] = ()) -> StepPlan | None:
        """The next step, or None when nothing can be computed now (nothing to do, or it waits for a result)."""
        self.roster.log.now = now
        for event in events:
            self._apply(event, now)
        self.roster.drop_ended()
        limits = self.limits
        plan = PlanBuilder(self._next_step, limits.max_num_batched_tokens, limits.max_logits_rows, padded=limits.padded)
        if self._rows_lost:
            self._planner.restore_rows(plan)
            self._rows_lost = False
        self._planner.fill(plan, now, idle=not self.in_flight)
        return None if plan.is_empty else self._submit(plan)

    def _submit(self, plan: PlanBuilder) -> StepPlan:
        built = plan.build(self.roster.dropped_rows)
        self.roster.dropped_rows = []
        self.roster.drop_ended()
        self._next_step += 1
        self.in_flight.append(InFlight(built, plan.work, plan.sampled))
        return built

    def rebuild_rows(self) -> None:
        """The workers' rows were lost: the next plan builds them all from this state. Nothing may be in flight."""
        assert not self.in_flight, "rows of a step in flight cannot be rebuilt: their last tokens are not known"
        self._rows_lost = True

    # --- events

    def _apply(self, event: Event, now: float) -> None:
        if isinstance(event, AddRequest):
            self._add(event.request, now)
            return
        if isinstance(event, RefuseRequest):
            self._add(event.request, now, refusal=event.message)
            return
        if isinstance(event, AbortRequest) and event.request_id in self.roster.requests:
            self.roster.log.add("aborted", event.request_id)
        for sequence in list(self.roster.requests.get(event.request_id, ())):
            if isinstance(event, AbortRequest):
                self.roster.end(sequence)
            elif sequence.index == event.index:
                del sequence.token_ids[sequence.num_prompt_tokens + event.num_tokens :]
                self.roster.end(sequence)

    def _add(self, request: Request, now: float, refusal: str | None = None) -> None:
        self._num_requests += 1
        sequence = self.roster.create(request, 0, self.policy.order(request, self._num_requests))
        refusal = refusal or self._refusal(request)
        if refusal is None:
            self.roster.enter(sequence)
            return
        self.roster.log.add("refused", request.request_id, len(request.prompt_token_ids))
        finished = sequence.finish_record(FinishReason.ERROR, now, message=refusal)
        self._rejected.extend(SequenceOutput(request.request_id, index, (), finished=finished) for index in range(request.params.n))

    def _refusal(self, request: Request) -> str | None:
        """Why a request can never run here; front ends check the same before they submit."""
        prompt = len(request.prompt_token_ids)
        if request.request_id in self.roster.requests:
            return f"request id {request.request_id} is in use"
        if not 1 <= prompt < self.max_sequence_tokens:
            return f"the prompt has {prompt} tokens; this engine takes 1 to {self.max_sequence_tokens - 1}"
        if request.params.n > self.limits.max_num_seqs:
            return f"n is {request.params.n}, but only {self.limits.max_num_seqs} sequences can run at once"
        return None

    def take_rejected(self) -> list[SequenceOutput]:
        """Refused requests, to be told to their clients."""
        rejected, self._rejected = self._rejected, []
        return rejected

    # --- results

    def update(self, result: StepResult, now: float) -> list[SequenceOutput]:
        """Takes the oldest step's result: appends tokens, ends what has ended, returns what is new."""
        step = self.in_flight.popleft()
        assert step.plan.step_id == result.step_id, "results must be collected in order"
        self.roster.retire(result.step_id)
        outputs = take_result(self.roster, step, result, now)
        return self.take_rejected() + outputs if self._rejected else outputs

    def fail(self, message: str, now: float) -> list[SequenceOutput]:
        """The oldest step failed: its sequences end with an error, all others start over (their rows may have missed edits)."""
        step = self.in_flight.popleft()
        self.roster.log.add("failed", -1, len(step.work))
        self.cache.fail(step.plan.step_id)
        outputs = self.take_rejected() + take_failure(self.roster, step, message, now)
        self.roster.roll_back_all(through=self._next_step - 1)
        self.roster.retire(step.plan.step_id)
        return outputs
