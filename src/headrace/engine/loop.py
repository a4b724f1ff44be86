"""The engine process at work: the loop between its sockets and the core.

What lives here: the loop, what each command does, the pulse; the sockets (one to the process that started it, one to
each further front end that process has named), whom a step's outputs go to, readers that fall behind, stop or leave.
What may not: the messages' schema (connection.py), the process's start and end (process.py), text, HTTP.

The loop blocks on its sockets when there is nothing to do and looks at them once a turn when there is, so an idle
engine costs nothing and a command waits for at most one step.

Readers that are behind are waited for, so an engine faster than its readers keeps their pace. One that takes nothing
for STALLED_SECONDS is waited for only where there is no other: the others' streams go on, and what it misses is kept,
up to MAX_OWED.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.engine import connection as frames
from headrace.engine.executor import AdapterOutcome, Control, Executor, ExecutorInfo, Sleep, Ticket, Wake
from headrace.errors import HeadraceError, InvalidRequest
from headrace.observe.metrics import StepRecorder
from headrace.processes.messages import BadFrame, Reply, Unpacker, pack
from headrace.request import Finished, FinishReason, Json, Request, SequenceOutput, StepPlan, StepResult, TokenMasks
from headrace.scheduler.explain import RECENT, pace_of, predicted_start

if TYPE_CHECKING:
    from headrace.disagg.hand_over import HandOver
    from headrace.engine.assembly import Engine
    from headrace.lora.registry import AdapterRegistry

# --- the sockets

READ_BYTES = 1 << 18
STALLED_SECONDS = 0.5
MAX_OWED = 64 * 2**20  # bytes that one front end may leave unread
_LOOK_SECONDS = 0.05

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class ParentGone(Exception):
    """The parent's socket has closed: nothing is wanted any more."""


@dataclass(frozen=True, slots=True)
class Left:
    """Not a message: this front end is gone, and nothing of it is wanted any more."""


class Link:
    """One socket. Sending is for both threads and never blocks, receiving is for the loop alone."""

    __slots__ = ("_lock", "_moved", "_owed", "_received", "_socket", "_unpacker", "gone", "serial")

    def __init__(self, sock: socket.socket, kinds: Any, serial: int = 0) -> None:
        sock.setblocking(False)
        self.serial = serial
        self.gone = False  # nothing can be sent any more
        self._socket = sock
        self._lock = threading.Lock()
        self._owed = bytearray()
        self._moved = 0.0  # when the reader last took something
        self._unpacker = Unpacker(kinds)
        # a fresh buffer a read would tear the heap: each is of another size
        self._received = memoryview(bytearray(READ_BYTES))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        with self._lock:
            if self._owed:
                self._owed += data
                self._flush()
            elif not self.gone:
                sent = self._write(data)
                if sent < len(data):
                    self._owed += memoryview(data)[sent:]
                    self._moved = time.perf_counter()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        sent = self._write(self._owed)
        if sent:
            del self._owed[:sent]
            self._moved = time.perf_counter()
        elif len(self._owed) > MAX_OWED:
            self.gone = True
        if self.gone:
            self._owed.clear()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.gone = True
            return 0

    @property
    def behind(self) -> bool:
        """Its reader has not taken everything."""
        return bool(self._owed)

    @property
    def stalled(self) -> bool:
        return time.perf_counter() - self._moved > STALLED_SECONDS

    def read(self) -> list[Any]:
        """The frames that have arrived. Raises BadFrame, and OSError at the end."""
        found: list[Any] = []
        while True:
            try:
                size = self._socket.recv_into(self._received)
            except BlockingIOError:
                return found
            if not size:
                raise ConnectionResetError
            found.extend(self._unpacker.feed(self._received[:size]))
            if size < READ_BYTES:
                return found

    def close(self) -> None:
        self.gone = True
        self._socket.close()


Said = list[tuple[Link, Any]]


def _about(frame: Any) -> int | None:
    """The request that it is about, where it is about one."""
    if isinstance(frame, (Request, frames.Abort, frames.Finish, frames.GoOn)):
        return frame.request_id
    if isinstance(frame, (frames.ComputePrompt, frames.AwaitPrompt)):
        return frame.request.request_id
    return frame.note.request_id if isinstance(frame, frames.HandOver) else None


class Links:
    """Everybody who is served. The parent's requests have serial 0."""

    def __init__(self, parent: Link, door: socket.socket) -> None:
        self.parent = parent
        self._door = door
        self._all: tuple[Link, ...] = (parent,)  # replaced, never changed: the pulse's thread goes through it, too

    # --- in

    def wait(self) -> Said:
        """What is said next; blocks until then."""
        while True:
            poll = select.poll()
            for link in self._all:
                poll.register(link, select.POLLIN | (select.POLLOUT if link.behind else 0))
            poll.poll()
            self._flush()
            said = self.poll()
            if said:
                return said

    def poll(self) -> Said:
        """What has been said. Raises ParentGone, and BadFrame where the parent makes no sense."""
        try:
            said = [(self.parent, frame) for frame in self.parent.read()]
        except OSError as error:
            raise ParentGone from error
        for link in self._all[1:]:
            said += self._hear(link)
        return said

    def _hear(self, link: Link) -> Said:
        """A front end that leaves or makes no sense costs the others nothing."""
        try:
            if link.gone:
                raise ConnectionResetError
            said = link.read()
            for frame in said:
                if (told := _about(frame)) is not None and told >> frames.SERIAL_SHIFT != link.serial:
                    raise BadFrame("a request of another's")
            return [(link, frame) for frame in said]
        except (OSError, BadFrame) as error:
            if isinstance(error, BadFrame):
                log.error("front end %d is cut off: %s", link.serial, error)
            self._all = tuple(each for each in self._all if each is not link)
            link.close()
            return [(link, Left())]

    # --- out

    def send_to(self, request_id: int, data: bytes) -> None:
        """To whoever has asked."""
        for link in self._all:
            if link.serial == request_id >> frames.SERIAL_SHIFT:
                link.send(data)

    def send(self, data: bytes) -> None:
        """To all."""
        for link in self._all:
            link.send(data)
        if self.parent.gone:
            raise ParentGone

    def send_step(self, outputs: Sequence[SequenceOutput]) -> Iterable[int]:
        """To each front end what it asked for, in one frame. Returns requests that no front end takes any more."""
        if len(self._all) == 1 and (not outputs or outputs[0].request_id < 1 << frames.SERIAL_SHIFT):
            self.parent.send(frames.pack_step(outputs))
            left: Iterable[int] = ()
        else:
            left = self._distribute(outputs)
        self._keep_pace()
        return left

    def _distribute(self, outputs: Sequence[SequenceOutput]) -> Iterable[int]:
        rows: dict[int, list[SequenceOutput]] = {}
        for out in outputs:
            serial = out.request_id >> frames.SERIAL_SHIFT
            if serial in rows:
                rows[serial].append(out)
            else:
                rows[serial] = [out]
        for link in self._all:
            if link.serial in rows:
                link.send(frames.pack_step(rows.pop(link.serial)))
        return {out.request_id for nobodys in rows.values() for out in nobodys}

    def _keep_pace(self) -> None:
        """Waits for the readers that are behind and still read."""
        while behind := [link for link in self._all if link.behind]:
            waited_for = [link for link in behind if len(self._all) == 1 or not link.stalled]
            if not waited_for:
                return
            poll = select.poll()
            for link in waited_for:
                poll.register(link, select.POLLOUT)
            poll.poll(_LOOK_SECONDS * 1000)
            self._flush()
        if self.parent.gone:
            raise ParentGone

    def _flush(self) -> None:
        for link in self._all:
            if link.behind:
                link.flush()

    def finish(self, seconds: float) -> None:
        """Before the process ends: what has been said is read, or so long is waited for that."""
        deadline = time.perf_counter() + seconds
        while any(link.behind for link in self._all) and time.perf_counter() < deadline:
            time.sleep(0.01)
            self._flush()

    # --- who

    def attach(self, serial: int, greeting: bytes) -> None:
        """One more front end, whose socket the parent has put at the door."""
        _, fds, _, _ = socket.recv_fds(self._door, 1, 1)
        if not fds:  # the kernel drops what this process has no descriptor for; the front end sees its end closed
            log.error("front end %d cannot be served: all file descriptors are in use", serial)
            return
        link = Link(socket.socket(fileno=fds[0]), frames.GuestCommand, serial)
        link.send(greeting)
        self._all = (*self._all, link)


# --- the loop

HOST_LIMIT = 5.0  # seconds: one turn of the loop outside the device
DEVICE_LIMIT = 30.0  # seconds: one call to the device, at least
DEVICE_FACTOR = 10.0  # times the predicted seconds, if that is more
_LONG_STEP_TOKENS = 256  # steps of fewer tokens are not worth a prediction, unless the device has just been slow
_SLOW_SECONDS = 1.0
RECENT_STEPS = 64  # the newest, that one answer tells of: a second may hold thousands


class LoopState:
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

    def __init__(self, inner: Executor, recorder: StepRecorder, state: LoopState, least: float) -> None:
        """``least``: seconds that every step takes, whatever the recorder predicts."""
        self._inner = inner
        self._recorder = recorder
        self._state = state
        self._least = least
        self._slow = False  # the last step took long: so may the next, however small
        self._limits: dict[int, float] = {}  # by step in flight, as the next
        self._submitted: dict[int, float] = {}
        self.info: ExecutorInfo = inner.info

    def submit(self, plan: StepPlan) -> Ticket:
        predicted = self._recorder.predict(plan) if self._slow or plan.num_tokens >= _LONG_STEP_TOKENS else 0.0
        self._limits[plan.step_id] = max(DEVICE_LIMIT, DEVICE_FACTOR * max(predicted, self._least))
        self._submitted[plan.step_id] = time.perf_counter()
        # an inline executor computes here
        return self._on_device(sum(self._limits.values()), self._inner.submit, plan)

    def _on_device(self, limit: float, call: Callable[..., Result], *given: Any) -> Result:
        self._state.enter("device", limit)
        try:
            return call(*given)
        finally:
            self._state.enter("host", HOST_LIMIT)

    def drafts(self, ticket: Ticket) -> Sequence[Sequence[int]]:
        return self._on_device(self._limits.get(ticket.step_id, DEVICE_LIMIT), self._inner.drafts, ticket)

    def sample(self, ticket: Ticket, masks: TokenMasks) -> None:
        self._on_device(self._limits.get(ticket.step_id, DEVICE_LIMIT), self._inner.sample, ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        began = self._submitted.pop(ticket.step_id)
        try:
            return self._on_device(self._limits.pop(ticket.step_id), self._inner.collect, ticket)
        finally:
            self._slow = time.perf_counter() - began > _SLOW_SECONDS

    def recover(self) -> None:
        self._inner.recover()

    def prepare(self) -> bool:
        self._state.enter("device", DEVICE_LIMIT)
        return self._inner.prepare()

    def control(self, order: Control) -> None:
        if isinstance(order, Sleep | Wake):
            self._state.enter("load")
        try:
            self._inner.control(order)
        finally:
            self._state.enter("host", HOST_LIMIT)

    def outcomes(self, wait: float = 0.0) -> list[AdapterOutcome]:
        return self._inner.outcomes(wait)

    def close(self) -> None:
        self._inner.close()


class EngineLoop:
    """Commands in, one frame a step and front end out, until the parent says so or is gone."""

    def __init__(self, engine: Engine, links: Links, state: LoopState) -> None:
        self._engine = engine
        self._core = engine.core
        self._links = links
        self._state = state
        self._handlers: dict[type, Callable[[Link, Any], None]] = {
            Request: self._add,
            frames.Abort: lambda _, command: self._abort(command.request_id),
            frames.Finish: self._finish,
            frames.AskStats: lambda link, command: _reply(link, command.number, self._stats()),
            frames.AskRecent: self._answer_recent,
            frames.AskRequests: self._answer_requests,
            frames.ForgetPrefixes: self._forget_prefixes,
            frames.AskAdapters: lambda link, command: _reply(link, command.number, {"names": self._registry.names}),
            frames.LoadAdapter: self._load_adapter,
            frames.UnloadAdapter: self._unload_adapter,
            frames.Sleep: self._sleep,
            frames.Wake: self._wake,
            frames.Attach: self._attach,
            frames.Shutdown: self._shut_down,
            Left: self._abort_all,
        }
        if (hand_over := self._core.hand_over) is not None:
            self._handlers |= {
                frames.ComputePrompt: lambda _, command: hand_over.give(command.request),
                frames.AwaitPrompt: lambda _, command: self._expect(hand_over, command.request),
                frames.GoOn: lambda _, command: hand_over.go_on(command.request_id),
                frames.HandOver: lambda _, command: hand_over.hear(command.note),
            }
        self._running = True
        # who waits for an answer, with the question's number and what gives the answer once there is one
        self._asked: list[tuple[Link, int, Callable[[], Json | None]]] = []

    def run(self) -> None:
        core, links, state = self._core, self._links, self._state
        while self._running:
            state.turn += 1
            if core.has_work or core.executor.prepare():
                said = links.poll()
            else:
                state.enter("idle")
                said = links.wait()
            state.enter("host", HOST_LIMIT)
            for link, command in said:
                self._handlers[type(command)](link, command)
            if core.has_work and self._running:
                outputs = core.step()
                if outputs:
                    state.enter("send")  # a front end may be slow to read
                    for unwanted in links.send_step(core.accounts.settle(outputs)):
                        self._abort(unwanted)
            if self._asked:
                self._answer()
            if core.hand_over is not None:
                for note in core.hand_over.take_notes():
                    links.send_to(note.request_id, frames.pack_note(note))

    def _answer(self) -> None:
        """Those who wait, as far as there is an answer."""
        asked, self._asked = self._asked, []
        for link, number, find in asked:
            if (found := find()) is None:
                self._asked.append((link, number, find))
            else:
                _reply(link, number, found)

    def _add(self, link: Link, request: Request) -> None:
        hand_over = self._core.hand_over
        try:
            if hand_over is None or not hand_over.joins(request):
                self._core.add(request)
            if request.explain:
                self._core.accounts.open(request)
        except InvalidRequest as error:  # unknown to the front's validator, or gone since; its own request ends alone
            log.warning("request refused by the core: %s", error)
            finished = Finished(FinishReason.ERROR, message=error.message, param=error.param)
            refused = [
                SequenceOutput(request.request_id, index, (), finished=finished) for index in range(request.params.n)
            ]
            link.send(frames.pack_step(refused))

    def _expect(self, hand_over: HandOver, request: Request) -> None:
        hand_over.expect(request)
        if request.explain:
            self._core.accounts.open(request)

    def _abort(self, request_id: int) -> None:
        self._core.abort(request_id)
        self._core.accounts.close(request_id)

    def _abort_all(self, link: Link, command: Left) -> None:
        """What a front end leaves behind. A grammar that is being compiled for it is found out when its first token is
        dropped."""
        left = [each for each in self._core.request_ids if each >> frames.SERIAL_SHIFT == link.serial]
        log.debug("front end %d has left; %d of its requests end", link.serial, len(left))
        for request_id in left:
            self._abort(request_id)

    def _attach(self, link: Link, command: frames.Attach) -> None:
        greeting = pack(frames.Started(self._engine.info)) + pack(frames.Asleep(self._core.sleep_target))
        self._links.attach(command.serial, greeting)

    def _finish(self, link: Link, command: frames.Finish) -> None:
        self._core.finish(command.request_id, command.index, command.num_tokens)
        self._core.accounts.end(command.request_id, command.index)

    def _stats(self) -> Json:
        return {**frames.plain(self._core.stats()), "steps": self._engine.recorder.summary()}

    def _answer_recent(self, link: Link, command: frames.AskRecent) -> None:
        records = self._engine.recorder.after(command.step, at_most=RECENT_STEPS)
        decisions = [tuple(entry) for entry in self._core.scheduler.log.after(command.decision)]
        told = {"records": [frames.plain(each) for each in records], "decisions": decisions}
        _reply(link, command.number, {**self._stats(), **told})

    def _answer_requests(self, link: Link, command: frames.AskRequests) -> None:
        core, pace = self._core, pace_of(self._engine.recorder.after(-1, at_most=RECENT), self._core.step_tokens)
        snapshot = core.snapshot()
        states = [snapshot.explain(request_id) for request_id in command.request_ids]
        accounts = [core.accounts.find(request_id) for request_id in command.request_ids]
        shown = [None if account is None else frames.plain(account) for account in accounts]
        starts = [None if state is None else predicted_start(state, pace) for state in states]
        _reply(link, command.number, {"requests": starts, "accounts": shown})

    def _forget_prefixes(self, link: Link, command: frames.ForgetPrefixes) -> None:
        self._core.forget_prefixes()
        self._asked.append((link, command.number, lambda: {} if self._core.settled else None))

    @property
    def _registry(self) -> AdapterRegistry:
        """Raises InvalidRequest where there is none."""
        if self._core.adapters is None:
            raise InvalidRequest("This server serves no adapters; start it with --enable-lora.")
        return self._core.adapters

    def _load_adapter(self, link: Link, command: frames.LoadAdapter) -> None:
        try:
            if self._core.sleep_target:
                raise InvalidRequest("The model sleeps; wake it first (POST /wake_up).")
            self._registry.load(command.name, command.folder, command.in_place)
            key = self._registry.preload(command.name)
            self._asked.append((link, command.number, lambda: self._loaded(key)))
        except HeadraceError as error:
            _reply(link, command.number, {"error": error.message})

    def _loaded(self, key: str) -> Json | None:
        verdict = self._registry.verdict(key)
        if verdict:
            self._registry.forget(key)
        return {"error": verdict} if verdict else None if verdict is None else {}

    def _unload_adapter(self, link: Link, command: frames.UnloadAdapter) -> None:
        _reply(link, command.number, _error_of(lambda: self._registry.unregister(command.name)))

    def _sleep(self, link: Link, command: frames.Sleep) -> None:
        self._core.sleep(command.level)
        self._asked.append((link, command.number, self._fallen_asleep))
        self._tell_sleep_target()

    def _tell_sleep_target(self) -> None:
        self._links.send(pack(frames.Asleep(self._core.sleep_target)))

    def _fallen_asleep(self) -> Json | None:
        if self._core.falls_asleep:
            return None
        self._tell_sleep_target()
        return _error_of(self._core.check_asleep)

    def _wake(self, link: Link, command: frames.Wake) -> None:
        answer = _error_of(self._core.wake)
        self._tell_sleep_target()
        _reply(link, command.number, answer)

    def _shut_down(self, link: Link, command: frames.Shutdown) -> None:
        self._running = False


def _reply(link: Link, number: int, stats: Json) -> None:
    link.send(pack(Reply(number, stats)))


def _error_of(work: Callable[[], object]) -> Json:
    """The answer to who asked for it."""
    try:
        work()
    except HeadraceError as error:
        return {"error": error.message}
    return {}
