"""A server's life: bind, listen while the engine loads, serve, drain, end. Its exit status is the process's.

What lives here: the listening socket, signals, the engine's birth and death, the order of shutting down. What may not:
routes, requests, connections (connection.py).

Exit status: 0 after a SIGTERM, SIGHUP or Ctrl-C, 1 when the engine could not start or died, or a second signal cut
the draining short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.config import ServerConfig
from headrace.engine.connection import watch_engine
from headrace.errors import ConfigError, EngineDead, HeadraceError, Unavailable
from headrace.server.app import ROUTES, App
from headrace.server.connection import Acceptor, Connection, Connections, connection_limit
from headrace.server.limits import Guard
from headrace.server.openapi import Route
from headrace.server.service import Service, State
from headrace.server.tls import create_context, follow_files

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM

BACKLOG = 2048
ENGINE_EXIT_SECONDS = 0.5  # for the engine's process to end by itself, once nothing is wanted of it
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_WORDS_SECONDS = 1.0  # for error events to leave before connections are cut

log = logging.getLogger("headrace.server")

CreateEngine = Callable[[], Awaitable["AsyncLLM"]]
Announce = Callable[[str], None]
Loaded = TypeVar("Loaded")


def bind(config: ServerConfig) -> socket.socket:
    """A listening address of our own, before anything slow. Raises ConfigError when it cannot be had."""
    if config.uds is not None:
        return bind_unix(config.uds, 0o666 if config.api_key else 0o600)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((config.host, config.port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"--host {config.host} --port {config.port}: {reason.lower()}; choose another with --port (0 takes a free one)."
        ) from None
    sock.setblocking(False)
    return sock


def bind_unix(path: str, mode: int) -> socket.socket:
    """A Unix socket. One without a listener is replaced, any other file is left alone."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"--uds {path}: {reason}; give a path of at most 107 bytes where no file is, in a folder that can be written."
        ) from None
    sock.setblocking(False)
    return sock


def _is_abandoned(path: str) -> bool:
    """A socket whose listener is gone."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # whoever listens may not accept
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def address_of(sock: socket.socket, scheme: str = "http") -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Signals:
    """SIGTERM, SIGINT and a terminal that closes, counted."""

    def __init__(self) -> None:
        self.count = 0
        self.came = asyncio.Event()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        kinds = [kind for kind in STOPS if signal.getsignal(kind) is not signal.SIG_IGN]  # nohup's SIGHUP stays ignored
        for kind in kinds:
            loop.add_signal_handler(kind, self._on_signal, kind)
        try:
            yield
        finally:
            for kind in kinds:
                loop.remove_signal_handler(kind)

    async def within(self, seconds: float) -> bool:
        """Whether one has come by then."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.came.wait(), seconds)
        return bool(self.count)

    def _on_signal(self, kind: signal.Signals) -> None:
        if kind != signal.SIGHUP or not self.count:  # the terminal and its shell both send one: that is no hurry
            self.count += 1
        self.came.set()


async def loaded(loading: asyncio.Future[Loaded], signals: Signals, *hopeless: asyncio.Future[None]) -> Loaded | None:
    """What has loaded; None where a signal came first. Raises what ``loading``, or one of the others, raises."""
    stop = asyncio.create_task(signals.came.wait())
    try:
        awaited: list[asyncio.Future[Any]] = [loading, stop, *hopeless]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for each in hopeless:
            if each.done():
                each.result()
        return loading.result() if loading.done() else None
    finally:
        stop.cancel()
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError, HeadraceError):
                await loading


async def until(done: Callable[[], bool], seconds: float) -> None:
    """Returns once it is so, or after that many seconds."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


@dataclass
class Lifecycle:
    """One server. ``announce`` gets lines for people."""

    service: Service
    guard: Guard
    sock: socket.socket
    announce: Announce
    routes: Sequence[Route] = field(default=ROUTES, kw_only=True)
    signals: Signals = field(default_factory=Signals, kw_only=True)

    @property
    def services(self) -> Sequence[Service]:
        """Whose requests it drains."""
        return (self.service,)

    async def run(self) -> int:
        with self.signals.handled():
            service = self.service
            app = App(service, self.guard, self.routes)
            page, pages = service.limits.page, service.limits.counters.pages
            connections = Connections(connection_limit(service.config.max_queue), page)
            tls = create_context(service.config)
            acceptor = Acceptor(self.sock, partial(Connection, app.answer, connections), page, pages, tls)
            acceptor.start()
            watched = [each for own in self.services for each in (own.observed.pings.run(), own.observed.shared.run())]
            forever = (*watched, page.stamp(), follow_files(tls, service.config))
            beside = [asyncio.create_task(each) for each in forever]
            try:
                return await self._live()
            finally:
                for each in beside:
                    each.cancel()
                acceptor.close()
                await connections.close(LAST_WORDS_SECONDS)
                self.service.limits.threads.close()

    async def _live(self) -> int:
        """From the load to the end, while connections are accepted; the exit status."""
        raise NotImplementedError

    async def _drain(self, engine: AsyncLLM | None = None) -> int:
        """New requests get 503 from now on; those that run may finish. ``engine``: that all of them need."""
        for each in self.services:
            each.model.state = State.DRAINING
        limit = self.service.config.shutdown_timeout
        if count := running(self.services):
            self.announce(f"Stopping: {count} running requests get up to {limit:g} s (press again to end them now).")

        def died() -> bool:
            return engine is not None and engine.dead

        await until(lambda: not running(self.services) or self.signals.count > 1 or died(), limit)
        if engine is not None and died():
            return await self._end_without_engine(engine)
        forced = self.signals.count >= 2
        told = "The server is shutting down and could not wait for this request; send it to another."
        await cut(self.services, Unavailable(told))
        return 1 if forced else 0

    async def _end_without_engine(self, engine: AsyncLLM) -> int:
        if self.service.limits.counters.fd < 0:  # of front ends below a parent, that says it
            log.error("The engine has died or hangs, and the server ends: %s", engine.ailment)
        await end_dead(self.service)
        return 1


@dataclass
class EngineLife(Lifecycle):
    """Of one engine. ``ready`` is called once with it."""

    create_engine: CreateEngine
    ready: Callable[[AsyncLLM], None]

    async def _live(self) -> int:
        engine = await loaded(asyncio.ensure_future(self.create_engine()), self.signals)
        if engine is None:
            self.announce("Stopped while the engine was loading.")
            return 0
        try:
            if engine.tokenizer is not None:
                await asyncio.to_thread(self.service.model.learn_formats, engine.tokenizer)
            self.service.attach(engine)
            self.ready(engine)
            stopped = await asyncio.create_task(watch_engine(engine, self.signals.came))
            return await (self._drain(engine) if stopped else self._end_without_engine(engine))
        finally:
            await engine.shutdown(kill_after=ENGINE_EXIT_SECONDS)


def running(services: Sequence[Service]) -> int:
    """Requests of all of them."""
    return sum(len(each.limits.exchanges) for each in services)


async def cut(services: Sequence[Service], cause: HeadraceError) -> None:
    """Every request that still runs ends with ``cause``, in its stream or as its answer."""
    for each in services:
        each.limits.end_all(cause)
    await until(lambda: not running(services), LAST_WORDS_SECONDS)


async def end_dead(service: Service) -> None:
    """Its engine has died, and its requests with it."""
    service.model.state = State.DEAD
    await cut((service,), EngineDead("The engine has died; the answer is incomplete. Send the request again."))
