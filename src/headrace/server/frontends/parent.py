"""The parent of front ends and one engine (``--api-server-count``, ``--supervise``): this process starts them,
watches them, and ends last.

It has no clients. A front end that dies or hangs is replaced while the others go on; without the engine all of them
end. If supervised, all of them start again then: the listening socket is the parent's, so the port stays ours, and
clients that connect meanwhile wait.

What lives here: starts, ends, signals, draining, and the answers that front ends have in common. What may not: HTTP,
requests, text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from headrace.engine.connection import START_ERRORS, WATCH_SECONDS, EngineConnection, watch_engine
from headrace.engine.replicas import Replicas, launch_engine
from headrace.engine.resolve import find_source
from headrace.engine.routing import memory_size
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.portability import shared_file
from headrace.processes.child import Child, RestartBackoff, start
from headrace.processes.messages import Channel
from headrace.server.app import ROUTES
from headrace.server.exposition import Counters, ServerMetrics, Watch
from headrace.server.frontends import link
from headrace.server.lifecycle import (
    ENGINE_EXIT_SECONDS,
    LAST_WORDS_SECONDS,
    Announce,
    Signals,
    loaded,
    until,
)

FRONT_HANG_SECONDS = 20.0  # without a turn of a front end's event loop
MAX_SHORT_LIVES = 5  # in a row, at one place: the next would not last either
FAILED_STARTS = 5  # in a row, of all, none of which became ready: the next would not either
_GRACE_SECONDS = 2.0  # beyond what front ends have for their last words

log = logging.getLogger("headrace.server")


@dataclass(eq=False)
class FrontEnd:
    """One process at its place. ``number`` counts places from 1, ``serial`` counts starts."""

    number: int
    serial: int
    process: Child
    door: socket.socket
    watch: Watch
    channel: Channel = field(init=False)
    lines: Sequence[str] | None = None  # once it is ready
    failure: HeadraceError | None = None
    hung: bool = False

    def hand(self, engine: EngineConnection, replica: int) -> None:
        """A connection of its own to an engine that serves. One whose engine dies hears of it by that socket's end."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.door, [b"."], [theirs.fileno()])
            self.channel.send(link.Engine(replica))
        engine.attach(ours, self.serial)

    def close(self) -> None:
        self.channel.close()
        self.door.close()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


async def supervise(begin: Callable[[], FrontEnds], signals: Signals) -> int:
    """One life of all of them after the other, until one ends as it was told to, or the next would end as it did.
    Returns its exit status, or raises what it raised."""
    backoff, failed, ever_ready = RestartBackoff(), 0, False
    while True:
        backoff.begin()
        life, error, status = begin(), None, 1
        try:
            status = await life.run()
        except HeadraceError as raised:
            error = raised
        failed, ever_ready = 0 if life.was_ready else failed + 1, ever_ready or life.was_ready
        hopeless = failed == FAILED_STARTS or (isinstance(error, ConfigError | ModelError) and not ever_ready)
        if failed == FAILED_STARTS:
            log.error("Giving up: %d starts in a row failed.", failed)
        if signals.count or hopeless or (status == 0 and error is None):
            if error is not None:
                raise error
            return status
        ready = "having been ready" if life.was_ready else "before it was ready"
        why = f": {error.message}" if error is not None else ""
        log.error(
            "The server ended with %s, %s%s; it starts again in %g s.", backoff.end(status), ready, why, backoff.wait
        )
        if await signals.within(backoff.wait):
            return 0


class FrontEnds:
    """One life of an engine and its front ends. ``launch``: what all of them are started with. ``ready`` is called
    once, with lines for people, when all front ends serve. What the counters have counted before goes on."""

    def __init__(
        self, launch: link.Launch, signals: Signals, announce: Announce, ready: Callable[[Sequence[str]], None]
    ) -> None:
        self._launch, self._config = launch, launch.server
        self._signals, self._announce, self._ready = signals, announce, ready
        self._counters = Counters.open(launch.counters, launch.server.api_server_count)
        for page in self._counters.pages:
            page.served = False
        self._metrics = [ServerMetrics([route.path for route in ROUTES], page) for page in self._counters.pages]
        total = partial(self._metrics[0].summed, self._counters.pages)
        self._shared = link.Peers(lambda: self._engine if self._serving else None, total)
        self._serials = itertools.count(1)
        self._fronts: dict[int, FrontEnd] = {}  # by number
        self._engine: EngineConnection | Replicas | None = None
        self._restarts: dict[int, asyncio.Task[None]] = {}  # of replicas, by number
        self._replica_backoffs: dict[int, RestartBackoff] = {}
        replicas = launch.engine.device.data_parallel_size
        if replicas > 1:
            size = memory_size(replicas, self._config.api_server_count)
            self._launch = structs.replace(launch, routing=shared_file(size))
        self._ending = self._serving = self.was_ready = False
        self._cannot_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """The exit status. Raises what kept the engine or the front ends from starting."""
        keepers = [asyncio.create_task(self._keep(number)) for number in range(1, self._config.api_server_count + 1)]
        for keeper in keepers:
            keeper.add_done_callback(self._kept)
        shared = asyncio.create_task(self._shared.run())
        try:
            return await self._live()
        finally:
            self._ending = True
            for each in (shared, *self._restarts.values()):
                each.cancel()
            await self._end_fronts(keepers)
            if self._engine is not None:
                await self._engine.close(ENGINE_EXIT_SECONDS)
            if self._launch.routing >= 0:
                os.close(self._launch.routing)

    async def _live(self) -> int:
        engine = await loaded(asyncio.ensure_future(self._load()), self._signals, self._cannot_start)
        if engine is None:
            return 0
        if await watch_engine(engine, self._signals.came, self._look):
            return await self._drain(engine)
        log.error("The engine has died or hangs, and the server ends: %s", engine.ailment)
        return await self._end_without_engine()

    async def _load(self) -> EngineConnection | Replicas:
        """A hub model is fetched once, before anybody looks for it."""
        await asyncio.to_thread(find_source, self._launch.engine)
        router = link.create_router(self._launch) if self._launch.routing >= 0 else None
        engine = self._engine = await launch_engine(self._launch.engine, router)
        for front in self._fronts.values():
            front.channel.send(link.Go())
        await engine.started()
        self._serving = True
        for front in self._fronts.values():
            self._hand_all(front)
        return engine

    def _hand_all(self, front: FrontEnd) -> None:
        assert self._engine is not None, "it serves"
        for number, each in enumerate(self._engine.own):
            front.hand(each, number)

    def _look(self) -> None:
        self._look_at_fronts()
        engine = self._engine
        if isinstance(engine, Replicas) and self._config.supervise:
            for number, each in enumerate(engine.own):
                if each.dead and number not in self._restarts:
                    self._restarts[number] = asyncio.create_task(self._restart(number, engine))

    async def _restart(self, number: int, engine: Replicas) -> None:
        """Another process for a replica that has died, and again until one serves. The last that dies ends all."""
        backoff = self._replica_backoffs.setdefault(number, RestartBackoff())
        while not self._ending:
            log.error("Replica %d starts again in %g s.", number, backoff.wait)
            await asyncio.sleep(backoff.wait)
            backoff.begin()
            found = await engine.launch_again(self._launch.engine, number)
            try:
                await found.started()
            except HeadraceError as error:
                await found.close(0.0)
                log.error("Replica %d could not start, %s: %s", number, backoff.end(1), error.message)
                continue
            except asyncio.CancelledError:
                await found.close(0.0)
                raise
            engine.replace(number, found)
            for front in self._fronts.values():
                front.hand(found, number)
            log.info("Replica %d serves again.", number)
            break
        del self._restarts[number]

    def _look_at_fronts(self) -> None:
        if self._cannot_start.done():
            self._cannot_start.result()
        for front in self._fronts.values():
            if not front.hung and front.watch.hung():
                front.hung = True
                why = "Front end %d hangs: its event loop has not turned for %g s. It is ended."
                log.error(why, front.number, FRONT_HANG_SECONDS)
                front.signal(signal.SIGKILL)
        told = [front.lines for front in self._fronts.values()]
        if not self.was_ready and len(told) == self._config.api_server_count and None not in told:
            self.was_ready = True
            self._ready(told[0] or ())

    # --- a front end's life

    async def _keep(self, number: int) -> None:
        """One after the other at one place."""
        backoff = RestartBackoff()
        while not self._ending:
            backoff.begin()
            front = await self._start(number)
            if self._ending:
                front.signal(signal.SIGTERM)  # it may not have been there yet when the others were told
            status = await front.process.wait()
            ended = backoff.end(status)
            self._leave(front)
            if self._ending or (status == link.ENGINE_GONE and await self._engine_ends()):
                return
            if (front.failure is not None and not self.was_ready) or backoff.short > MAX_SHORT_LIVES:
                self._give_up(front, ended)
                return
            memory = " (often: the machine ran out of memory)" if status == -signal.SIGKILL and not front.hung else ""
            told = "Front end %d ended: %s. Its requests are ended, the others' go on; it starts again in %g s."
            log.error(told, number, front.failure or ended + memory, backoff.wait)
            await asyncio.sleep(backoff.wait)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """A keeper that fails (no process can be started) cannot be done without."""
        if not keeper.cancelled() and keeper.exception() is not None and not self._cannot_start.done():
            self._cannot_start.set_exception(HeadraceError(f"a front end cannot be started: {keeper.exception()}."))

    async def _start(self, number: int) -> FrontEnd:
        page, serial = self._counters.pages[number - 1], next(self._serials)
        (sock, theirs), (door, their_door) = socket.socketpair(), socket.socketpair()
        with theirs, their_door:
            launch = structs.replace(self._launch, number=number, serial=serial, door=their_door.fileno())
            inherited = [fd for fd in (launch.listener, launch.counters, launch.routing, launch.door) if fd >= 0]
            process = Child(start("headrace.server.frontends.child", theirs, {}, inherited))
        front = FrontEnd(number, serial, process, door, Watch(page, round(FRONT_HANG_SECONDS / WATCH_SECONDS)))
        heard, respond = partial(self._heard, front), partial(self._respond, front)
        front.channel = Channel(link.FromFront, heard, lambda: None, respond)
        self._fronts[number] = front
        await front.channel.open(sock)
        front.channel.send(launch)
        if self._engine is not None:
            front.channel.send(link.Go())
        if self._serving:
            self._hand_all(front)
        return front

    def _leave(self, front: FrontEnd) -> None:
        """The engine hears of its end by its socket; what it could not count itself is counted here."""
        page, metrics = self._counters.pages[front.number - 1], self._metrics[front.number - 1]
        for _ in range(page.live):
            metrics.count_end("abort")
        page.vacate()
        front.close()
        del self._fronts[front.number]

    def _give_up(self, front: FrontEnd, ended: str) -> None:
        if not self._cannot_start.done():
            lasts = f"front end {front.number} does not last: {MAX_SHORT_LIVES + 1} short lives in a row, the last with {ended}."
            self._cannot_start.set_exception(front.failure or HeadraceError(f"{lasts} See its own words above."))

    async def _engine_ends(self) -> bool:
        """A front end says so, which may know it first."""
        for _ in range(10):
            if self._ending or self._engine is None or not self._engine.alive:
                return True
            await asyncio.sleep(0.1)
        return False

    # --- what front ends say

    def _heard(self, front: FrontEnd, frame: Any) -> None:
        if isinstance(frame, link.Ready):
            front.lines = frame.lines
            if self.was_ready:
                log.info("Front end %d serves again.", front.number)
        elif isinstance(frame, link.Warn):
            self._announce(frame.line)
        elif isinstance(frame, link.Failed):
            front.failure = START_ERRORS.get(frame.kind, HeadraceError)(frame.message)
        elif isinstance(frame, link.Changed) and isinstance(self._engine, Replicas):
            self._engine.on_change(frame.entry)

    async def _respond(self, asking: FrontEnd, question: link.Ask) -> Any:
        if question.what in ("engine_stats", "dashboard"):
            return await getattr(self._shared, question.what)(*question.about)
        others = [each.channel for each in self._fronts.values() if each is not asking and each.lines is not None]
        return await link.ask_all(others, question.what, question.about)

    # --- ends

    async def _drain(self, engine: EngineConnection | Replicas) -> int:
        self._ending = True
        running, limit = self._counters.live, self._config.shutdown_timeout
        if running:
            self._announce(f"Stopping: {running} running requests get up to {limit:g} s (press again to end them now).")
        self._signal(signal.SIGTERM)
        await until(
            lambda: not self._fronts or self._signals.count > 1 or engine.dead,
            limit + LAST_WORDS_SECONDS + _GRACE_SECONDS,
        )
        if engine.dead and self._fronts:
            log.error("The engine has died while requests were running: %s", engine.ailment)
            return await self._end_without_engine()
        if self._signals.count < 2:
            return 0
        self._signal(signal.SIGTERM)
        await self._wait_for_fronts(LAST_WORDS_SECONDS)
        return 1

    async def _end_without_engine(self) -> int:
        """Front ends see for themselves that the engine is gone, and tell their clients."""
        self._ending = True
        await self._wait_for_fronts(LAST_WORDS_SECONDS + _GRACE_SECONDS)
        return 1

    async def _wait_for_fronts(self, seconds: float) -> None:
        await until(lambda: not self._fronts, seconds)

    def _signal(self, number: int) -> None:
        for front in self._fronts.values():
            front.signal(number)

    async def _end_fronts(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        self._signal(signal.SIGKILL)
        await self._wait_for_fronts(_GRACE_SECONDS)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
