"""One engine's life: a schedule's events happen to it, everything is looked at after each, and in the end everybody has ended.

What lives here: the life, what every output is held against, the trace that a replay must repeat byte by byte.
What may not: drawing (drawing.py), the invariants' own accounts (books.py, order.py, device.py).
"""

from __future__ import annotations

import hashlib
import traceback
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.simulation import oracle
from tests.support.simulation.books import Books
from tests.support.simulation.broken import Broken, hold
from tests.support.simulation.device import UNUSABLE, Device, Forecast, JumpingClock
from tests.support.simulation.masks import REFUSAL, HashMasks
from tests.support.simulation.oracle import Library, Line
from tests.support.simulation.order import OrderWatch
from tests.support.simulation.schedule import (
    TURN,
    Abort,
    Add,
    Asked,
    Delay,
    Disconnect,
    Event,
    Fail,
    Finish,
    Jump,
    Look,
    Rebuild,
    Schedule,
    Setting,
    Spoil,
    Turn,
)

from headrace.config import CacheConfig, SchedulerConfig
from headrace.engine.core import EngineCore
from headrace.request import Expectations, Finished, FinishReason, Request, SamplingParams, SequenceOutput, StepPlan, StructuredOutputs

GRAMMAR = StructuredOutputs(regex="[ab]+")  # stands for all: what it allows is the oracle's
HERE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Lived:
    """``seen``: how often things happened, so that a runner which tests nothing shows. ``trace``: a digest of all plans and outputs."""

    turns: int
    seen: Counter[str]
    trace: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, at which event (the number of events: while everybody was to end). ``kind`` stays the same while a schedule is shrunk."""

    kind: str
    message: str
    at: int
    trace: str

    def __str__(self) -> str:
        return f"{self.message} (at event {self.at})"


def live(schedule: Schedule, *, traced: bool = False) -> Lived | Failure:
    """A whole life."""
    life = Life(schedule.setting, traced=traced)
    happened = 0
    try:
        for event in schedule.events:
            life.happen(event)
            happened += 1
        life.end()
    except Exception as error:
        return Failure(_kind(error), f"{type(error).__name__}: {error}", happened, life.trace)
    return Lived(life.turns, life.seen, life.trace)


def _kind(error: Exception) -> str:
    """Of what the engine raised itself: which error, where."""
    if isinstance(error, Broken):
        return error.kind
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(HERE)]
    return f"{type(error).__name__} in {frames[-1].name if frames else '?'}"


@dataclass(slots=True)
class _Standing:
    """What is known of one request from outside."""

    number: int
    asked: Asked
    open: set[int]  # answers that have not ended
    entered: bool = False  # handed to the scheduler
    doomed: bool = False  # whoever asked has gone, and is told nothing more once the scheduler knows
    cut: dict[int, int] = field(default_factory=dict)  # answer → tokens that stay


class Life:
    """See the module."""

    def __init__(self, setting: Setting, *, traced: bool = False) -> None:
        self.setting = setting
        self.clock = JumpingClock(1e6)
        self.device = Device(setting, self.clock, self._rows_told)
        self.masks = HashMasks(self._grammar_of, self._arrived)
        self.core = self._create_core()
        self.limit = self.core.scheduler.max_sequence_tokens
        self.watch = OrderWatch(setting)
        self.books = Books(self.core.scheduler, self.device, settled=setting.settled)
        self.library = Library()
        self.standing: dict[int, _Standing] = {}
        self.lines: dict[tuple[int, int], Line] = {}
        self.scored: dict[int, int] = {}
        self.there: set[int] = set()  # requests that the scheduler must know
        self.wishes: list[_Standing] = []  # with aborts and stops that it may not have taken yet
        self.turns = 0
        self.began = 0.0  # the last turn, on the clock
        self.seen: Counter[str] = Counter()
        self._trace = hashlib.sha256() if traced else None

    @property
    def trace(self) -> str:
        return self._trace.hexdigest() if self._trace is not None else ""

    def _create_core(self) -> EngineCore:
        setting = self.setting
        return EngineCore(
            self.device,
            scheduler=SchedulerConfig(
                max_num_seqs=setting.rows,
                max_num_batched_tokens=setting.budget,
                max_logits_rows=setting.logits_rows,
                scheduling_policy=setting.policy,
                max_step_ms=setting.max_step_ms,
                tenant_weight=("a=2.5",) if setting.weighted else (),
                chunked_prefill=setting.chunked_prefill,
                continuous_batching=setting.continuous_batching,
            ),
            cache=CacheConfig(
                enable_prefix_caching=setting.prefix_caching, paged_allocation=setting.paged_allocation, kv_caching=setting.kv_caching
            ),
            eos_token_ids=frozenset({oracle.EOS}),
            clock=self.clock,
            depth=setting.depth,
            masks=self.masks,
            forecast=Forecast(setting) if setting.forecast else None,
        )

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
                for number in [number for number, standing in self.standing.items() if standing.asked.client == client]:
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
        self.check()

    def end(self) -> None:
        """No more events but turns, and what was still to fail: everybody ends, and nothing is left."""
        work = sum(len(each.asked.prompt) + each.asked.max_tokens * each.asked.n for each in self.standing.values() if each.open)
        for _ in range(400 + 20 * work):
            if not self.core.has_work:
                break
            self.happen(TURN)
        self._check_rest()

    def _add(self, number: int, asked: Asked) -> None:
        if number in self.standing:
            return
        made = _request(number, asked, self.clock.now() + asked.stamp)
        prompt = oracle.chain(asked.prompt)
        for index in range(asked.n):
            self.lines[number, index] = Line(asked, index, prompt, self.limit)
        self.standing[number] = _Standing(number, asked, set(range(asked.n)))
        self.library.add(self.lines[number, 0])
        self.core.add(made)
        if asked.compiles is None:
            self._arrived(made)

    def _arrived(self, request: Request) -> None:
        """It is the scheduler's from now on. Who is refused at once is in nobody's way."""
        standing = self.standing[request.request_id]
        standing.entered = True
        self.there.add(request.request_id)
        if not self._refusal(standing.asked):
            self.watch.arrived(request.request_id, standing.asked)

    def _refusal(self, asked: Asked) -> str:
        """A part of what it must be refused with; empty where it must not be."""
        if asked.refused:
            return REFUSAL
        if not 1 <= len(asked.prompt) < self.limit:
            return "the prompt has"
        return "n is" if asked.n > self.setting.rows else ""

    def _grammar_of(self, number: int) -> tuple[int, bool]:
        asked = self.standing[number].asked
        return asked.compiles or 0, asked.refused

    def _abort(self, number: int) -> None:
        self.core.abort(number)
        standing = self.standing.get(number)
        if standing is not None and standing.open:
            standing.doomed = True
            self.wishes.append(standing)
            self.watch.gone(number)
            self.seen["aborts"] += 1

    def _finish(self, event: Finish) -> None:
        """As the output processor says it: of an answer that is told of and has not ended, once."""
        standing, line = self.standing.get(event.number), self.lines.get((event.number, event.index))
        if standing is None or line is None or standing.doomed or event.index not in standing.open or event.index in standing.cut or not line.tokens:
            return
        keep = standing.cut[event.index] = min(event.keep, len(line.tokens))
        self.core.finish(event.number, event.index, keep)
        self.wishes.append(standing)
        self.seen["stops"] += 1

    def _rebuild(self) -> None:
        if not self.core.scheduler.in_flight:
            self.device.recover()
            self.core.scheduler.rebuild_rows()
            self.seen["rebuilds"] += 1

    def _look(self, number: int) -> None:
        state, stats = self.core.explain(number), self.core.stats()
        standing = self.standing.get(number)
        if state is not None and standing is not None and state.num_outputs and not standing.cut:
            told = [len(self.lines[number, index].tokens) for index in range(standing.asked.n)]
            hold(sum(state.num_outputs) <= sum(told), "look", f"request {number}: {state.num_outputs} outputs are said, {told} were told")
        hold(0 <= stats.num_used_blocks <= stats.num_blocks and stats.num_running >= 0 <= stats.num_waiting, "look", str(stats))

    # --- turns

    def _turn(self) -> None:
        """One turn of the loop. While something is there to do and nothing is in flight, it does something."""
        core, self.turns = self.core, self.turns + 1
        idle = core.has_work and not core.scheduler.in_flight and not self.masks.compiling
        self.device.collected = None
        steps, self.began = core.scheduler._next_step, self.clock.now()
        outputs = core.step()
        self.take_turn(outputs)
        if idle and core.has_work and not outputs and core.scheduler._next_step == steps and not core._events:
            raise Broken("asleep", f"there is work and nothing in flight, and a turn does nothing: {core.stats()}")

    def take_turn(self, outputs: Iterable[SequenceOutput]) -> None:
        """What a turn, or a part of it, has brought about."""
        self._settle_wishes()
        scheduler, failed = self.core.scheduler, self.device.collected is not None and self.device.result is None
        self.seen["cohort"] += scheduler._cohort is not None
        self.seen["failed"] += failed
        for output in outputs:
            self._take(output)
        self.watch.turned(scheduler, failed=failed)

    def _settle_wishes(self) -> None:
        """Aborts and stops are the scheduler's as soon as it has taken its events."""
        if self.core._events:
            return
        self.watch.met(self.began)
        for standing in self.wishes:
            for index in list(standing.open) if standing.doomed else standing.cut:
                self._ended(index, standing)
        self.wishes.clear()

    def _take(self, output: SequenceOutput) -> None:
        """One output: it is of an open answer, its tokens are the next ones, and it ends where it must."""
        key, standing = (output.request_id, output.index), self.standing[output.request_id]
        if self._trace is not None:
            self._trace.update(repr((key, output.token_ids, output.finished)).encode())
        if output.index not in standing.open:
            if standing.doomed and self._turned_away(key, output):
                return  # it came and went with one step; the refusal reaches nobody
            raise Broken("ended twice", f"{key} has ended, was cut or left, and gets {output}")
        line = self.lines[key]
        end = None
        for token in output.token_ids:
            wanted, end = line.expect()
            if token != wanted:
                raise Broken("answer", f"{key}: token {len(line.tokens)} is {token}, not {wanted}")
            line.take(token)
        if output.num_cached_tokens:
            self._check_hit(key, standing.asked, output.num_cached_tokens)
        if output.prompt_logprobs:
            self._check_scores(output, standing.asked)
        if len(output.logprobs) != (len(output.token_ids) if standing.asked.logprobs is not None else 0):
            raise Broken("answer", f"{key}: {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens")
        if output.finished is not None:
            self._check_end(key, output.finished, end)
            self._ended(key[1], standing)
        elif end is not None:
            raise Broken("answer", f"{key} goes on after its end {end}")

    def _turned_away(self, key: tuple[int, int], output: SequenceOutput) -> bool:
        refuses = self.watch.bound.refuses or self._refusal(self.standing[key[0]].asked)
        return bool(refuses) and output.finished is not None and output.finished.reason is FinishReason.ERROR and not self.lines[key].tokens

    def _ended(self, index: int, standing: _Standing) -> None:
        standing.open.discard(index)
        if not standing.open:
            self.there.discard(standing.number)
            self.watch.gone(standing.number)

    # --- what outputs are held against

    def _check_end(self, key: tuple[int, int], finished: Finished, end: oracle.End | None) -> None:
        found = (finished.reason, finished.message if finished.reason is FinishReason.ERROR else finished.stop_reason)
        self.seen[finished.reason.value] += 1
        self.seen["preemptions"] += finished.num_preemptions
        if finished.reason is FinishReason.ERROR:
            self._check_error(key, finished)
        elif found != end:
            raise Broken("answer", f"{key} ended with {found}, not {end}")
        elif self.standing[key[0]].asked.scored and key[1] == 0:
            hold(self.scored.get(key[0], 0) == len(self.standing[key[0]].asked.prompt) - 1, "scores", f"{key} ended, and not all of it was scored")

    def _check_error(self, key: tuple[int, int], finished: Finished) -> None:
        """Only by a cause that is known: a step that failed and computed it, an unusable row, a grammar's dead end, a refusal."""
        asked, message = self.standing[key[0]].asked, finished.message or ""
        plan, result = self.device.collected, self.device.result
        if message in (UNUSABLE, oracle.NOTHING_ALLOWED):
            hold(result is not None and message in result.errors.values(), "error", f"{key}: {message}, though the step has no such row")
            hold(message == UNUSABLE or self.lines[key].expect()[1] == (FinishReason.ERROR, message), "error", f"{key}: {message}, wrongly")
        elif self._refusal(asked):
            hold(self._refusal(asked) in message, "error", f"{key}: {message!r} instead of a refusal that says {self._refusal(asked)!r}")
        elif plan is not None and result is None and key[0] in self.device.fallen:
            self.seen["fell with a step"] += 1
        else:
            turned_away = self.watch.bound.refuses and not self.lines[key].tokens
            hold(turned_away, "error", f"{key} ended with {message!r}, and nothing has failed")
            self.seen["turned away"] += 1

    def _check_hit(self, key: tuple[int, int], asked: Asked, count: int) -> None:
        self.seen["hits"] += 1
        allowed = self.setting.prefix_caching and self.setting.kv_caching and not asked.scored
        if not allowed or count >= len(asked.prompt) or not self.library.holds(asked, count):
            raise Broken("prefix", f"{key}: {count} tokens of {len(asked.prompt)} are said to be cached")

    def _check_scores(self, output: SequenceOutput, asked: Asked) -> None:
        """Each position of the prompt but the first, once and in order."""
        known = self.scored.get(output.request_id, 0)
        told = [entry.token_ids[0] for entry in output.prompt_logprobs]
        self.scored[output.request_id] = known + len(told)
        if not asked.scored or output.index or tuple(told) != asked.prompt[known + 1 : known + 1 + len(told)]:
            raise Broken("scores", f"request {output.request_id}: positions {known} to {known + len(told)} are {told}")

    # --- what is looked at after every event

    def check(self) -> None:
        settled = not (self.core._events or self.core.scheduler._rejected)
        self.books.check(self.lines, self.there if settled else None)

    def _rows_told(self, plan: StepPlan) -> None:
        self.watch.met(self.clock.now())
        for new in plan.rows_added:
            self.watch.admitted(new.sequence_id)
        self.seen["copies"] += len(plan.copy_source)
        if self._trace is not None:
            for numbers in (plan.rows, plan.starts, plan.counts, plan.sample_rows, plan.table_row, plan.table_block, plan.copy_target):
                self._trace.update(numbers.tobytes())

    def _check_rest(self) -> None:
        """Nothing runs, nothing is held, everybody has ended once, and what was scored was scored whole."""
        core, stats = self.core, self.core.stats()
        hold(not core.has_work, "asleep", f"work is left and does not end: {stats}")
        left = (stats.num_running, stats.num_waiting, stats.num_used_blocks, core.scheduler.cache.num_leaving)
        hold(not any(left), "blocks", f"running, waiting, used blocks, leaving blocks are {left} at rest")
        hold(len(core.scheduler.roster.free_rows) == self.setting.rows, "rows", f"{core.scheduler.roster.free_rows} at rest")
        hold(not self.masks.followed or core.scheduler.requests.keys() >= self.masks.followed, "masks", f"{self.masks.followed} are still followed")
        lost = [number for number, standing in self.standing.items() if standing.open]
        hold(not lost, "requests", f"{lost} never ended")


def _request(number: int, asked: Asked, arrival: float) -> Request:
    params = SamplingParams(
        n=asked.n,
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        ignore_eos=asked.ignore_eos,
        stop_token_ids=asked.stops,
        logprobs=asked.logprobs,
        prompt_logprobs=1 if asked.scored else None,
        structured_outputs=GRAMMAR if asked.compiles is not None else None,
    )
    return Request(
        request_id=number,
        prompt_token_ids=array("i", asked.prompt),
        params=params,
        seed=asked.seed,
        priority=asked.priority,
        arrival_time=arrival,
        cache_salt=asked.salt,
        adapter=asked.adapter,
        tenant=asked.tenant,
        expects=Expectations(ttft=asked.ttft, tpot=asked.tpot, reading_speed=asked.reading_speed),
    )


def total(lives: Iterable[Lived]) -> Counter[str]:
    """How often things happened in all of them."""
    return sum((each.seen for each in lives), Counter())
