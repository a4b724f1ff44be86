"""One engine's life: a schedule's events happen to it, everything is looked at after each, and in the end everybody has
ended.

What lives here: the life, the trace that a replay must repeat byte by byte.
What may not: drawing (drawing.py), what must hold (answers.py, books.py, order.py, device.py).
"""

from __future__ import annotations

import hashlib
import json
import traceback
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

from headrace.config import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore, create_scheduler
from headrace.engine.keyed_hash import adapter_blocks
from headrace.errors import InvalidRequest
from headrace.request import (
    Expectations,
    Finished,
    FinishReason,
    RepetitionDetection,
    Request,
    SamplingParams,
    SequenceOutput,
    StepPlan,
    StructuredOutputs,
)
from tests.support.journal import Journal, replay
from tests.support.rows import rebuild_rows
from tests.support.simulation import oracle
from tests.support.simulation.answers import Answers
from tests.support.simulation.books import Books
from tests.support.simulation.broken import Broken, hold
from tests.support.simulation.desk import Operator, WatchedDesk
from tests.support.simulation.device import Device, Forecast, JumpingClock
from tests.support.simulation.houses import HouseLife
from tests.support.simulation.masks import HashMasks
from tests.support.simulation.order import OrderWatch
from tests.support.simulation.schedule import (
    TURN,
    Abort,
    Add,
    Asked,
    Damage,
    Delay,
    Disconnect,
    Event,
    Fail,
    Finish,
    Jump,
    Load,
    Look,
    Rebuild,
    Schedule,
    Setting,
    Spoil,
    Turn,
    Unload,
)

GRAMMAR = StructuredOutputs(regex="[ab]+")  # stands for all: what it allows is the oracle's
HERE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Lived:
    """``seen``: how often things happened, so that a runner which tests nothing shows. ``trace``: a digest of all plans
    and outputs."""

    turns: int
    seen: Counter[str]
    trace: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, at which event (the number of events: while everybody was to end). ``kind`` stays the same while a
    schedule is shrunk."""

    kind: str
    message: str
    at: int
    trace: str

    def __str__(self) -> str:
        return f"{self.message} (at event {self.at})"


def live(schedule: Schedule, *, traced: bool = False) -> Lived | Failure:
    """A whole life. A setting that no engine takes fails before its first event."""
    happened = 0
    life: Life | HouseLife | None = None
    try:
        life = (HouseLife if schedule.setting.replicas else Life)(schedule.setting, traced=traced)
        for event in schedule.events:
            life.happen(event)
            happened += 1
        life.end()
    except Exception as error:
        return Failure(
            _kind(error), f"{type(error).__name__}: {error}", happened, life.trace if life is not None else ""
        )
    return Lived(life.turns, life.seen, life.trace)


def _kind(error: Exception) -> str:
    """Of what the engine raised itself: which error, where."""
    if isinstance(error, Broken):
        return error.kind
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(HERE)]
    return f"{type(error).__name__} in {frames[-1].name if frames else '?'}"


class Life:
    """See the module."""

    def __init__(self, setting: Setting, *, traced: bool = False) -> None:
        self.setting = setting
        self.clock = JumpingClock(1e6)
        self.device = Device(setting, self.clock, self._rows_told)
        self.masks = HashMasks(self._grammar_of, self._arrived, adapted=setting.adapters > 0)
        self.forecast = Forecast(setting) if setting.forecast else None
        self.plans: list[StepPlan] = []  # where there is a journal
        self.watch = OrderWatch(setting)
        self.seen: Counter[str] = Counter()
        self.answers = Answers(setting, self.device, self.watch, self._limit_of, self.seen)
        self.operator: Operator | None = None  # where there are adapters
        self.core = self._create_core()
        self.journal = Journal.of(self.core.scheduler) if setting.journalled else None
        self.books = Books(self.core.scheduler, self.device, settled=setting.settled)
        self.turns = 0
        self.began = 0.0  # the last turn, on the clock
        self._trace = hashlib.sha256() if traced else None

    @property
    def trace(self) -> str:
        return self._trace.hexdigest() if self._trace is not None else ""

    def _limit_of(self, asked: Asked) -> int:
        """Beside its adapter, of which the engine need not know yet how large it is."""
        books, key = self.core.scheduler.cache.adapters, asked.adapter
        if books is None or key is None:
            return self.core.scheduler.roster.longest(key)
        with patch.dict(books._sizes, {key: adapter_blocks(key)}):
            return self.core.scheduler.roster.longest(key)

    def _create_core(self) -> EngineCore:
        core = EngineCore(
            self.device,
            scheduler=_scheduler_config(self.setting),
            cache=_cache_config(self.setting),
            eos_token_ids=frozenset({oracle.EOS}),
            namespace=b"",
            clock=self.clock,
            depth=self.setting.depth,
            masks=self.masks,
            forecast=self.forecast,
        )
        if core.scheduler.cache.adapters is not None:
            core.adapters = desk = WatchedDesk(self.setting, self.device, self.answers)
            self.operator = Operator(core, desk)
            for name in oracle.ADAPTERS:
                desk.register(name, name)
                if not self.setting.held:
                    desk.preload(name)
            while desk.busy:
                desk.take_ready(self.device.outcomes(), ())
        return core

    # --- events

    def happen(self, event: Event) -> None:
        """One event, and a look at everything."""
        match event:
            case Turn():
                self._turn()
            case Add(number, asked):
                self._add(number, asked)
            case Abort(number):
                self._abort(number)
            case Disconnect(client):
                for number in [
                    number for number, standing in self.answers.standing.items() if standing.asked.client == client
                ]:
                    self._abort(number)
            case Finish():
                self._finish(event)
            case Fail(written):
                self.device.fail_next = "after" if written else "before"
            case Spoil(sample):
                self.device.spoil_next = sample
            case Delay(seconds):
                self.device.delay_next += seconds
            case Jump(seconds):
                self.clock.jump(seconds)
            case Rebuild():
                self._rebuild()
            case Look(number):
                self._look(number)
            case Load(name, fresh) if self.operator is not None:
                self.operator.load(name, fresh=fresh)
            case Unload(name) if self.operator is not None:
                self.operator.unload(name)
            case Damage():
                self.device.damage_next = True
        self.check()

    def end(self) -> None:
        """No more events but turns, and what was still to fail: everybody ends, and nothing is left."""
        work = sum(
            len(each.asked.prompt) + each.asked.max_tokens * each.asked.n
            for each in self.answers.standing.values()
            if each.open
        )
        for _ in range(400 + 20 * work):
            if not self.core.has_work:
                break
            self.happen(TURN)
        self._check_rest()

    def _add(self, number: int, asked: Asked) -> None:
        if number not in self.answers.standing:
            made = _request(number, asked, self.clock.now() + asked.stamp)
            self.answers.ask(number, asked)
            try:
                self.core.add(made)
            except InvalidRequest as error:  # as the loop does: it did not come so far
                finished = Finished(FinishReason.ERROR, message=error.message)
                for index in range(asked.n):
                    self.answers.take(SequenceOutput(number, index, (), finished=finished))
            else:
                if asked.compiles is None and not self._waits_at_desk(asked):
                    self.answers.enter(number)

    def _waits_at_desk(self, asked: Asked) -> bool:
        return self.operator is not None and asked.adapter is not None

    def _arrived(self, request: Request) -> None:
        """Its grammar is there, or will not be."""
        asked = self.answers.standing[request.request_id].asked
        if asked.refused or not self._waits_at_desk(asked):
            self.answers.enter(request.request_id)

    def _grammar_of(self, number: int) -> tuple[int, bool]:
        asked = self.answers.standing[number].asked
        return asked.compiles or 0, asked.refused

    def _abort(self, number: int) -> None:
        self.core.abort(number)
        self.answers.leave(number)

    def _finish(self, event: Finish) -> None:
        """As the output processor says it."""
        keep = self.answers.try_cut(event.number, event.index, event.keep)
        if keep is not None:
            self.core.finish(event.number, event.index, keep)

    def _rebuild(self) -> None:
        if not self.core.scheduler.in_flight:
            self.device.lose_rows()
            rebuild_rows(self.core.scheduler)
            self.seen["rebuilds"] += 1

    def _look(self, number: int) -> None:
        """Who asks is told the truth: of each answer that is open, as many tokens as have come."""
        state, standing = self.core.explain(number), self.answers.standing.get(number)
        self.core.stats()
        if state is not None and standing is not None and not (standing.doomed or standing.cut):
            told = tuple(
                len(self.answers.lines[number, index].tokens)
                for index in sorted(standing.open)[: len(state.num_outputs)]
            )
            hold(
                state.num_outputs == told,
                "look",
                f"request {number}: {state.num_outputs} tokens are said, {told} were told",
            )
            self.seen["looks"] += 1

    # --- turns

    def _turn(self) -> None:
        """One turn of the loop. While something is there to do and nothing is in flight, it does something."""
        core, self.turns = self.core, self.turns + 1
        idle = core.has_work and not core.scheduler.in_flight and not self.masks.compiling
        desk = None if self.operator is None else self.operator.desk
        before = None if desk is None else (desk.progress, bool(core._events))
        self.device.collected = None
        steps, self.began = core.scheduler._next_step, self.clock.now()
        outputs = core.step()
        self.take_turn(outputs)
        if self.operator is not None:
            self.operator.turn()
            idle = idle and before == (self.operator.desk.progress, False) and not self.device.reading
        if idle and core.has_work and not outputs and core.scheduler._next_step == steps and not core._events:
            raise Broken("asleep", f"there is work and nothing in flight, and a turn does nothing: {core.stats()}")

    def take_turn(self, outputs: Iterable[SequenceOutput]) -> None:
        """What a turn, or a part of it, has brought about."""
        if not self.core._events:
            self.watch.met(self.began)
            self.answers.settle()
        scheduler, failed = self.core.scheduler, self.device.collected is not None and self.device.result is None
        if scheduler._cohort is not None:
            self.seen["cohort"] += 1
        if failed:
            self.seen["failed"] += 1
        for output in outputs:
            self._note(output)
            self.answers.take(output)
        self.watch.turned(scheduler, failed=failed)

    # --- what is looked at after every event

    def check(self) -> None:
        settled = not (self.core._events or self.core.scheduler._rejected)
        self.books.check(self.answers.lines, self.answers.there if settled else None)
        if self.operator is not None:
            self.operator.check(siblings[0].request for siblings in self.core.scheduler.requests.values())

    def _rows_told(self, plan: StepPlan) -> None:
        self.watch.met(self.clock.now())
        for new in plan.rows_added:
            self.watch.admitted(new.sequence_id)
        self.seen["drafts"] += sum(plan.drafts)
        self.seen["adapters"] += len(plan.adapters)
        if plan.copy_source:
            self.seen["copies"] += len(plan.copy_source)
        if self.journal is not None:
            self.plans.append(plan)
        if self._trace is not None:
            for numbers in (
                plan.rows,
                plan.starts,
                plan.counts,
                plan.drafts,
                plan.sample_rows,
                plan.table_row,
                plan.table_block,
                plan.copy_target,
            ):
                self._trace.update(numbers.tobytes())

    def _note(self, output: SequenceOutput) -> None:
        if self._trace is not None:
            self._trace.update(repr((output.request_id, output.index, output.token_ids, output.finished)).encode())

    def _check_rest(self) -> None:
        """Nothing runs, nothing is held, everybody has ended once, and what was scored was scored whole."""
        core, stats = self.core, self.core.stats()
        hold(not core.has_work, "asleep", f"work is left and does not end: {stats}")
        left = (stats.num_running, stats.num_waiting, stats.num_used_blocks, core.scheduler.cache.num_leaving)
        hold(not any(left), "blocks", f"running, waiting, used blocks, leaving blocks are {left} at rest")
        hold(
            len(core.scheduler.roster.free_rows) == self.setting.rows,
            "rows",
            f"{core.scheduler.roster.free_rows} at rest",
        )
        hold(
            not self.masks.followed or core.scheduler.requests.keys() >= self.masks.followed,
            "masks",
            f"{self.masks.followed} are still followed",
        )
        if self.operator is not None:
            hold(not self.operator.loop._asked, "adapters", "who loads one is not answered")
            self.seen["read adapters"] += self.operator.desk.num_loads
        lost = [number for number, standing in self.answers.standing.items() if standing.open]
        hold(not lost, "requests", f"{lost} never ended")
        if self.journal is not None:
            self._check_journal(self.journal)

    def _check_journal(self, journal: Journal) -> None:
        """A fresh scheduler that is told the same plans the same. Of rows that were lost it is not told."""
        if not self.seen["rebuilds"]:
            configs = _scheduler_config(self.setting), _cache_config(self.setting)
            fresh = create_scheduler(self.device, *configs, frozenset({oracle.EOS}), b"", self.forecast)
            replayed = [plan for plan in replay(journal, fresh) if plan is not None]
            hold(
                replayed == self.plans, "journal", f"{len(replayed)} plans are not the {len(self.plans)} that were made"
            )
            self.seen["journals"] += 1


def _scheduler_config(setting: Setting) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=setting.rows,
        max_num_batched_tokens=setting.budget,
        max_logits_rows=setting.logits_rows,
        scheduling_policy=setting.policy,
        max_step_ms=setting.max_step_ms,
        speculative_config=_speculative_config(setting),
        tenant_weight=("a=2.5",) if setting.weighted else (),
        chunked_prefill=setting.chunked_prefill,
        continuous_batching=setting.continuous_batching,
    )


def _speculative_config(setting: Setting) -> str | None:
    if not setting.drafts:
        return None
    return json.dumps({"method": "ngram", "num_speculative_tokens": "auto" if setting.automatic else setting.drafts})


def _cache_config(setting: Setting) -> CacheConfig:
    return CacheConfig(
        enable_prefix_caching=setting.prefix_caching,
        paged_allocation=setting.paged_allocation,
        kv_caching=setting.kv_caching,
    )


def _request(number: int, asked: Asked, arrival: float) -> Request:
    loops = oracle.LOOPS if asked.loops else None
    params = (asked.n, asked.max_tokens, asked.min_tokens, asked.ignore_eos, asked.stops, asked.logprobs)
    return Request(
        request_id=number,
        prompt_token_ids=array("i", asked.prompt),
        params=_params(*params, scored=asked.scored, follows=asked.compiles is not None, only=asked.only, loops=loops),
        seed=asked.seed,
        priority=asked.priority,
        arrival_time=arrival,
        cache_salt=asked.salt,
        adapter=asked.adapter,
        tenant=asked.tenant,
        expects=Expectations(ttft=asked.ttft, tpot=asked.tpot, reading_speed=asked.reading_speed),
    )


@lru_cache(maxsize=4096)
def _params(
    n: int,
    max_tokens: int,
    min_tokens: int,
    ignore_eos: bool,
    stops: tuple[int, ...],
    logprobs: int | None,
    *,
    scored: bool,
    follows: bool,
    only: int,
    loops: RepetitionDetection | None,
) -> SamplingParams:
    """Frozen, and checked once."""
    return SamplingParams(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stops,
        logprobs=logprobs,
        prompt_logprobs=1 if scored else None,
        structured_outputs=GRAMMAR if follows else None,
        allowed_token_ids=None if only < 0 else (only,),
        repetition_detection=loops,
    )
