"""Connections: taking them (TLS, where it is spoken), how many there may be, and HTTP/1.1 over each: requests in,
answers out in their order, its limits.

Size, number and time of headers are limited, and the time that a client takes nothing; errors are JSON; HTTP/1.0 gets
no chunks; upgrades are ignored, half-closed clients answered, early answers delivered. httptools reads the bytes.

A connection that waits (for a request, or for the rest of one) costs its client nothing, so it is the first to go,
the longest waiting before the others; one whose request is being answered stays. Thousands of idle or slow clients
cannot lock anybody out.

What lives here: connections, counting them, choosing who goes. What may not: routes, bodies (limits.py limits them),
the listening socket's life (lifecycle.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import unquote

import httptools

from headrace.errors import HeadraceError, Unavailable
from headrace.server.exchange import CLOSE, CONTINUE, PING, Exchange, head_of
from headrace.server.exposition import CounterPage
from headrace.server.http_errors import HeadersTooLarge, HttpError, RequestTimeout
from headrace.server.wire import encode, error_object

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
WAITING_BYTES = 64 * 1024  # of a body that no handler reads, or of an answer for a client before its answer does
KEEP_ALIVE_SECONDS = 60  # without a request
HEADER_SECONDS = 20.0  # from a connection's or a request's first moment to the end of its headers
UNREAD_SECONDS = 65.0  # and
UNREAD_BYTES = 32 * 1024  # that a client has to take in these; streams have a limit of their own, just below
LINGER_SECONDS = 5.0  # and
LINGER_BYTES = 64 * 2**20  # that a client may go on sending after an answer that came before its request was whole
PROBE_SECONDS = 0.05, 5.0  # between looks whether a client that ceased to send is still there: at first, and at most

MAX_CONNECTIONS = 4096
_OTHER_FILES = 128  # descriptors for what is no client, for a turn's new connections, and those that give way to them
_FEWEST = 16
_TURNED_AWAY = 16  # of those who found no room, that may stay until they have read it


log = logging.getLogger("headrace.server")


class Connection(asyncio.Protocol):
    """One client's. ``answer`` is called for each of its requests, one after the other."""

    transport: asyncio.Transport

    def __init__(self, answer: Callable[[Exchange], Awaitable[None]], connections: Connections) -> None:
        self._answer = answer
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._parser = self._create_parser()
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()  # of the request that is being read
        self._header_bytes = 0
        self._silent_bytes = 0  # received since anything of a body came out of them: trailers and chunk extensions
        self._drained = 0  # bytes received while it lingers
        self._progress = False
        self._refusal: HttpError | None = None
        self._read: Exchange | None = None  # the last whose headers have come
        self._answered: Exchange | None = None  # whose turn it is
        self._queue: deque[Exchange] = deque()  # behind it
        self._paused = False  # reading is
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = False

    def _create_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        # The first of several pipelined requests may say close: it is answered.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(WAITING_BYTES)  # with TLS it would be half a megabyte
        if self._connections.enter(self):
            self._await_headers()
        else:
            told = f"All {self._connections.limit} connections of this server are in use; try again in 5 s."
            self._refuse(Unavailable(told, retry_after=5))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._stop(*self._timers)
        self._connections.leave(self)
        self._writable.set()
        if self._answered is not None:
            self._answered.leave()
        self._queue.clear()
        self._read = self._answered = self._parser = None  # they hold this connection, which is to be gone at once

    def abort(self) -> None:
        self.transport.abort()

    def shut_down(self) -> None:
        """No further request is answered."""
        if self._answered is None:
            self.transport.close()
        else:
            self._answered.keep_alive = False

    # --- timers, by name

    def _after(self, name: str, seconds: float, call: Callable[..., object], *arguments: Any) -> None:
        self._stop(name)
        self._timers[name] = self._loop.call_later(seconds, call, *arguments)

    def _stop(self, *names: str) -> None:
        for name in names:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

    # --- what the client sends

    def data_received(self, data: bytes) -> None:
        # Names and values reach on_header only when complete; a single endless one is counted here.
        if self.transport.is_closing():
            return
        if "linger" in self._timers:
            self._drained += len(data)
            if self._drained > LINGER_BYTES:
                self.abort()
            return
        if "headers" in self._timers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and b"\r\n\r\n" not in data:
                self._refuse(_too_large())
                return
        self._progress = False
        self._parse(data)
        self._silent_bytes = 0 if self._progress else self._silent_bytes + len(data)
        if self._silent_bytes > 2 * MAX_HEADER_BYTES:
            self._refuse(_too_large())

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._ignore_upgrade()
            except httptools.HttpParserError:
                told = "The bytes received are not a valid HTTP/1.1 request; check the client."
                self._refuse(self._refusal or HttpError(told, code="invalid_http"))
                return

    def _ignore_upgrade(self) -> None:
        """The parser takes what follows for another protocol. A new one reads the same head without the offer, and
        then the body."""
        lines = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(lines))
        self._parser = self._create_parser()
        self._parser.feed_data(head)

    def eof_received(self) -> bool:
        """A client that has sent its request and will send no more still gets its answer, where TCP can tell that
        from leaving."""
        tls, asked = self.transport.get_extra_info("sslcontext"), self._read
        if tls is not None or "linger" in self._timers or asked is None or asked.complete or asked.more_body:
            return False
        self._probe(PROBE_SECONDS[0])
        return True

    def _probe(self, seconds: float) -> None:
        """One that has left altogether answers with a reset, and only if it is sent something."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
            return
        if self._answered is not None and self._answered.begun:
            self._answered.comment(PING)
        elif self._answered is not None and self._answered.http_version != "1.0":
            self.write(CONTINUE)
        self._after("probe", seconds, self._probe, min(2 * seconds, PROBE_SECONDS[1]))

    def on_message_begin(self) -> None:
        self._url, self._headers, self._progress = b"", [], True
        self._stop("idle")
        if "headers" not in self._timers:
            self._await_headers()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        if len(self._headers) > MAX_HEADERS:
            self._refusal = HeadersTooLarge(f"The request has more than {MAX_HEADERS} headers; send fewer.")
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._progress = True
        method, version = self._parser.get_method(), self._parser.get_http_version()
        if method == b"CONNECT":
            self._refusal = HttpError("This server is no proxy; send the request itself.", code="invalid_http")
            raise self._refusal
        if self._parser.should_upgrade():
            return
        self._stop("headers")
        url = httptools.parse_url(self._url)
        path = unquote(url.path.decode("ascii"))
        exchange = Exchange(self, method.decode("ascii"), path, url.query or b"", self._headers, version)
        exchange.keep_alive = version != "1.0" and self._parser.should_keep_alive()
        self._headers = []  # trailers, which are not used, are not added to what has been judged
        self._read = exchange
        if self._answered is None:
            self._start(exchange)
        else:
            self._pause_reading()
            self._queue.append(exchange)

    def on_body(self, body: bytes) -> None:
        self._progress = True
        if self._read is not None and not self._read.complete:
            self._read.take(body, more=True)
            if len(self._read.received) > WAITING_BYTES:
                self._pause_reading()

    def on_message_complete(self) -> None:
        self._progress = True
        if not self._parser.should_upgrade() and self._read is not None and not self._read.complete:
            self._read.take(b"", more=False)
            self._connections.work(self)

    def _pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # --- one request

    def _start(self, exchange: Exchange) -> None:
        self._answered = exchange
        exchange.task = self._loop.create_task(self._serve(exchange))

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self._answer(exchange)
        finally:
            if not exchange.complete and not self.lost:  # a clean end would look like success
                self._close()

    def answered(self, exchange: Exchange) -> None:
        """The next may have its turn."""
        if self.lost:
            return
        self._answered = None
        if not exchange.keep_alive:
            self._close()
        elif not self.transport.is_closing() and "linger" not in self._timers:
            self._go_on()
        if self._answered is None:
            self._connections.wait(self)
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_reader()

    def _go_on(self) -> None:
        self.resume_reading()
        if self._queue:
            self._start(self._queue.popleft())
        elif "probe" in self._timers:
            self.transport.close()
        else:
            self._after("idle", KEEP_ALIVE_SECONDS, self._end_idle)

    def _end_idle(self) -> None:
        """What waits after so long waits for a client that does not read."""
        self.abort() if self.transport.get_write_buffer_size() else self.transport.close()

    def _close(self) -> None:
        if self._read is not None and self._read.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Closes when the client has: closing on unread data is a reset, which destroys an answer on
        its way."""
        if not self._connections.may_linger(self):
            self.transport.close()
        elif "linger" not in self._timers:
            self._after("linger", LINGER_SECONDS, self.abort)
            self.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    # --- what the client reads

    def write(self, data: bytes) -> None:
        if data and not (self.lost or self.transport.is_closing() or "linger" in self._timers):
            self.transport.write(data)

    async def drain(self) -> None:
        """Returns when the client has taken nearly all, or left."""
        await self._writable.wait()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._watch_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._stop("unread")
        self._writable.set()

    def _watch_reader(self) -> None:
        if "unread" not in self._timers:
            self._after("unread", UNREAD_SECONDS, self._check_reader, self.transport.get_write_buffer_size())

    def _check_reader(self, before: int) -> None:
        self._stop("unread")
        if self.transport.get_write_buffer_size() > before - UNREAD_BYTES:
            self.abort()
        else:
            self._watch_reader()

    # --- refusals

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._after("headers", HEADER_SECONDS, self._refuse_late)

    def _refuse_late(self) -> None:
        self._refuse(RequestTimeout(f"The headers did not arrive within {HEADER_SECONDS:.0f} s; send them at once."))

    def _refuse(self, error: HeadraceError) -> None:
        self._stop("headers")
        if self.transport.is_closing() or "linger" in self._timers:
            return
        if self._read is None or self._read.complete or not self._read.begun:
            body = encode(error_object(error))
            about = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), CLOSE)
            retry = ((b"retry-after", b"%d" % error.retry_after),) if isinstance(error, Unavailable) else ()
            self.write(head_of(error.status, (*about, *retry)) + body)
        self._linger()


class Connections:
    """Those of one front end."""

    def __init__(self, limit: int, page: CounterPage) -> None:
        """``page``: where the number is to be read by others."""
        self.limit = limit
        self._page = page
        self._members: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # in the order in which they began to wait
        self._turned_away: set[Connection] = set()

    def enter(self, member: Connection) -> bool:
        """Takes a connection in, at the cost of another if need be; False when all are at work."""
        if len(self._members) >= self.limit and not self._make_room():
            return False
        self._members.add(member)
        self._waiting[member] = None
        self._page.connections = len(self._members)
        return True

    def _make_room(self) -> bool:
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self.leave(longest)
        longest.abort()
        return True

    def wait(self, member: Connection) -> None:
        """Its request has been answered; the next one may take its time."""
        if member in self._members:
            self._waiting.pop(member, None)
            self._waiting[member] = None

    def work(self, member: Connection) -> None:
        """It has sent a whole request."""
        self._waiting.pop(member, None)

    def may_linger(self, member: Connection) -> bool:
        """It has its answer and is still sending: it is the next to go, or one of few that never were in."""
        if member not in self._members and len(self._turned_away) < _TURNED_AWAY:
            self._turned_away.add(member)
        self.wait(member)
        return member in self._members or member in self._turned_away

    def leave(self, member: Connection) -> None:
        self._members.discard(member)
        self._turned_away.discard(member)
        self._waiting.pop(member, None)
        self._page.connections = len(self._members)

    async def close(self, seconds: float) -> None:
        """Those that wait end at once, the others when their last words have left, or after ``seconds``."""
        for member in [*self._members]:
            member.shut_down()
        deadline = time.monotonic() + seconds
        while self._members and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for member in [*self._members, *self._turned_away]:
            member.abort()


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"The headers are longer than {MAX_HEADER_BYTES} bytes; send fewer.")


def connection_limit(max_queue: int) -> int:
    """As many as the queue can use and then as many again, within what the system lets this process open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(MAX_CONNECTIONS, 2 * max_queue)
    if soft != resource.RLIM_INFINITY and soft < wanted + _OTHER_FILES:
        raised = wanted + _OTHER_FILES if hard == resource.RLIM_INFINITY else min(wanted + _OTHER_FILES, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        wanted = min(wanted, soft - _OTHER_FILES)
    return max(wanted, _FEWEST)


# --- taking them off the listening socket, which all front ends share

AT_ONCE = 64  # that one front end alone takes in one turn of its loop
LEAVE_SECONDS = 0.001  # then it takes one;
# after so many in a row it takes twice as many each time: another that waits for a core still gets its share
PATIENCE = 16
HANDSHAKE_SECONDS = 10.0  # that a client has for TLS
MAX_HANDSHAKES = 256  # under way; the oldest gives way to the next, so that clients who never finish block no others
SHUTDOWN_SECONDS = 2.0  # for its last word in TLS
FULL_SECONDS = 0.1  # without descriptors or memory: until some are free again
_FULL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Acceptor:
    """``create`` makes a protocol for each connection; ``page`` is ours, ``pages`` are those of all front ends; ``tls``: None is
    plain."""

    def __init__(
        self,
        sock: socket.socket,
        create: Callable[[], asyncio.Protocol],
        page: CounterPage,
        pages: Sequence[CounterPage],
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
        # those hold descriptors, too, and none has given way to them yet
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
            limits = {"ssl_handshake_timeout": HANDSHAKE_SECONDS, "ssl_shutdown_timeout": SHUTDOWN_SECONDS}
            secured: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls, **limits}
            await self._loop.connect_accepted_socket(self._create, sock, **secured)
        except OSError:  # it is gone again, speaks no TLS, shows no certificate, or takes too long
            sock.close()
