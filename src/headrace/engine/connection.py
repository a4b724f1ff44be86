"""What the engine's process (process.py) and its front ends say to each other, and a front end's end of the socket.

Start: the process's standard input is a socket to its parent, whose first message is a Launch; it loads, and answers
Started or StartFailed. From then on commands come one way, one Step a step goes the other. Further front ends join by
an Attach of the parent, which hands over a socket to each; a step's outputs go to whoever asked for them, one Step
each. A request's id says who that is. No socket has a name: no other process can connect.

What lives here: the schema of the messages, how steps are packed into them, launch, the engine's health and end. What
may not: the process's loop (loop.py), requests' lives (client.py), text, torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from headrace import errors
from headrace.config import EngineConfig
from headrace.disagg.notes import Note, Sent, Taken, Want
from headrace.engine.info import EngineInfo
from headrace.errors import EngineDead, HeadraceError
from headrace.processes.child import Begun, begin
from headrace.processes.messages import BadFrame, Channel, Frame, Question, Reply, pack
from headrace.request import Json, Request, SequenceOutput, Singles, TokenOutputs, column_of

MAX_ASKED = 64  # requests that one question may be about
SERIAL_SHIFT = 40  # a request's id: which front end's (the parent's is 0), then its own count


class Launch(Frame):
    """``door``: the inherited socket over which the parent hands further ones. ``replica``: which of several.
    ``staging``: the inherited file through which they hand over prompts; -1: they do not."""

    config: EngineConfig
    door: int
    replica: int = 0
    staging: int = -1


class Started(Frame):
    info: EngineInfo


class StartFailed(Frame):
    """``kind`` is the class name of a HeadraceError, or "" for a defect of ours."""

    kind: str
    message: str


class Beat(Frame):
    """The loop's stamps: ``phase`` is "load", "idle", "host", "send" or "device"; how long it has lasted at turn
    ``turn``; and how long is too long (0: no limit)."""

    turn: int
    phase: str
    seconds: float
    limit: float


class Asleep(Frame):
    """Requests that come from now on wait until the engine is awake, or they do so no more: ``level`` 0."""

    level: int


class Died(Frame):
    message: str


class Step(Frame):
    """What a step brought: one token for each of many sequences in columns (int64 request ids, the rest int32, as raw
    bytes), then ``rows``.

    ``indexes`` is empty when all are 0: the usual step is two columns.
    """

    request_ids: bytes = b""
    indexes: bytes = b""
    token_ids: bytes = b""
    rows: tuple[SequenceOutput, ...] = ()


class Abort(Frame):
    request_id: int


class Finish(Frame):
    request_id: int
    index: int
    num_tokens: int


class ComputePrompt(Frame):
    """For another replica, which answers it."""

    request: Request


class AwaitPrompt(Frame):
    """To be answered once another replica has computed its prompt."""

    request: Request


class GoOn(Frame):
    """No more of this request's prompt comes from elsewhere."""

    request_id: int


class HandOver(Frame):
    """From one replica to another, by way of the front end that has asked. One of these."""

    want: Want | None = None
    sent: Sent | None = None
    taken: Taken | None = None

    @property
    def note(self) -> Note:
        note = self.want or self.sent or self.taken
        if note is None:
            raise BadFrame("a note that says nothing")
        return note


def pack_note(note: Note) -> bytes:
    field: Json = {type(note).__name__.lower(): note}
    return pack(HandOver(**field))


class AskStats(Question):
    """The engine's gauges and counters."""


class AskRecent(Question):
    """The same, and what happened since: steps and decisions with numbers above these."""

    step: int
    decision: int


class AskRequests(Question):
    """Where these requests stand (at most MAX_ASKED); the answer has "requests", None for those that are not there."""

    request_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_ASKED)]


class ForgetPrefixes(Question):
    """Requests that begin later reuse nothing computed so far; the answer comes once that is so."""


class AskAdapters(Question):
    """The answer has "names"."""


class LoadAdapter(Question):
    """The answer comes once it is in host memory; it has "error" where that cannot be. ``in_place``: whether a name that
    is known stands for this folder from now on, or is an error; None: the same folder is none."""

    name: str
    folder: str
    in_place: bool | None = None


class UnloadAdapter(Question):
    """Requests that have it go on. The answer has "error" for an unknown one."""

    name: str


class Sleep(Question):
    """The answer comes once those that run have ended and the device sleeps; it has "error" where that cannot be."""

    level: Literal[1, 2]


class Wake(Question):
    """The answer comes once it is awake; it has "error" where that cannot be."""


class Attach(Frame):
    """From the parent: the next socket at the door is another front end's; ``serial``, which none has had before,
    begins its requests' ids."""

    serial: Annotated[int, msgspec.Meta(gt=0, lt=1 << 22)]


class Shutdown(Frame):
    pass


GuestCommand = (  # what any front end may say
    Request
    | Abort
    | Finish
    | AskStats
    | AskRecent
    | AskRequests
    | ForgetPrefixes
    | AskAdapters
    | LoadAdapter
    | UnloadAdapter
    | Sleep
    | Wake
    | ComputePrompt
    | AwaitPrompt
    | GoOn
    | HandOver
)
Command = GuestCommand | Attach | Shutdown  # ... and what the parent may
Event = Started | StartFailed | Beat | Asleep | Died | Reply | Step | HandOver


def plain(record: Any) -> Json:
    """A dataclass as a dict, all the way down. (``asdict`` leaves a tuple for the interpreter to keep each time, up to
    2000 of each length.)"""
    found: Json = msgspec.to_builtins(record)
    return found


def pack_step(outputs: Sequence[SequenceOutput]) -> bytes:
    """One frame for everything a step produced."""
    if not isinstance(outputs, TokenOutputs):
        return pack(Step(rows=tuple(outputs)))
    indexes = array("i", outputs.indices).tobytes() if any(outputs.indices) else b""
    return pack(
        Step(array("q", outputs.request_ids).tobytes(), indexes, array("i", column_of(outputs.tokens)).tobytes())
    )


def unpack_step(frame: Step) -> Sequence[SequenceOutput]:
    """The rows of a step, in its order."""
    if not frame.request_ids:
        return frame.rows
    request_ids, tokens = _column("q", frame.request_ids), _column("i", frame.token_ids)
    return TokenOutputs(
        request_ids, _column("i", frame.indexes) if frame.indexes else bytes(len(tokens)), Singles(tokens)
    )


def _column(typecode: Literal["q", "i"], data: bytes) -> list[int]:
    return memoryview(data).cast(typecode).tolist()


_EXIT_SECONDS = 5.0  # between asking and killing
HANG_SECONDS = 5.0  # without a beat
WATCH_SECONDS = 0.2  # between looks at the engine
GONE_SECONDS = 20.0  # that one without progress gets to come back: clients know within 30 s of its last turn
LOAD_SILENCE = 60  # seconds without a beat; imports may hold the interpreter for some
START_ERRORS: dict[str, type[HeadraceError]] = {
    each.__name__: each for each in (errors.ModelError, errors.ConfigError, errors.OutOfMemory)
}

OnEvent = Callable[[Step], None]
OnNote = Callable[[Note], None]
OnDeath = Callable[[EngineDead, Collection[int] | None], None]  # of these requests, or of all


class EngineSocket:
    """A front end's end of the engine's socket. ``await started()``, then ``listen``, ``send`` and ``ask``."""

    def __init__(self) -> None:
        self._channel = Channel(Event, self._hear, self.lost)
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._on_event: OnEvent = lambda frame: None
        self.on_note: OnNote = lambda note: None
        self._on_death: OnDeath = lambda error, ids: None
        self._tasks: set[asyncio.Future[Json]] = set()
        self._farewell = ""  # what the engine said last about its own end
        self._closing = False
        self.death: EngineDead | None = None
        self.asleep = 0  # the level; 0: awake
        self.last_beat = Beat(0, "load", 0.0, 0.0)
        self.last_heard = time.perf_counter()
        self.send = self._channel.write  # dropped when the engine is gone (its death has been told)

    @property
    def info(self) -> EngineInfo:
        return self._info.result()

    @property
    def ailment(self) -> str | None:
        """Why the engine cannot be trusted to make progress, or None: dead, silent, or stuck in one turn of its
        loop."""
        if self.death is not None:
            return self.death.message
        silence = time.perf_counter() - self.last_heard
        return f"the engine has been silent for {silence:.0f} s" if silence > HANG_SECONDS else self._stuck()

    def _stuck(self) -> str | None:
        beat = self.last_beat
        return (
            f"the engine has been in one {beat.phase} phase for {beat.seconds:.0f} s"
            if beat.limit and beat.seconds > beat.limit
            else None
        )

    def listen(self, on_event: OnEvent, on_death: OnDeath) -> None:
        """``on_event`` gets each Step frame."""
        self._on_event, self._on_death = on_event, on_death
        if self.death is not None:
            on_death(self.death, None)

    def submit(self, request: Request) -> None:
        self.send(pack(request))

    def abort(self, request_id: int) -> None:
        self.send(pack(Abort(request_id)))

    def finish(self, request_id: int, index: int, num_tokens: int) -> None:
        self.send(pack(Finish(request_id, index, num_tokens)))

    @property
    def alive(self) -> bool:
        return self.ailment is None

    @property
    def dead(self) -> bool:
        return self.death is not None

    async def stats(self) -> Json:
        """Gauges and counters of the engine: ``EngineStats`` by field name, and "steps"
        (``StepRecorder.summary()``)."""
        return await self.ask(AskStats)

    async def recent(self, step: int, decision: int) -> Json:
        """``stats()`` with "records" (steps) and "decisions" (the scheduler's log) of higher numbers than these, the
        newest only."""
        return await self.ask(AskRecent, step, decision)

    async def ask(self, kind: type[Question], *about: Any) -> Json:
        """The answer to such a question. Raises EngineDead."""
        if self.death is not None:
            raise self.death
        found: Json = await self._channel.ask(kind, *about)
        return found

    def ask_later(self, kind: type[Question], *about: Any) -> None:
        """The same for who does not wait."""
        self._tasks.add(task := asyncio.ensure_future(self.ask(kind, *about)))
        task.add_done_callback(self._tasks.discard)

    def _hear(self, frame: Any) -> None:
        self.last_heard = time.perf_counter()
        if isinstance(frame, Step):
            self._on_event(frame)
        elif isinstance(frame, HandOver):
            self.on_note(frame.note)
        elif isinstance(frame, Beat):
            self.last_beat = frame
        elif isinstance(frame, Asleep):
            self.asleep = frame.level
        elif isinstance(frame, Died):
            self._farewell = frame.message
        elif isinstance(frame, Started):
            if not self._info.done():
                self._info.set_result(frame.info)
        elif isinstance(frame, StartFailed):
            self._fail_start(START_ERRORS.get(frame.kind, EngineDead)(frame.message))

    async def started(self) -> EngineInfo:
        """Waits until the engine can serve. Raises what kept it from that."""
        raise NotImplementedError

    def lost(self) -> None:
        """The socket is closed: whatever the engine still does is not heard here."""
        raise NotImplementedError

    async def close(self, timeout: float = _EXIT_SECONDS) -> None:
        """Nothing more is wanted of the engine. ``timeout``: seconds that a process which ends by that gets for it."""
        raise NotImplementedError

    def _die(self, how: str) -> None:
        cause = f": {self._farewell}" if self._farewell else ""
        self.death = EngineDead(f"the engine process {how}{cause}. Restart the server.")
        self._fail_start(self.death)
        self._channel.fail(self.death)
        self._on_death(self.death, None)

    def _fail_start(self, error: HeadraceError) -> None:
        if not self._info.done():
            self._info.set_exception(error)
            self._info.exception()  # it may not be waited for any more


class JoinedEngine(EngineSocket):
    """An engine that another process has launched and given the other end of this socket."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock

    async def started(self) -> EngineInfo:
        """However long that takes: who has launched the engine knows whether there is any hope."""
        await self._channel.open(self._sock)
        return await self._info

    def lost(self) -> None:
        if not self._closing:
            self._die("is gone")

    async def close(self, timeout: float = 0.0) -> None:
        self._closing = True
        self._channel.close(flush=True)


class EngineConnection(EngineSocket):
    """A launched engine process. ``await launch(config)`` makes one."""

    def __init__(self, begun: Begun) -> None:
        super().__init__()
        self._process = begun.child
        self._door = begun.door
        self._watch = asyncio.create_task(self._watch_process())

    @classmethod
    async def launch(
        cls, config: EngineConfig, replica: int = 0, staging: int = -1, begun: Begun | None = None
    ) -> EngineConnection:
        """Starts the process, unless it has ``begun``; it loads while the caller goes on. ``replica``, ``staging``: as
        Launch has them."""
        begun = begun or begin("headrace.engine.process", *((staging,) if staging >= 0 else ()))
        self = cls(begun)
        await self._channel.open(begun.sock)
        self._channel.send(Launch(config, begun.their_door, replica, staging))
        return self

    @property
    def own(self) -> list[EngineConnection]:
        """Of one or several (replicas.py)."""
        return [self]

    def attach(self, sock: socket.socket, serial: int) -> None:
        """Another front end is at the other end of ``sock``. One whose engine dies hears of it by that socket's end."""
        with sock, contextlib.suppress(OSError):
            socket.send_fds(self._door, [b"."], [sock.fileno()])
            self._channel.send(Attach(serial))

    async def started(self) -> EngineInfo:
        """Waits until the engine can serve, however long it loads, as long as it is heard. Raises what kept it from
        that."""
        silent, heard = 0, self.last_heard
        while silent < LOAD_SILENCE:  # looks, not seconds: a front end that was stopped itself has missed nothing
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._info), 1.0)
            silent, heard = (silent + 1 if heard == self.last_heard else 0), self.last_heard
            if (stuck := self._stuck()) is not None:
                raise EngineDead(
                    f"{stuck}: its first step does not end. Restart the server, and see `headrace doctor`."
                )
        raise EngineDead(f"the engine has been silent for {LOAD_SILENCE} s while it loads. Restart the server.")

    async def close(self, timeout: float = _EXIT_SECONDS) -> None:
        """Asks the process to end, kills it after ``timeout`` seconds. Nothing of it is left afterwards."""
        self._closing = True
        process = self._process
        if process.returncode is None:
            self._channel.send(Shutdown())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), timeout)
            if process.returncode is None:
                process.kill()
                await process.wait()
        await self._watch
        self._channel.close()
        self._door.close()

    def lost(self) -> None:
        if self._process.returncode is None and not self._closing:
            asyncio.get_running_loop().call_later(1.0, self.kill)

    async def _watch_process(self) -> None:
        code = await self._process.wait()
        await asyncio.sleep(0)  # what it said last is read first
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._die(
            how + (" (often: the machine ran out of memory)" if code == -signal.SIGKILL and not self._closing else "")
        )

    def kill(self) -> None:
        """Nothing more is expected of it."""
        if self._process.returncode is None:
            self._process.kill()


class Watched(Protocol):
    """An engine, several as one, or who asks them."""

    @property
    def dead(self) -> bool: ...

    @property
    def alive(self) -> bool: ...


async def watch_engine(engine: Watched, stop: asyncio.Event, look: Callable[[], None] = lambda: None) -> bool:
    """Until ``stop`` is set, True, or the engine has died or hangs, False. ``look`` is called again and again."""
    # seconds in which this process ran and the engine did not: one that was stopped, or frozen with it, has seen
    # nothing
    hung = 0.0
    while not engine.dead and hung < GONE_SECONDS:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), WATCH_SECONDS)
            return True
        look()
        hung = 0.0 if engine.alive else hung + WATCH_SECONDS
    return False
