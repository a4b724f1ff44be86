"""The engine process's life: start, turn after turn, end.

What lives here: the loop between the sockets and the core, and its pulse. What may not: the frames' schema (process.py), sockets
(links.py), text, HTTP.

The loop blocks on its sockets when there is nothing to do and looks at them once a turn when there is, so an idle engine costs nothing
and a command waits for at most one step. A thread sends a Beat every second with the loop's stamps, also while a step runs;
it ends the process when the parent is gone.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.engine import process as frames
from headrace.engine.executor import Executor, ExecutorInfo, Ticket
from headrace.engine.links import Left, Link, Links, ParentGone, connect
from headrace.engine.outlook import RECENT, outlook, pace_of
from headrace.errors import HeadraceError, InvalidRequest, StepFailed
from headrace.garbage import empty_free_lists, freeze_start
from headrace.logs import configure_child
from headrace.metrics import StepRecorder
from headrace.portability import ignore_terminal
from headrace.process_tree import end_with_parent
from headrace.request import Finished, FinishReason, Request, SequenceOutput, StepPlan, StepResult, TokenMasks
from headrace.sampling_params import Expectations, SamplingParams

if TYPE_CHECKING:
    from headrace.engine.assembly import Engine

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
TIDY_BEATS = 60
HOST_LIMIT = 5.0  # seconds: one turn of the loop outside the device
DEVICE_LIMIT = 30.0  # seconds: one call to the device, at least
DEVICE_FACTOR = 10.0  # times the predicted seconds, if that is more
_LONG_STEP_TOKENS = 256  # steps of fewer tokens are not worth a prediction, unless the device has just been slow
_SLOW_SECONDS = 1.0
LAST_WORDS_SECONDS = 1.0  # for what was said last to be read
FIRST_STEP = -1  # the request that no client sent
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
            frames.Add: self._add,
            frames.Abort: lambda _, command: self._abort(command.request_id),
            frames.Finish: self._finish,
            frames.AskStats: lambda link, command: _reply(link, command.number, self._stats()),
            frames.AskRecent: self._answer_recent,
            frames.AskRequests: self._answer_requests,
            frames.ForgetPrefixes: self._forget_prefixes,
            frames.Attach: self._attach,
            frames.Shutdown: self._shut_down,
            Left: self._abort_all,
        }
        self._running = True
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
            if core.has_work and self._running:
                outputs = core.step()
                if self._forgetting and core.settled:
                    self._answer_forgotten()
                if outputs:
                    pulse.enter("send")  # a front end may be slow to read
                    for unwanted in links.send_step(core.accounts.settle(outputs)):
                        self._abort(unwanted)

    def _add(self, link: Link, command: frames.Add) -> None:
        try:
            request = frames.unpack_request(command)
            self._core.add(request)
            if request.explain:
                self._core.accounts.open(request)
        except InvalidRequest as error:  # the front's validator let it pass; its own request ends, nobody else's
            log.error("request refused by the core: %s", error)
            finished = Finished(FinishReason.ERROR, message=error.message)
            refused = [SequenceOutput(command.request_id, index, (), finished=finished) for index in range(command.params.n)]
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
        self._links.attach(command, frames.pack(frames.Started(self._engine.info)))

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

    def _shut_down(self, link: Link, command: frames.Shutdown) -> None:
        self._running = False


def _reply(link: Link, number: int, stats: dict[str, Any]) -> None:
    link.send(frames.pack(frames.StatsReply(number, stats)))


def beat_forever(links: Links, pulse: Pulse) -> None:
    """The pulse of the process, and its end when the parent is gone, whatever the loop is doing."""
    for beat in itertools.count(1):
        time.sleep(BEAT_SECONDS)
        if beat % TIDY_BEATS == 0:
            empty_free_lists()
        try:
            links.send(frames.pack(pulse.beat()))
        except ParentGone:
            os._exit(1)


def _read_launch() -> frames.Launch:
    found: list[frames.Launch] = list(frames.Unpacker(frames.Launch).feed(sys.stdin.buffer.read()))
    if len(found) != 1:
        raise ParentGone
    return found[0]


def _start(launch: frames.Launch, links: Links, pulse: Pulse) -> Engine | None:
    """The engine, or None after the parent has been told why not."""
    try:
        from headrace.engine.assembly import create_engine  # torch and all: after the socket, so that the pulse is heard meanwhile

        least = launch.config.device.device_time
        engine = create_engine(launch.config, wrap=lambda executor, recorder: StampedExecutor(executor, recorder, pulse, least), with_tokenizer=False)
        if not least:  # a device whose time is made up proves nothing by it
            take_first_step(engine)
        return engine
    except HeadraceError as error:
        links.send(frames.pack(frames.StartFailed(type(error).__name__, error.message)))
    except Exception as error:
        log.exception("the engine could not start")
        links.send(frames.pack(frames.StartFailed("", f"{type(error).__name__}: {error}")))
    return None


def take_first_step(engine: Engine) -> None:
    """One token of one request, all the way: an engine that says it can serve has done so. Raises StepFailed. Not counted among the steps."""
    core = engine.core
    core.observe(None)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    patient = Expectations(ttft=3600.0, tpot=3600.0)
    ids = array("i", (0,))
    core.add(Request(request_id=FIRST_STEP, prompt_token_ids=ids, params=params, arrival_time=core.clock.now(), expects=patient))
    ends = []
    while core.has_work:
        ends += [out.finished for out in core.step() if out.finished is not None]
    core.observe(engine.recorder if engine.trace is None else engine.trace)
    if [end.reason for end in ends] != [FinishReason.LENGTH]:
        raise StepFailed(f"the engine's first step failed: {ends[0].message if ends else 'it brought nothing'}. See `headrace doctor`.")


def _serve(engine: Engine, links: Links, pulse: Pulse) -> int:
    freeze_start()  # the model and the modules live as long as the process
    links.send(frames.pack(frames.Started(engine.info)))
    try:
        EngineLoop(engine, links, pulse).run()
    except (ParentGone, frames.BadFrame) as error:
        return 0 if isinstance(error, ParentGone) else 1
    except Exception as error:
        log.exception("the engine failed")
        links.send(frames.pack(frames.Died(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        engine.close()
    return 0


def main() -> None:
    """The process. Its parent decides when it ends: a Ctrl-C or SIGTERM meant for the group lets running requests drain."""
    ignore_terminal()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_child()
    logging.getLogger("headrace").setLevel(os.environ.get("HEADRACE_LOG_LEVEL", "info").upper())
    try:
        launch, pulse = _read_launch(), Pulse()
        links = connect(launch)
        end_with_parent()  # from here on nothing of ours is left behind
        threading.Thread(target=beat_forever, args=(links, pulse), daemon=True, name="pulse").start()
        engine = _start(launch, links, pulse)
        status = 1 if engine is None else _serve(engine, links, pulse)
        links.finish(LAST_WORDS_SECONDS)
        sys.exit(status)
    except ParentGone:
        sys.exit(1)
