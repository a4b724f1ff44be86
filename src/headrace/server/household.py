"""Several front ends and one engine under one roof (``--api-server-count``): this process starts them, watches them, and ends last.

It has no clients. A front end that dies or hangs is replaced while the others go on; without the engine all of them end.

What lives here: births, deaths, signals, draining, and the answers that front ends have in common. What may not: HTTP, requests, text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace import errors
from headrace.config import EngineConfig, ServerConfig
from headrace.engine import process as frames
from headrace.engine.connection import EngineConnection, environment
from headrace.engine.resolve import find_source
from headrace.errors import HeadraceError
from headrace.server import together
from headrace.server.api import ROUTES
from headrace.server.commons import Newest
from headrace.server.dashboard import History
from headrace.server.exposition import ServerMetrics
from headrace.server.ledger import Ledger, Watch
from headrace.server.lifecycle import ENGINE_EXIT_SECONDS, HANG_SECONDS, LAST_WORDS_SECONDS, WATCH_SECONDS, Announce, Signals

FRONT_HANG_SECONDS = 20.0  # without a turn of a front end's event loop
FIRST_WAIT, LONGEST_WAIT = 0.25, 2.0  # seconds before a front end is replaced; it doubles while lives are short
SHORT_LIFE = 60.0  # seconds
MAX_SHORT_LIVES = 5  # in a row, at one place: the next would not last either
_GRACE_SECONDS = 2.0  # beyond what front ends have for their last words
_KINDS: dict[str, type[HeadraceError]] = {each.__name__: each for each in (errors.ConfigError, errors.ModelError, errors.OutOfMemory)}

log = logging.getLogger("headrace.server")


class FrontEnd:
    """One process at its place. ``number`` counts places from 1, ``serial`` counts starts."""

    def __init__(self, number: int, serial: int, process: asyncio.subprocess.Process, watch: Watch) -> None:
        self.number = number
        self.serial = serial
        self.process = process
        self.watch = watch
        self.talk: together.Talk | None = None
        self.began = time.monotonic()
        self.lines: Sequence[str] | None = None  # once it is ready
        self.failure: HeadraceError | None = None
        self.hung = False

    def send(self, frame: frames.Frame) -> None:
        if self.talk is not None:
            self.talk.send(frame)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def __str__(self) -> str:
        status = self.process.returncode or 0
        how = f"exit status {status}" if status >= 0 else f"signal {-status} ({signal.Signals(-status).name})"
        return f"{how} after {time.monotonic() - self.began:.1f} s"


class Household:
    """``secret``: that tenants' names are made with. ``ready`` is called once, with lines for people, when all front ends serve."""

    def __init__(
        self,
        engine: EngineConfig,
        server: ServerConfig,
        version: str,
        secret: bytes,
        sock: socket.socket,
        announce: Announce,
        ready: Callable[[Sequence[str]], None],
    ) -> None:
        self._engine_config = engine
        self._config = server
        self._version = version
        self._secret = secret
        self._sock = sock
        self._announce = announce
        self._ready = ready
        self._created = int(time.time())
        self._ledger = Ledger.create(server.api_server_count)
        self._metrics = [ServerMetrics([route.path for route in ROUTES], page) for page in self._ledger.pages]
        self._history = History()
        self._newest = Newest()
        self._signals = Signals()
        self._serials = itertools.count(1)
        self._fronts: dict[int, FrontEnd] = {}  # by number
        self._engine: EngineConnection | None = None
        self._waiting: list[frames.Attach] = []  # for the engine to be there
        self._ending = self._serving = self._was_ready = False
        self._hopeless: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """The exit status. Raises what kept the engine or the front ends from starting."""
        with self._signals.handled():
            keepers = [asyncio.create_task(self._keep(number)) for number in range(1, self._config.api_server_count + 1)]
            for keeper in keepers:
                keeper.add_done_callback(self._kept)
            history = asyncio.create_task(self._history.run(lambda: self._engine if self._serving else None, self._total))
            try:
                return await self._live()
            finally:
                self._ending = True
                history.cancel()
                await self._end_fronts(keepers)
                if self._engine is not None:
                    await self._engine.close(ENGINE_EXIT_SECONDS)

    async def _live(self) -> int:
        loading, stop = asyncio.ensure_future(self._load()), asyncio.create_task(self._signals.came.wait())
        try:
            await asyncio.wait((loading, stop, self._hopeless), return_when=asyncio.FIRST_COMPLETED)
            if self._hopeless.done():
                self._hopeless.result()
            if not loading.done():  # a signal while the engine loads
                return 0
            loading.result()
        finally:
            stop.cancel()
            if not loading.done():
                loading.cancel()
                with contextlib.suppress(asyncio.CancelledError, HeadraceError):
                    await loading
        return await self._watch()

    async def _load(self) -> None:
        """A hub model is fetched once, before anybody looks for it."""
        await asyncio.to_thread(find_source, self._engine_config)
        self._engine = await EngineConnection.launch(self._engine_config)
        for front in self._fronts.values():
            front.send(together.Go())
        await self._engine.started()
        self._serving = True
        for attach in self._waiting:
            self._engine.send(frames.pack(attach))

    async def _watch(self) -> int:
        engine, hung = self._engine, 0.0
        assert engine is not None
        while engine.death is None and hung < HANG_SECONDS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signals.came.wait(), WATCH_SECONDS)
            if self._signals.count:
                return await self._drain(engine)
            if self._hopeless.done():
                self._hopeless.result()
            self._look_at_fronts()
            hung = 0.0 if engine.alive else hung + WATCH_SECONDS
        log.error("The engine has died or hangs, and the server ends: %s", engine.ailment)
        return await self._bury()

    def _look_at_fronts(self) -> None:
        for front in self._fronts.values():
            if not front.hung and front.watch.hung():
                front.hung = True
                log.error("Front end %d hangs: its event loop has not turned for %g s. It is ended.", front.number, FRONT_HANG_SECONDS)
                front.signal(signal.SIGKILL)
        fronts = list(self._fronts.values())
        if not self._was_ready and len(fronts) == self._config.api_server_count and all(front.lines is not None for front in fronts):
            self._was_ready = True
            self._ready(fronts[0].lines or ())

    # --- a front end's life

    async def _keep(self, number: int) -> None:
        """One after the other at one place."""
        short_lives = 0
        while not self._ending:
            front = await self._start(number)
            if self._ending:
                front.signal(signal.SIGTERM)  # it may not have been there yet when the others were told
            await front.process.wait()
            self._leave(front)
            if self._ending or (front.process.returncode == together.ENGINE_GONE and await self._engine_ends()):
                return
            short_lives = short_lives + 1 if time.monotonic() - front.began < SHORT_LIFE else 1
            if (front.failure is not None and not self._was_ready) or short_lives > MAX_SHORT_LIVES:
                self._give_up(front)
                return
            seconds = min(FIRST_WAIT * 2 ** (short_lives - 1), LONGEST_WAIT)
            why = front.failure or f"{front}{' (often: the machine ran out of memory)' if self._was_killed(front) else ''}"
            log.error("Front end %d ended: %s. Its requests are ended, the others' go on; it starts again in %g s.", number, why, seconds)
            await asyncio.sleep(seconds)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """A keeper that fails (no process can be started) cannot be done without."""
        if not keeper.cancelled() and keeper.exception() is not None and not self._hopeless.done():
            self._hopeless.set_exception(HeadraceError(f"a front end cannot be started: {keeper.exception()}."))

    def _was_killed(self, front: FrontEnd) -> bool:
        return front.process.returncode == -signal.SIGKILL and not front.hung

    async def _start(self, number: int) -> FrontEnd:
        page, serial = self._ledger.pages[number - 1], next(self._serials)
        ours, theirs = socket.socketpair()
        with theirs:
            kept = (self._sock.fileno(), self._ledger.fd, theirs.fileno())
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "headrace.server.front",
                stdin=asyncio.subprocess.PIPE,
                stdout=2,
                env=environment(),
                start_new_session=True,  # a Ctrl-C in the terminal comes once, from here
                pass_fds=kept,
            )
        front = FrontEnd(number, serial, process, Watch(page, round(FRONT_HANG_SECONDS / WATCH_SECONDS)))
        self._fronts[number] = front
        talk = front.talk = together.Talk(together.FromFront, partial(self._respond, front), partial(self._heard, front), lambda: None)
        await asyncio.get_running_loop().create_unix_connection(lambda: talk, sock=ours)
        if self._engine is not None:
            front.send(together.Go())
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once: its keeper will say so
            process.stdin.write(frames.pack(self._launch(number, serial, *kept)))
            await process.stdin.drain()
        process.stdin.close()
        return front

    def _launch(self, number: int, serial: int, listener: int, ledger: int, control: int) -> together.Launch:
        return together.Launch(
            engine=self._engine_config,
            server=self._config,
            version=self._version,
            number=number,
            serial=serial,
            secret=self._secret,
            created=self._created,
            listener=listener,
            ledger=ledger,
            control=control,
            parent=os.getpid(),
            log_level=logging.getLevelName(logging.getLogger("headrace").level),
        )

    def _leave(self, front: FrontEnd) -> None:
        """The engine hears of its end by its socket; what it could not count itself is counted here."""
        page, metrics = self._ledger.pages[front.number - 1], self._metrics[front.number - 1]
        for _ in range(page.live):
            metrics.count_end("abort")
        page.vacate()
        self._waiting = [each for each in self._waiting if each.serial != front.serial]
        if front.talk is not None:
            front.talk.close()
        del self._fronts[front.number]

    def _give_up(self, front: FrontEnd) -> None:
        if not self._hopeless.done():
            reason = (
                f"front end {front.number} does not last: {MAX_SHORT_LIVES + 1} short lives in a row, the last with {front}. See its own words above."
            )
            self._hopeless.set_exception(front.failure or HeadraceError(reason))

    async def _engine_ends(self) -> bool:
        """A front end says so, which may know it first."""
        for _ in range(10):
            if self._ending or self._engine is None or not self._engine.alive:
                return True
            await asyncio.sleep(0.1)
        return False

    # --- what front ends say

    def _heard(self, front: FrontEnd, frame: Any) -> None:
        if isinstance(frame, together.Listening):
            attach = frames.Attach(frame.address, frame.secret, front.serial)
            if self._serving and self._engine is not None:
                self._engine.send(frames.pack(attach))
            else:
                self._waiting.append(attach)
        elif isinstance(frame, together.Ready):
            front.lines = frame.lines
            if self._was_ready:
                log.info("Front end %d serves again.", front.number)
        elif isinstance(frame, together.Warn):
            self._announce(frame.line)
        elif isinstance(frame, together.Failed):
            front.failure = _KINDS.get(frame.kind, HeadraceError)(frame.message)

    async def _respond(self, asking: FrontEnd, question: together.Question) -> Any:
        if isinstance(question, together.AskStats):
            return await self._newest.ask(self._engine if self._serving else None)
        if isinstance(question, together.AskDashboard):
            return self._history.after(question.sample, question.step, question.decision)
        answers = await self._ask_others(asking, question)
        if isinstance(question, together.ListRequests):
            return [each for answer in answers for each in answer or ()]
        return next((answer for answer in answers if answer is not None), None)

    async def _ask_others(self, asking: FrontEnd, question: together.Question) -> list[Any]:
        def again(number: int) -> together.Question:
            passed_on: together.Question = msgspec.structs.replace(question, number=number)
            return passed_on

        others = [front.talk for front in self._fronts.values() if front is not asking and front.talk is not None and front.lines is not None]
        return await together.ask_all(others, again)

    def _total(self) -> ServerMetrics:
        return self._metrics[0].summed(self._ledger.pages)

    # --- ends

    async def _drain(self, engine: EngineConnection) -> int:
        self._ending = True
        running, limit = self._ledger.live, self._config.shutdown_timeout
        if running:
            self._announce(f"Stopping: {running} running requests get up to {limit:g} s (press again to end them now).")
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + limit + LAST_WORDS_SECONDS + _GRACE_SECONDS
        while self._fronts and time.monotonic() < deadline and self._signals.count < 2 and engine.death is None:
            await asyncio.sleep(0.02)
        if engine.death is not None and self._fronts:
            log.error("The engine has died while requests were running: %s", engine.ailment)
            return await self._bury()
        if self._signals.count < 2:
            return 0
        self._signal(signal.SIGTERM)
        await self._wait_for_fronts(LAST_WORDS_SECONDS)
        return 1

    async def _bury(self) -> int:
        """Front ends see for themselves that the engine is gone, and tell their clients."""
        self._ending = True
        await self._wait_for_fronts(LAST_WORDS_SECONDS + _GRACE_SECONDS)
        return 1

    async def _wait_for_fronts(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._fronts and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _signal(self, number: int) -> None:
        for front in self._fronts.values():
            front.signal(number)

    async def _end_fronts(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        self._signal(signal.SIGKILL)
        await self._wait_for_fronts(_GRACE_SECONDS)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
