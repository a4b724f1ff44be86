"""A server's life: bind, listen while the engine loads, serve, drain, end. Its exit status is the process's.

What lives here: signals, the engine's birth and death, the order of shutting down; taking connections off the listening
socket, which all front ends share (TLS, where it is spoken). What may not: routes, requests, HTTP (connection.py), how
many connections there may be.

Exit status: 0 after a SIGTERM, SIGHUP or Ctrl-C, 1 when the engine could not start or died, or a second signal cut
the draining short.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.config import ServerConfig
from headrace.errors import ConfigError, EngineDead, HeadraceError, Unavailable
from headrace.server.app import ROUTES, App
from headrace.server.connection import Connection, Connections, connection_limit
from headrace.server.exposition import Page
from headrace.server.limits import Guard
from headrace.server.openapi import Route
from headrace.server.service import Service, State
from headrace.server.tls import create_context, follow_files

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM
    from headrace.engine.connection import EngineConnection
    from headrace.engine.replicas import Replicas


BACKLOG = 2048
WATCH_SECONDS = 0.2  # between looks at the engine
HANG_SECONDS = 20.0  # that an engine without progress gets to come back: clients know within 30 s of its last turn
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
    """A Unix socket. One that nobody listens on any more is replaced, any other file is left alone."""
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

    def _on_signal(self, kind: signal.Signals) -> None:
        if kind != signal.SIGHUP or not self.count:  # both the terminal and its shell send one: nobody is in a hurry
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


async def watch_engine(
    engine: AsyncLLM | EngineConnection | Replicas, signals: Signals, look: Callable[[], None] = lambda: None
) -> bool:
    """Until a signal comes, True, or the engine has died or hangs, False. ``look`` is called again and again."""
    # seconds in which this process ran and the engine did not: one that was stopped, or frozen with it, has seen
    # nothing
    hung = 0.0
    while not engine.dead and hung < HANG_SECONDS:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.came.wait(), WATCH_SECONDS)
        if signals.count:
            return True
        look()
        hung = 0.0 if engine.alive else hung + WATCH_SECONDS
    return False


async def until(done: Callable[[], bool], seconds: float) -> None:
    """Returns once it is so, or after that many seconds."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)


class Lifecycle:
    """One server. ``announce`` gets lines for people, ``ready`` is called once with the engine."""

    def __init__(
        self,
        service: Service,
        guard: Guard,
        sock: socket.socket,
        create_engine: CreateEngine,
        announce: Announce,
        ready: Callable[[AsyncLLM], None],
        routes: Sequence[Route] = ROUTES,
        services: Sequence[Service] = (),
    ) -> None:
        """``services``: those behind ``service``, which then is the front of several models."""
        self._routes, self._services = routes, (service, *services)
        self._service = service
        self._guard = guard
        self._sock = sock
        self._create_engine = create_engine
        self._announce = announce
        self._ready = ready
        self._signals = Signals()

    async def run(self) -> int:
        with self._signals.handled():
            loading = asyncio.ensure_future(self._create_engine())
            service = self._service
            app = App(service, self._guard, self._routes)
            page, pages = service.limits.page, service.limits.counters.pages
            connections = Connections(connection_limit(service.config.max_queue), page)
            tls = create_context(service.config)
            acceptor = Acceptor(self._sock, lambda: Connection(app.answer, connections), page, pages, tls)
            acceptor.start()
            watched = [each for own in self._services for each in (own.observed.pulse.run(), own.observed.shared.run())]
            forever = (*watched, page.stamp(), follow_files(tls, service.config))
            beside = [asyncio.create_task(each) for each in forever]
            try:
                return await self._live(loading)
            finally:
                for each in beside:
                    each.cancel()
                acceptor.close()
                await connections.close(LAST_WORDS_SECONDS)
                self._service.limits.threads.close()

    async def _live(self, loading: asyncio.Future[AsyncLLM]) -> int:
        engine = await loaded(loading, self._signals)
        if engine is None:
            self._announce("Stopped while the engine was loading.")
            return 0
        try:
            if engine.tokenizer is not None:
                await asyncio.to_thread(self._service.model.learn_dialect, engine.tokenizer)
            self._service.attach(engine)
            self._ready(engine)
            stopped = await asyncio.create_task(watch_engine(engine, self._signals))
            return await (self._drain(engine) if stopped else self._end_without_engine(engine))
        finally:
            await engine.shutdown(kill_after=ENGINE_EXIT_SECONDS)

    async def _drain(self, engine: AsyncLLM | None = None) -> int:
        """New requests get 503 from now on; those that run may finish. ``engine``: that all of them need."""
        for each in self._services:
            each.model.state = State.DRAINING
        limit = self._service.config.shutdown_timeout
        if count := running(self._services):
            self._announce(f"Stopping: {count} running requests get up to {limit:g} s (press again to end them now).")

        def died() -> bool:
            return engine is not None and engine.dead

        await until(lambda: not running(self._services) or self._signals.count > 1 or died(), limit)
        if engine is not None and engine.dead:
            return await self._end_without_engine(engine)
        forced = self._signals.count >= 2
        told = "The server is shutting down and could not wait for this request; send it to another."
        await cut(self._services, Unavailable(told))
        return 1 if forced else 0

    async def _end_without_engine(self, engine: AsyncLLM) -> int:
        if self._service.limits.counters.fd < 0:  # of front ends below a parent, that says it
            log.error("The engine has died or hangs, and the server ends: %s", engine.ailment)
        await end_dead(self._service)
        return 1


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


# --- connections

AT_ONCE = 64  # that one front end alone takes in one turn of its loop
LEAVE_SECONDS = 0.001  # then it takes one;
# after so many in a row it takes twice as many each time: another that waits for a core still gets its share
PATIENCE = 16
HANDSHAKE_SECONDS = 10.0  # that a client has for TLS
MAX_HANDSHAKES = 256  # under way; the oldest gives way to the next, so that clients who never finish keep nobody out
SHUTDOWN_SECONDS = 2.0  # for its last word in TLS
FULL_SECONDS = 0.1  # without descriptors or memory: until some are free again
_FULL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Acceptor:
    """``create`` makes a protocol for each connection; ``page`` is ours, ``pages`` are everybody's; ``tls``: None is
    plain."""

    def __init__(
        self,
        sock: socket.socket,
        create: Callable[[], asyncio.Protocol],
        page: Page,
        pages: Sequence[Page],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sock = sock
        self._create = create
        self._tls = tls
        self._page = page
        self._others = [each for each in pages if each is not page]
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._left = 0  # times in a row that it has left the others the chance
        self._tasks: dict[asyncio.Task[None], None] = {}  # connections that are not made yet, oldest first

    def start(self) -> None:
        self._page.up = True
        self._loop.add_reader(self._sock.fileno(), self._ready)

    def close(self) -> None:
        self._page.up = False
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())

    def _ready(self) -> None:
        if not self._others:
            self._take(AT_ONCE)
        elif self._has_more():
            self._left += 1
            self._rest(LEAVE_SECONDS, 1 << min(max(self._left - PATIENCE, 0), AT_ONCE.bit_length()))
        else:
            self._left = 0
            self._take(1)

    def _has_more(self) -> bool:
        """By more than an eighth: few connections are dealt out evenly, among many a few do not matter."""
        fewest = min((each.connections for each in self._others if each.up), default=self._page.connections)
        return self._page.connections > fewest + fewest // 8

    def _rest(self, seconds: float, then: int) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._pause = self._loop.call_later(seconds, self._resume, then)

    def _resume(self, count: int) -> None:
        self._pause = None
        if self._take(count):
            self._loop.add_reader(self._sock.fileno(), self._ready)

    def _take(self, count: int) -> bool:
        """False where there is no room for a connection: it waits in the kernel."""
        # those hold descriptors, too, and nobody has given way to them yet
        under_way = 0 if self._tls else len(self._tasks)
        for _ in range(min(count, AT_ONCE - under_way)):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return True
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                log.error("No connection can be accepted: %s; trying again in %g s.", error.strerror, FULL_SECONDS)
                self._rest(FULL_SECONDS, 1)
                return False
            task = self._loop.create_task(self._serve(sock))
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))
            if self._tls is not None and len(self._tasks) > MAX_HANDSHAKES:
                oldest = next(iter(self._tasks))
                del self._tasks[oldest]
                oldest.cancel()
        return True

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._create, sock)
            else:
                await self._loop.connect_accepted_socket(
                    self._create,
                    sock,
                    ssl=self._tls,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
        except OSError:  # it is gone again, speaks no TLS, shows no certificate, or takes too long
            sock.close()
