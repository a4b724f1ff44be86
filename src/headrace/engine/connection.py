"""Starting the engine process, and a front end's end of its socket.

What lives here: launch, proof of identity, frames in and out, questions, the engine's health and end. What may not: requests, text, torch.

The socket is a file (0600) in a fresh folder (0700); both are removed as soon as the engine has connected. Who connects first
must send this start's secret; anybody else is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import os
import secrets
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import headrace
from headrace import errors
from headrace.config import EngineConfig
from headrace.engine import process as frames
from headrace.engine.info import EngineInfo
from headrace.errors import EngineDead, HeadraceError
from headrace.scratch import Scratch

_MAX_HELLO = 4096  # bytes before the peer is known
_FRAMES_A_TURN = 16  # well below the deltas that a stream may have pending
_EXIT_SECONDS = 5.0  # between asking and killing
HANG_SECONDS = 5.0  # without a beat
LOAD_SILENCE = 60  # seconds without a beat; imports may hold the interpreter for some
_START_ERRORS: dict[str, type[HeadraceError]] = {each.__name__: each for each in (errors.ModelError, errors.ConfigError, errors.OutOfMemory)}

OnEvent = Callable[[frames.Step], None]
OnDeath = Callable[[EngineDead], None]


class _Peer(asyncio.Protocol):
    """One accepted connection; trusted once it has shown the secret."""

    def __init__(self, owner: EngineSocket) -> None:
        self._owner = owner
        self._unpacker = frames.Unpacker(frames.Event, _MAX_HELLO)
        self._trusted = False
        self.transport: asyncio.Transport | None = None
        self._frames: Iterator[Any] = iter(())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def data_received(self, data: bytes) -> None:
        self._frames = self._unpacker.feed(data)
        self._take(paused=False)

    def _take(self, paused: bool) -> None:
        """Some frames a turn of the event loop: streams are served in between, and an engine faster than its readers has to wait."""
        assert self.transport is not None
        taken = 0
        try:
            for frame in islice(self._frames, _FRAMES_A_TURN):
                taken += 1
                if self._trusted:
                    self._owner.received(frame)
                elif not self._prove(frame):
                    self.transport.abort()
                    return
        except frames.BadFrame:
            self.transport.abort()
            return
        self._go_on(more=taken == _FRAMES_A_TURN, paused=paused)

    def _go_on(self, *, more: bool, paused: bool) -> None:
        """Nothing is read while frames of the last read are left."""
        assert self.transport is not None
        if self.transport.is_closing():
            return
        if more:
            if not paused:
                self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._take, True)
        elif paused:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._trusted:
            self._owner.lost()

    def _prove(self, frame: Any) -> bool:
        self._trusted = isinstance(frame, frames.Hello) and self._owner.admit(self, frame.secret)
        self._unpacker.max_frame = frames.MAX_FRAME
        return self._trusted


class EngineSocket:
    """A front end's end of the engine's socket. ``await started()``, then ``listen``, ``send`` and ``ask``."""

    def __init__(self, secret: bytes, folder: Scratch) -> None:
        self._secret = secret
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._peer: _Peer | None = None
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._on_event: OnEvent = lambda frame: None
        self._on_death: OnDeath = lambda error: None
        self._farewell = ""  # what the engine said last about its own end
        self._closing = False
        self._numbers = itertools.count()
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.death: EngineDead | None = None
        self.last_beat = frames.Beat(0, "load", 0.0, 0.0)
        self.last_heard = time.perf_counter()

    @property
    def info(self) -> EngineInfo:
        return self._info.result()

    @property
    def ailment(self) -> str | None:
        """Why the engine cannot be trusted to make progress, or None: dead, silent, or stuck in one turn of its loop."""
        if self.death is not None:
            return self.death.message
        silence = time.perf_counter() - self.last_heard
        return f"the engine has been silent for {silence:.0f} s" if silence > HANG_SECONDS else self._stuck()

    def _stuck(self) -> str | None:
        beat = self.last_beat
        return f"the engine has been in one {beat.phase} phase for {beat.seconds:.0f} s" if beat.limit and beat.seconds > beat.limit else None

    def listen(self, on_event: OnEvent, on_death: OnDeath) -> None:
        """``on_event`` gets each Step frame."""
        self._on_event, self._on_death = on_event, on_death
        if self.death is not None:
            on_death(self.death)

    def send(self, data: bytes) -> None:
        """Never blocks; dropped when the engine is gone (its death has been told)."""
        transport = self._peer.transport if self._peer is not None else None
        if transport is not None and not transport.is_closing():  # uvloop's raises then, and its process's end is heard later
            transport.write(data)

    @property
    def alive(self) -> bool:
        return self.ailment is None

    async def stats(self) -> dict[str, Any]:
        """Gauges and counters of the engine: ``EngineStats`` by field name, and "steps" (``StepRecorder.summary()``)."""
        return await self.ask(frames.AskStats)

    async def recent(self, step: int, decision: int) -> dict[str, Any]:
        """``stats()`` with "records" (steps) and "decisions" (the scheduler's log) of higher numbers than these, the newest only."""
        return await self.ask(lambda number: frames.AskRecent(number, step, decision))

    async def ask(self, question: Callable[[int], frames.Frame]) -> dict[str, Any]:
        """The answer to ``question(number)``. Raises EngineDead."""
        if self.death is not None:
            raise self.death
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self.send(frames.pack(question(number)))
        try:
            return await answer
        finally:
            del self._questions[number]

    # --- from the peer

    def admit(self, peer: _Peer, secret: bytes) -> bool:
        """The first peer that knows the secret is the engine; from then on nobody can connect."""
        if self._peer is not None or not hmac.compare_digest(secret, self._secret):
            return False
        self._peer = peer
        self._stop_listening()
        return True

    def received(self, frame: Any) -> None:
        self.last_heard = time.perf_counter()
        if isinstance(frame, frames.Step):
            self._on_event(frame)
        elif isinstance(frame, frames.Beat):
            self.last_beat = frame
        elif isinstance(frame, frames.StatsReply):
            answer = self._questions.get(frame.number)
            if answer is not None and not answer.done():
                answer.set_result(frame.stats)
        elif isinstance(frame, frames.Died):
            self._farewell = frame.message
        elif isinstance(frame, frames.Started):
            if not self._info.done():
                self._info.set_result(frame.info)
        elif isinstance(frame, frames.StartFailed):
            self._fail_start(_START_ERRORS.get(frame.kind, EngineDead)(frame.message))

    def lost(self) -> None:
        """The socket is closed: whatever the engine still does is not heard here."""
        raise NotImplementedError

    async def close(self, timeout: float = _EXIT_SECONDS) -> None:
        """Nothing more is wanted of the engine. ``timeout``: seconds that a process which ends by that gets for it."""
        raise NotImplementedError

    # --- beginning and end

    async def _open(self) -> str:
        """Listens for the engine; the address."""
        address = str(self._folder.path / "engine")
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Peer(self), address)
        os.chmod(address, 0o600)
        return address

    def _die(self, how: str) -> None:
        cause = f": {self._farewell}" if self._farewell else ""
        self.death = EngineDead(f"the engine process {how}{cause}. Restart the server.")
        self._fail_start(self.death)
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(self.death)
        self._on_death(self.death)

    def _fail_start(self, error: HeadraceError) -> None:
        if not self._info.done():
            self._info.set_exception(error)
            self._info.exception()  # it may be that nobody waits any more

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._folder.close()


class JoinedEngine(EngineSocket):
    """An engine that somebody else has launched, and who can tell it to join: ``Attach(address, secret, …)``."""

    def __init__(self, secret: bytes, folder: Scratch) -> None:
        super().__init__(secret, folder)
        self.address = ""

    @classmethod
    async def invite(cls) -> JoinedEngine:
        """Waits for the engine at ``address``."""
        self = cls(secrets.token_bytes(32), _private_folder())
        try:
            self.address = await self._open()
        except BaseException:
            self._stop_listening()
            raise
        return self

    @property
    def secret(self) -> bytes:
        return self._secret

    async def started(self) -> EngineInfo:
        """However long that takes: who has launched the engine knows whether there is any hope."""
        return await self._info

    def lost(self) -> None:
        if not self._closing:
            self._die("is gone")

    async def close(self, timeout: float = 0.0) -> None:
        self._closing = True
        self._stop_listening()
        if self._peer is not None and self._peer.transport is not None:
            self._peer.transport.close()  # what has been sent still arrives


class EngineConnection(EngineSocket):
    """A launched engine process. ``await launch(config)`` makes one."""

    def __init__(self, secret: bytes, folder: Scratch) -> None:
        super().__init__(secret, folder)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def launch(cls, config: EngineConfig) -> EngineConnection:
        """Starts the process; it loads while the caller goes on."""
        self = cls(secrets.token_bytes(32), _private_folder())
        try:
            self._process = await _spawn(frames.pack(frames.Launch(config, await self._open(), self._secret)))
        except BaseException:
            self._stop_listening()
            raise
        self._watch = asyncio.create_task(self._watch_process())
        return self

    async def started(self) -> EngineInfo:
        """Waits until the engine can serve, however long it loads, as long as it is heard. Raises what kept it from that."""
        silent, heard = 0, self.last_heard
        while silent < LOAD_SILENCE:  # looks, not seconds: a front end that was stopped itself has missed nothing
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(self._info), 1.0)
            silent, heard = (silent + 1 if heard == self.last_heard else 0), self.last_heard
            if (stuck := self._stuck()) is not None:
                raise EngineDead(f"{stuck}: its first step does not end. Restart the server, and see `headrace doctor`.")
        raise EngineDead(f"the engine has been silent for {LOAD_SILENCE} s while it loads. Restart the server.")

    async def close(self, timeout: float = _EXIT_SECONDS) -> None:
        """Asks the process to end, kills it after ``timeout`` seconds. Nothing of it is left afterwards."""
        self._closing = True
        self._stop_listening()
        process = self._process
        if process is not None and process.returncode is None:
            self.send(frames.pack(frames.Shutdown()))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), timeout)
            if process.returncode is None:
                process.kill()
                await process.wait()
        if self._watch is not None:
            await self._watch
        if self._peer is not None and self._peer.transport is not None:
            self._peer.transport.abort()

    def lost(self) -> None:
        if self._process is not None and self._process.returncode is None and not self._closing:
            asyncio.get_running_loop().call_later(1.0, self._kill_deaf)

    async def _watch_process(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.sleep(0)  # what it said last is read first
        self._stop_listening()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._die(how + (" (often: the machine ran out of memory)" if code == -signal.SIGKILL and not self._closing else ""))

    def _kill_deaf(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


def _private_folder() -> Scratch:
    """A fresh folder (0700) whose path is short enough for a socket's name (108 bytes). Raises ConfigError."""
    parent = tempfile.gettempdir()
    try:
        return Scratch(parent if len(os.fsencode(parent)) < 64 else "/tmp")
    except OSError as error:
        raise errors.ConfigError(f"cannot make a folder for the engine's socket: {error}. Set TMPDIR to a folder that can be written.") from error


async def _spawn(launch: bytes) -> asyncio.subprocess.Process:
    """The process by exec, in a session of its own: a Ctrl-C in the terminal is for the front end, which lets requests drain."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # the working directory is no place to import from
        "-m",
        "headrace.engine.process",
        stdin=asyncio.subprocess.PIPE,
        stdout=2,  # standard output is the front end's
        env=environment(),
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it died at once: the watcher will say so
        process.stdin.write(launch)
        await process.stdin.drain()
    process.stdin.close()
    return process


def environment() -> dict[str, str]:
    """This process's environment; a package that is not installed is found where this process found it."""
    root = str(Path(headrace.__file__).resolve().parent.parent)
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
