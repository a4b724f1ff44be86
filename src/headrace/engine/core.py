"""The engine core: schedule → execute → update, the only loop.

It keeps a FIFO of at most ``depth`` + 1 submitted steps. Depth 0 is synchronous; at depth 1 step N+1 is scheduled and
submitted before step N is collected, so the device never waits for the host.

A step with rows that follow a grammar is two submissions: it is computed at once, and samples when the step before is
collected and its masks are made, while the device computes. Until then nothing else is submitted, so a step has only so
much time for masks: rows whose masks do not fit in are left out of it (scheduler/step_planner.py), and come the next.

What lives here: the loop and its bookkeeping. What may not: torch, policy, text, threads.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from headrace.cache.manager import CacheManager
from headrace.clock import Clock
from headrace.config import CacheConfig, SchedulerConfig
from headrace.cost.cost_model import StepSpeed
from headrace.engine.executor import Executor, Sleep, Ticket, Wake
from headrace.errors import EngineDead, HeadraceError, InvalidRequest, StepFailed, StepLost
from headrace.observe.metrics import StepAccounts, StepRecord, StepTimes
from headrace.request import (
    FinishReason,
    Request,
    SequenceOutput,
    SequenceStatus,
    StepPlan,
    StepResult,
    TokenMasks,
    adapter_name,
)
from headrace.scheduler.events import AbortRequest, AddRequest, Event, FinishSequence, ForgetPrefixes, RefuseRequest
from headrace.scheduler.explain import RequestsSnapshot, RequestState
from headrace.scheduler.limits import SchedulerCounters, SchedulerLimits
from headrace.scheduler.policies import Forecast
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.step_planner import NO_MASKS, Wait
from headrace.speculative.length import DraftCounts, Speculation
from headrace.speculative.settings import HEADS, read_settings

if TYPE_CHECKING:
    from headrace.disagg.hand_over import HandOver, HandOverCounts
    from headrace.engine.grammar_masks import GrammarMasks, GrammarStats
    from headrace.lora.registry import AdapterRegistry

DEFAULT_TOKEN_BUDGET = 2048
_COMPILE_WAIT = 0.005  # seconds that an idle turn waits for a grammar; commands wait as long


class StepObserver(Protocol):
    """Told of each step after it was collected and settled. ``result`` None: the step failed."""

    def on_step(self, plan: StepPlan, result: StepResult | None, times: StepTimes) -> StepRecord | None: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment's gauges, and counters since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    counters: SchedulerCounters
    num_prefilling: int = 0  # of those running: their prompt is not computed yet
    num_preempted: int = 0  # of those waiting: pushed out, to be computed again
    grammars: GrammarStats | None = None
    drafts: DraftCounts | None = None  # where some are made
    adapters: AdapterStats | None = None
    num_held: int = 0  # of those waiting: the engine sleeps, or is about to
    asleep: int = 0  # the level; 0: awake
    hand_over: HandOverCounts | None = None


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Counts of adapters; of sequences by adapter, those that run and those that wait."""

    slots: int
    registered: int
    held: int  # in host memory
    resident: int  # on the device
    loads: int  # from files so far
    brought: int  # into slots so far
    running: dict[str, int]
    waiting: dict[str, int]


@dataclass(slots=True)
class _Submitted:
    plan: StepPlan
    ticket: Ticket
    scheduled: float  # these three on the engine's clock: scheduling began, handed over, handed over completely
    submitted: float
    queued: float
    host_seconds: float
    continuous: bool
    waits: bool  # for its masks


class EngineCore:
    """One model's engine, without text and without transport. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        executor: Executor,
        *,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        eos_token_ids: frozenset[int],
        clock: Clock,
        namespace: bytes,
        depth: int = 0,
        observer: StepObserver | None = None,
        masks: GrammarMasks | None = None,
        adapters: AdapterRegistry | None = None,
        forecast: Forecast | None = None,
        speed: Callable[[], StepSpeed] | None = None,
    ) -> None:
        """``namespace`` names the model, its revision and the KV format: cached prefixes of another are others.
        ``adapters``: those it knows; None: a request's adapter is a part of its prefixes' name, and nothing else.
        ``speed``: how fast steps have been going, asked before each step where the scheduler heeds it."""
        self.executor = executor
        self.clock = clock
        self.depth = depth
        self.scheduler = create_scheduler(executor, scheduler, cache, eos_token_ids, namespace, forecast)
        self._speed = speed if self.scheduler.wants_speed else None
        self._observer = observer
        self._masks = masks
        self.adapters = adapters
        self.hand_over: HandOver | None = None  # where prompts are computed by other replicas than answers
        # a chunk would cost every row of its step as much
        self._fast_forward = scheduler.fast_forward and not executor.info.padded
        self._events: list[Event] = []
        self.accounts = StepAccounts()
        self._failed = False
        self._dead: EngineDead | None = None
        self.asleep = 0  # the level at which the device sleeps; 0: it is awake
        self.sleep_target = 0  # the level at which it shall: requests wait
        self._sleep_error = ""  # why it could not
        self._held: dict[int, Request] = {}  # that came since, by id
        self._snapshot: tuple[int, RequestsSnapshot] | None = None  # of this turn, with so many events
        self._fifo: deque[_Submitted] = deque()
        self._had_work = False  # when the last step was collected
        self._host_mark = 0.0  # CPU seconds of this thread, less what it lent to the device, at the last submission

    @property
    def has_work(self) -> bool:
        if self._dead is not None:
            return False
        if self.sleep_target:
            return self.falls_asleep or bool(self._events)
        return bool(self._events or self._fifo) or self.scheduler.has_work or self._prepares

    @property
    def _prepares(self) -> bool:
        """Whether something comes that requests wait for before they are entered."""
        return bool(self._masks and self._masks.compiling) or bool(self.adapters and self.adapters.busy)

    @property
    def request_ids(self) -> list[int]:
        """Of all requests that have not ended, but those whose grammars are being compiled."""
        apart = () if self.hand_over is None else self.hand_over.request_ids
        coming = (each.request_id for each in chain(self._unread, self._arriving))
        return [*self._held, *coming, *self.scheduler.requests, *apart]

    @property
    def _arriving(self) -> list[Request]:
        """With the next step."""
        return [event.request for event in self._events if isinstance(event, AddRequest)]

    def knows(self, request_id: int) -> bool:
        """Whether it has not ended."""
        events = (each.request.request_id for each in self._events if isinstance(each, AddRequest | RefuseRequest))
        unread = (each.request_id for each in self._unread)
        compiling = () if self._masks is None else self._masks.compiling
        return request_id in self.scheduler.requests or request_id in chain(events, unread, compiling)

    def adapter_key(self, request: Request) -> str | None:
        """By which the cache names what is computed with its adapter from now on."""
        name = request.adapter
        return name if name is None or self.adapters is None else self.adapters.key(name)

    @property
    def begins_in_order(self) -> bool:
        """Those who came first may be given to ``step`` before the others have come: the step does not depend on these,
        and goes on meanwhile."""
        return self.depth > 0 and self.scheduler.serves_by_arrival

    def batch_order(self, requests: Sequence[Request]) -> Sequence[Request]:
        """In which order requests that are all there at once are best added; for callers whose answers are not read
        before all have ended."""
        return self.scheduler.batch_order(requests)

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step."""
        return self.scheduler.limits.max_num_batched_tokens

    def observe(self, observer: StepObserver | None) -> None:
        """Tells this one of the steps from now on, instead of the one before; None: no observer."""
        self._observer = observer

    def add(self, request: Request) -> None:
        """Takes effect at the next step, like every event; with a grammar, once that is compiled; with an adapter, once
        that is read. Raises InvalidRequest where none can be."""
        if self.sleep_target:
            self._held[request.request_id] = request
        elif request.params.structured_outputs is None:
            self._enter(request)
        elif self._masks is None:
            raise InvalidRequest("this engine follows no grammars: it has no tokenizer.", param="structured_outputs")
        else:
            self._masks.begin(request)

    def _enter(self, request: Request) -> None:
        if request.adapter is None or self.adapters is None:
            self._events.append(AddRequest(request))
        else:
            self.adapters.begin(request)

    @property
    def _unread(self) -> tuple[Request, ...]:
        """Whose adapters are still to come."""
        return () if self.adapters is None else self.adapters.waiting

    def abort(self, request_id: int) -> None:
        """Ends a request without telling anybody; unknown ids are no error (it may just have ended)."""
        self._held.pop(request_id, None)
        self._events.append(AbortRequest(request_id))
        if self._masks is not None:
            self._masks.drop(request_id)
        if self.adapters is not None:
            self.adapters.drop(request_id)
        if self.hand_over is not None:
            self.hand_over.drop(request_id)

    def finish(self, request_id: int, index: int, num_tokens: int) -> None:
        """A stop string ends this answer after ``num_tokens`` output tokens; what is computed beyond is dropped."""
        self._events.append(FinishSequence(request_id, index, num_tokens))

    def forget_prefixes(self) -> None:
        """What was computed so far is reused by no request that begins later; those that run go on."""
        self._events.append(ForgetPrefixes())
        if self.hand_over is not None:
            self.hand_over.forget()

    @property
    def settled(self) -> bool:
        """Everything that was told so far has taken effect."""
        return not self._events

    # --- sleep

    def sleep(self, level: int) -> None:
        """Requests that come from now on wait until it is awake again. Those that came before go on, and once they have
        ended, a step puts the device to sleep: whoever has waited is served, however often it is woken and put to
        sleep. One that sleeps can sleep deeper, and not lighter."""
        self.sleep_target, self._sleep_error = max(level, self.sleep_target), ""

    @property
    def falls_asleep(self) -> bool:
        """It shall sleep, and does not yet."""
        return self.sleep_target > self.asleep

    def wake(self) -> None:
        """Raises what the device does, OutOfMemory above all; then it sleeps on."""
        if self.asleep:
            self.executor.control(Wake())
        self.asleep = self.sleep_target = 0
        self._release()

    def _release(self) -> None:
        """Those who waited come."""
        held, self._held = self._held, {}
        for request in held.values():
            self.enter(request)

    def check_asleep(self) -> None:
        """Raises HeadraceError where it is awake after all."""
        if not self.sleep_target:
            raise HeadraceError(self._sleep_error or "It was woken before it slept.")

    def _fall_asleep(self) -> None:
        """With nothing in flight. What was computed is gone."""
        level = self.sleep_target
        try:
            self.executor.control(Sleep(level))
        except HeadraceError as error:
            self.sleep_target, self._sleep_error = self.asleep, error.message
            if not self.sleep_target:
                self._release()
            return
        self.asleep = level
        self.scheduler.schedule(self.clock.now(), [ForgetPrefixes()])
        if self.scheduler.cache.adapters is not None:
            self.scheduler.cache.adapters.clear()
        if level > 1 and self.adapters is not None:
            self.adapters.forget_held()

    def step(self) -> Sequence[SequenceOutput]:
        """One turn: submit a step if the FIFO has room, collect the oldest if it is full or nothing could be submitted.
        Raises EngineDead once a turn has raised anything: it will not come back."""
        if self._dead is not None:
            raise self._dead
        try:
            outputs = self._step()
            if self.hand_over is not None:
                self.hand_over.turn()
            return outputs
        except BaseException as error:  # whatever interrupts a turn leaves it half done
            self._dead = error if isinstance(error, EngineDead) else EngineDead(f"a step was interrupted: {error!r}.")
            raise

    def _step(self) -> Sequence[SequenceOutput]:
        self._snapshot = None
        if self.falls_asleep and self._idle and not self._prepares:
            self._fall_asleep()
            return self.scheduler.take_rejected()
        if self._masks is not None:
            self._take_compiled(self._masks)
        if self.adapters is not None and self.adapters.busy and not self.asleep:
            self._take_adapted(self.adapters)
        open_step = bool(self._fifo) and self._fifo[-1].waits
        room = len(self._fifo) <= self.depth and not self._failed and not open_step
        submitted = room and self._submit_next()
        self._complete_oldest()
        if self._fifo and (not submitted or len(self._fifo) > self.depth):
            outputs = self._collect_oldest()
            self._complete_oldest()
            return outputs
        return self.scheduler.take_rejected()

    def _take_compiled(self, masks: GrammarMasks) -> None:
        """Requests whose grammars are ready begin; only where there is nothing else to do that is waited for, a
        little."""
        if masks.compiling:
            for event in masks.take_compiled(_COMPILE_WAIT if self._idle else 0.0):
                if isinstance(event, AddRequest):
                    self._enter_late(event.request, self._enter)
                else:
                    self._events.append(event)

    def enter(self, request: Request) -> None:
        """As ``add``, later: one that cannot be ends with an error."""
        self._enter_late(request, self.add)

    def _enter_late(self, request: Request, enter: Callable[[Request], None]) -> None:
        try:
            enter(request)
        except InvalidRequest as error:
            self._events.append(RefuseRequest(request, error.message, error.param))

    @property
    def _idle(self) -> bool:
        return not (self._events or self._fifo or self.scheduler.has_work)

    def _take_adapted(self, registry: AdapterRegistry) -> None:
        """Requests whose adapters have come begin; likewise."""
        live = (siblings[0].request for siblings in self.scheduler.requests.values())
        in_use = {each.adapter for each in chain(self._arriving, live) if each.adapter is not None}
        self._events += registry.take_ready(self.executor.outcomes(_COMPILE_WAIT if self._idle else 0.0), in_use)

    def _complete_oldest(self) -> None:
        """Gives the oldest step its masks, if it waits for them: every token before it is known."""
        if not self._fifo or not self._fifo[0].waits:
            return
        step, sampled = self._fifo[0], self.scheduler.in_flight[0].sampled
        masks = self._masks
        assert masks is not None
        masked = () if self._failed else step.plan.masked
        wanted = [(j, sampled[j]) for j in masked if sampled[j].status is not SequenceStatus.FINISHED]
        runs = masks.forced(wanted) if self._fast_forward else {}
        drafts = self.executor.drafts(step.ticket) if step.plan.drafts else ()
        paths = {j: drafts[j] for j, _ in wanted if drafts and j not in runs}  # what is forced needs no drafts
        self.executor.sample(step.ticket, masks.masks(wanted, paths) if wanted else TokenMasks())
        step.waits = False
        if runs:
            self.scheduler.force_tokens(runs)

    def _submit_next(self) -> bool:
        begin = self.clock.now()
        if not self._had_work:  # what happened while there was nothing to do is no step's
            self._host_mark = self.clock.thread_seconds()
        events, self._events = self._events, []
        speed = self._speed() if self._speed is not None else None
        mask_seconds = NO_MASKS if self._masks is None else self._masks.seconds
        plan = self.scheduler.schedule(begin, events, speed, mask_seconds)
        self._keep_grammars()
        if plan is None:
            return False
        submitted = self.clock.now()
        host, continuous = self._host_seconds(), self._had_work
        ticket = self.executor.submit(plan)
        self._fifo.append(
            _Submitted(plan, ticket, begin, submitted, self.clock.now(), host, continuous, bool(plan.masked))
        )
        self._had_work = True
        return True

    def _host_seconds(self) -> float:
        """CPU time of this thread since the last submission (never negative: callers may take turns on several
        threads)."""
        now = self.clock.thread_seconds()
        used, self._host_mark = now - self._host_mark, now
        return max(0.0, used)

    def _keep_grammars(self) -> None:
        """Of requests that have not ended; some that have been taken may not be in the roster yet."""
        if self._masks is not None and self._masks.seconds and not self._events:
            self._masks.keep({*self.scheduler.requests, *(each.request_id for each in self._unread)})

    def _collect_oldest(self) -> Sequence[SequenceOutput]:
        awaited = self.clock.now()
        step = self._fifo.popleft()
        result, error = None, None
        try:
            result = self.executor.collect(step.ticket)
        except StepFailed as failure:
            error = None if isinstance(failure, StepLost) else failure.message
        collected = self.clock.now()
        work = self.scheduler.in_flight[0].work if self.accounts else []
        outputs = self.scheduler.fail(error, collected) if result is None else self.scheduler.update(result, collected)
        if result is not None and result.errors and self._masks is not None:
            outputs = [_at_dead_end(output, self._masks) for output in outputs]
        self._settle(result is None)
        self._keep_grammars()
        self._host_mark += result.lent_seconds if result is not None else 0.0
        self._had_work = self.has_work
        record = None
        if self._observer is not None:
            at = (step.scheduled, step.submitted, step.queued, awaited, collected, self.clock.now())
            record = self._observer.on_step(
                step.plan, result, StepTimes(*at, step.host_seconds, step.continuous, len(self._fifo))
            )
        if work:
            self.accounts.count(work, record.fraction if record is not None else None)
        return outputs

    def _settle(self, failed: bool) -> None:
        """After a failure nothing is submitted until all steps in flight are collected and the executor has
        recovered."""
        self._failed = self._failed or failed
        if self._failed and not self._fifo:
            self.executor.recover()
            self._failed = False

    def explain(self, request_id: int) -> RequestState | None:
        """Where a request stands and what it waits for; None when it is not here (any more)."""
        return self.snapshot().explain(request_id)

    def snapshot(self) -> RequestsSnapshot:
        """Where all of them stand. Until the next turn, and while no request comes or goes, it is the same: many may ask
        about a long queue."""
        unread, apart = self._unread, () if self.hand_over is None else self.hand_over.waiting
        coming = len(self._events) + len(unread) + len(self._held) + len(apart)
        if self._snapshot is None or self._snapshot[0] != coming:
            waits = {each.request_id: Wait("adapter", 1, self.scheduler.limits.max_adapters) for each in unread}
            waits |= dict.fromkeys(self._held, Wait("asleep"))
            waits |= {each.request_id: Wait("prefill") for each in apart}
            queue = [*self._arriving, *unread, *self._held.values(), *apart]
            self._snapshot = coming, RequestsSnapshot(self.scheduler, queue, waits)
        return self._snapshot[1]

    def stats(self) -> EngineStats:
        cache, roster = self.scheduler.cache, self.scheduler.roster
        handed = None if self.hand_over is None else self.hand_over.counts
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + len(self._held) + (0 if handed is None else handed.waiting),
            hand_over=handed,
            num_held=len(self._held),
            asleep=self.asleep,
            num_blocks=cache.num_blocks,
            num_used_blocks=cache.num_used_blocks,
            num_cached_blocks=sum(pool.num_cached for pool in cache.pools),
            counters=self.scheduler.counters,
            grammars=None if self._masks is None else self._masks.stats,
            drafts=self.scheduler.speculation.counts if self.scheduler.speculation is not None else None,
            num_prefilling=sum(
                1 for sequence in roster.running if sequence.num_computed_tokens < sequence.num_prompt_tokens
            ),
            num_preempted=sum(1 for sequence in roster.waiting if sequence.num_preemptions),
            adapters=None if self.adapters is None else self._adapter_stats(self.adapters),
        )

    def _adapter_stats(self, registry: AdapterRegistry) -> AdapterStats:
        books, roster = self.scheduler.cache.adapters, self.scheduler.roster
        running = _by_adapter(each.request for each in roster.running)
        waiting = _by_adapter(chain((each.request for each in roster.waiting), registry.waiting))
        resident, brought = (0, 0) if books is None else (books.num_resident, books.num_brought)
        most, known = self.scheduler.limits.max_adapters, len(registry.names)
        return AdapterStats(most, known, registry.num_held, resident, registry.num_loads, brought, running, waiting)


def _by_adapter(requests: Iterable[Request]) -> dict[str, int]:
    return dict(Counter(adapter_name(each.adapter) for each in requests if each.adapter is not None))


def _at_dead_end(output: SequenceOutput, masks: GrammarMasks) -> SequenceOutput:
    """An answer that ended because its grammar allows nothing further says so: what was asked for is to blame, no
    step."""
    if output.finished is None or output.finished.reason is not FinishReason.ERROR:
        return output
    reason = masks.dead_end(output.request_id, output.index)
    if reason is None:
        return output
    return output._replace(finished=replace(output.finished, message=reason, param="structured_outputs"))


def create_scheduler(
    executor: Executor,
    config: SchedulerConfig,
    cache: CacheConfig,
    eos_token_ids: frozenset[int],
    namespace: bytes,
    forecast: Forecast | None = None,
) -> Scheduler:
    """The control plane that fits an executor: its rows, its blocks, its context length."""
    info = executor.info
    settings = read_settings(config.speculative_config) if info.max_drafts else None
    manager = CacheManager(
        info.kv_groups,
        prefix_caching=cache.enable_prefix_caching and cache.kv_caching,
        sliding=cache.kv_caching and cache.paged_allocation and not info.padded,
        lookahead=settings is not None and settings.method in HEADS,
        namespace=namespace,
        adapters=info.adapters,
    )
    limits = SchedulerLimits(
        max_model_len=info.max_model_len,
        max_num_seqs=min(config.max_num_seqs or info.max_num_seqs, info.max_num_seqs),
        max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET,
        max_logits_rows=config.logits_rows,
        grows=cache.paged_allocation,
        keeps_kv=cache.kv_caching,
        padded=info.padded,
        max_step_seconds=config.max_step_seconds,
        max_adapters=0 if info.adapters is None else info.adapters.most,
        pooling=info.pooling is not None,
        stages=info.stages,
        runs_ahead=info.runs_ahead,
    )
    speculation = None
    if settings is not None:
        speculation = Speculation(
            info.max_drafts, settings.fixed, settings.disable_by_batch_size, forecast, info.stages
        )
    return Scheduler(config, limits, manager, eos_token_ids, forecast, speculation)
