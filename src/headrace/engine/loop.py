"""The engine process at work: the loop between its sockets and the core.

What lives here: the loop, what each command does, the pulse. What may not: the messages' schema (frames.py), sockets (links.py), the
process's start and end (process.py), text, HTTP.

The loop blocks on its sockets when there is nothing to do and looks at them once a turn when there is, so an idle engine costs nothing
and a command waits for at most one step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.engine import frames
from headrace.engine.accounts import RECENT, outlook, pace_of
from headrace.engine.executor import AdapterOutcome, Control, Executor, ExecutorInfo, Ticket
from headrace.engine.links import Left, Link, Links
from headrace.errors import HeadraceError, InvalidRequest
from headrace.observe.metrics import StepRecorder
from headrace.processes.messages import Answer, pack
from headrace.request import Finished, FinishReason, Request, SequenceOutput, StepPlan, StepResult, TokenMasks

if TYPE_CHECKING:
    from headrace.engine.assembly import Engine
    from headrace.lora.registry import AdapterDesk

log = logging.getLogger(__name__)

HOST_LIMIT = 5.0  # seconds: one turn of the loop outside the device
DEVICE_LIMIT = 30.0  # seconds: one call to the device, at least
DEVICE_FACTOR = 10.0  # times the predicted seconds, if that is more
_LONG_STEP_TOKENS = 256  # steps of fewer tokens are not worth a prediction, unless the device has just been slow
_SLOW_SECONDS = 1.0
RECENT_STEPS = 64  # the newest, that one answer tells of: a second may hold thousands


class Pulse:
    """What the loop is doing, and since when; written by the loop, read by the beating thread."""

    __slots__ = ("limit", "phase", "since", "turn")

    def __init__(self) -> None:
        self.turn = 0
        self.enter("load")

    def enter(self, phase: str, limit: float = 0.0) -> None:
        """``limit``: seconds after which the phase counts as a hang; 0 is none."""
        self.phase, self.since, self.limit = phase, time.perf_counter(), limit

    def beat(self) -> frames.Beat:
        return frames.Beat(self.turn, self.phase, time.perf_counter() - self.since, self.limit)


class StampedExecutor:
    """An executor whose calls are told apart from the host's own work: a long step is no hang, a long turn is one."""

    def __init__(self, inner: Executor, recorder: StepRecorder, pulse: Pulse, least: float) -> None:
        """``least``: seconds that every step takes, whatever the recorder predicts."""
        self._inner = inner
        self._recorder = recorder
        self._pulse = pulse
        self._least = least
        self._slow = False  # the last step took long: so may the next, however small
        self._limits: dict[int, float] = {}  # by step in flight, as the next
        self._submitted: dict[int, float] = {}
        self.info: ExecutorInfo = inner.info

    def submit(self, plan: StepPlan) -> Ticket:
        predicted = self._recorder.predict(plan) if self._slow or plan.num_tokens >= _LONG_STEP_TOKENS else 0.0
        self._limits[plan.step_id] = max(DEVICE_LIMIT, DEVICE_FACTOR * max(predicted, self._least))
        self._submitted[plan.step_id] = time.perf_counter()
        self._pulse.enter("device", sum(self._limits.values()))  # an inline executor computes here
        try:
            return self._inner.submit(plan)
        finally:
            self._pulse.enter("host", HOST_LIMIT)

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        self._pulse.enter("device", self._limits.get(ticket.step_id, DEVICE_LIMIT))
        try:
            self._inner.sample(ticket, masks)
        finally:
            self._pulse.enter("host", HOST_LIMIT)

    def collect(self, ticket: Ticket) -> StepResult:
        began = self._submitted.pop(ticket.step_id)
        self._pulse.enter("device", self._limits.pop(ticket.step_id))
        try:
            return self._inner.collect(ticket)
        finally:
            self._slow = time.perf_counter() - began > _SLOW_SECONDS
            self._pulse.enter("host", HOST_LIMIT)

    def recover(self) -> None:
        self._inner.recover()

    def prepare(self) -> bool:
        self._pulse.enter("device", DEVICE_LIMIT)
        return self._inner.prepare()

    def control(self, order: Control) -> None:
        self._inner.control(order)

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        return self._inner.outcomes(wait)

    def close(self) -> None:
        self._inner.close()


class EngineLoop:
    """Commands in, one frame a step and front end out, until the parent says so or is gone."""

    def __init__(self, engine: Engine, links: Links, pulse: Pulse) -> None:
        self._engine = engine
        self._core = engine.core
        self._links = links
        self._pulse = pulse
        self._handlers: dict[type, Callable[[Link, Any], None]] = {
            Request: self._add,
            frames.Abort: lambda _, command: self._abort(command.request_id),
            frames.Finish: self._finish,
            frames.AskStats: lambda link, command: _reply(link, command.number, self._stats()),
            frames.AskRecent: self._answer_recent,
            frames.AskRequests: self._answer_requests,
            frames.ForgetPrefixes: self._forget_prefixes,
            frames.AskAdapters: lambda link, command: _reply(link, command.number, {"names": self._desk.names}),
            frames.LoadAdapter: self._load_adapter,
            frames.UnloadAdapter: self._unload_adapter,
            frames.Attach: self._attach,
            frames.Shutdown: self._shut_down,
            Left: self._abort_all,
        }
        self._running = True
        self._loading: list[tuple[Link, int, str, str]] = []  # who waits for an adapter, with the question's number, its name and key
        self._forgetting: list[tuple[Link, int]] = []  # who waits for that, with the question's number

    def run(self) -> None:
        core, links, pulse = self._core, self._links, self._pulse
        while self._running:
            pulse.turn += 1
            if core.has_work or core.executor.prepare():
                said = links.poll()
            else:
                pulse.enter("idle")
                said = links.wait()
            pulse.enter("host", HOST_LIMIT)
            for link, command in said:
                self._handlers[type(command)](link, command)
            if self._loading:
                self._answer_loaded()
            if core.has_work and self._running:
                outputs = core.step()
                if self._forgetting and core.settled:
                    self._answer_forgotten()
                if outputs:
                    pulse.enter("send")  # a front end may be slow to read
                    for unwanted in links.send_step(core.accounts.settle(outputs)):
                        self._abort(unwanted)

    def _add(self, link: Link, request: Request) -> None:
        try:
            self._core.add(request)
            if request.explain:
                self._core.accounts.open(request)
        except InvalidRequest as error:  # the front's validator let it pass; its own request ends, nobody else's
            log.error("request refused by the core: %s", error)
            finished = Finished(FinishReason.ERROR, message=error.message)
            refused = [SequenceOutput(request.request_id, index, (), finished=finished) for index in range(request.params.n)]
            link.send(frames.pack_step(refused))

    def _abort(self, request_id: int) -> None:
        self._core.abort(request_id)
        self._core.accounts.close(request_id)

    def _abort_all(self, link: Link, command: Left) -> None:
        """What a front end leaves behind. A grammar that is being compiled for it is found out when its first token is nobody's."""
        left = [each for each in self._core.request_ids if each >> frames.SERIAL_SHIFT == link.serial]
        log.debug("front end %d has left; %d of its requests end", link.serial, len(left))
        for request_id in left:
            self._abort(request_id)

    def _attach(self, link: Link, command: frames.Attach) -> None:
        self._links.attach(command.serial, pack(frames.Started(self._engine.info)))

    def _finish(self, link: Link, command: frames.Finish) -> None:
        self._core.finish(command.request_id, command.index, command.num_tokens)
        self._core.accounts.end(command.request_id, command.index)

    def _stats(self) -> dict[str, Any]:
        return {**frames.plain(self._core.stats()), "steps": self._engine.recorder.summary()}

    def _answer_recent(self, link: Link, command: frames.AskRecent) -> None:
        records = self._engine.recorder.after(command.step, at_most=RECENT_STEPS)
        decisions = [tuple(entry) for entry in self._core.scheduler.log.after(command.decision)]
        _reply(link, command.number, {**self._stats(), "records": [frames.plain(each) for each in records], "decisions": decisions})

    def _answer_requests(self, link: Link, command: frames.AskRequests) -> None:
        core, pace = self._core, pace_of(self._engine.recorder.after(-1, at_most=RECENT), self._core.step_tokens)
        standing = core.standing()
        states = [standing.explain(request_id) for request_id in command.request_ids]
        accounts = [core.accounts.find(request_id) for request_id in command.request_ids]
        shown = [None if account is None else frames.plain(account) for account in accounts]
        _reply(link, command.number, {"requests": [None if state is None else outlook(state, pace) for state in states], "accounts": shown})

    def _forget_prefixes(self, link: Link, command: frames.ForgetPrefixes) -> None:
        self._core.forget_prefixes()
        self._forgetting.append((link, command.number))

    def _answer_forgotten(self) -> None:
        for link, number in self._forgetting:
            _reply(link, number, {})
        self._forgetting.clear()

    @property
    def _desk(self) -> AdapterDesk:
        """Raises InvalidRequest where there is none."""
        if self._core.adapters is None:
            raise InvalidRequest("This server serves no adapters; start it with --enable-lora.")
        return self._core.adapters

    def _load_adapter(self, link: Link, command: frames.LoadAdapter) -> None:
        try:
            self._desk.require(command.name, command.folder)
            self._loading.append((link, command.number, command.name, self._desk.preload(command.name)))
        except HeadraceError as error:
            _reply(link, command.number, {"error": error.message})

    def _answer_loaded(self) -> None:
        for each in self._loading[:]:
            link, number, name, key = each
            if (verdict := self._desk.verdict(key)) is None:
                continue
            self._loading.remove(each)
            if verdict:
                self._desk.forget(name, key)
            _reply(link, number, {"error": verdict} if verdict else {})

    def _unload_adapter(self, link: Link, command: frames.UnloadAdapter) -> None:
        try:
            self._desk.unregister(command.name)
            _reply(link, command.number, {})
        except HeadraceError as error:
            _reply(link, command.number, {"error": error.message})

    def _shut_down(self, link: Link, command: frames.Shutdown) -> None:
        self._running = False


def _reply(link: Link, number: int, stats: dict[str, Any]) -> None:
    link.send(pack(Answer(number, stats)))
