"""One HTTP request and its answer, as handlers see them: read a body, reply once or stream, end early.

What lives here: the request's head, pieces of its body, the answer's head and framing; server-sent events, with a lazy
start, keep-alives, slow readers, and ends that no client can mistake. What may not: routes, limits of bodies
(limits.py), JSON fields, what events say (wire.py), the engine, when bytes leave (connection.py).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError, Overloaded, PayloadTooLarge, Unauthorized, Unavailable
from headrace.request import RequestTimes
from headrace.server.dialects.body import Body
from headrace.server.http_errors import ClientLeft, ClientTooSlow, MethodNotAllowed, RequestTimeout
from headrace.server.wire import ErrorFormat, encode

if TYPE_CHECKING:
    from headrace.server.connection import Connection

RETRY_SECONDS = 5  # after which a client may try again, where the error does not say
_PART_BYTES = 64 * 1024  # of a large answer, that the connection takes at once
_MAX_REQUEST_ID = 128  # characters of a client's X-Request-Id
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # every client passes over it
CLOSE = (b"connection", b"close")

Header = tuple[bytes, bytes]
Headers = tuple[Header, ...]


class Exchange:
    """``status`` is set once the answer has begun. ``cause`` says why the exchange was ended from outside."""

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        query: bytes,
        headers: Sequence[Header],
        http_version: str = "1.1",
    ) -> None:
        self._connection = connection
        self.method, self.path, self.query, self.headers, self.http_version = method, path, query, headers, http_version
        self.keep_alive = False  # the connection is for more requests than this
        self.received = bytearray()  # what has come of its body and was not taken
        self.more_body = True  # its end has not come
        self.whole: bytearray | None = None  # all of it, where it was looked into before its route reads it
        self._came = asyncio.Event()  # more of it, its end, or the connection's
        self._expects = (self.header(b"expect") or b"").lower() == b"100-continue"  # it waits to be asked for its body
        self._watched = False  # a client that leaves ends this exchange
        self.task: asyncio.Task[None] | None = None  # the handler's
        self.arrival = time.perf_counter()
        self.request_id = self._client_request_id() or uuid.uuid4().hex
        self.route = "-"  # the matched route's template: what logs and metrics show
        self.named = ""  # what stands in the path for the {name} in it
        self.body: type[Body] | None = None  # of the matched route
        self.errors = ErrorFormat()  # the matched route's, or of the answer that has begun
        self.cors: Headers = ()  # of every answer, for a page of another site
        self.status: int | None = None
        self.finished = False  # nothing more is to be written
        self.begun = self.complete = self._chunked = False  # of the answer as bytes
        self.cause: HeadraceError | None = None
        self.error: HeadraceError | None = None  # that it ended with
        self.tenant = ""  # whose key was sent; "" without keys
        self.key_name = ""  # the same for people: key1, key2 … in the order of --api-key
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.finish_reason: str | None = None  # of the first choice, as its times
        self.times: RequestTimes | None = None

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def client_named(self) -> bool:
        """``request_id`` is the client's."""
        return self._client_request_id() is not None

    def _client_request_id(self) -> str | None:
        """The client's own name for the request, if it is harmless to repeat; it is never a key."""
        text = (self.header(b"x-request-id") or b"").decode("latin-1").strip()
        harmless = 0 < len(text) <= _MAX_REQUEST_ID and text.isascii() and text.isprintable()
        return text if harmless else None

    # --- the body

    def take(self, piece: bytes, *, more: bool) -> None:
        """The next that has come of it."""
        self.received += piece
        self.more_body = more
        self._came.set()

    async def next_piece(self) -> bytearray:
        """What has come since the last; ``more_body`` says whether there is another. Raises ClientLeft."""
        if self._expects and not self.begun:
            self._connection.write(CONTINUE)
        self._expects = False
        self._connection.resume_reading()
        await self._came.wait()
        self._came.clear()
        if self._connection.lost:
            raise ClientLeft("The client left while sending its request.")
        piece, self.received = self.received, bytearray()
        return piece

    # --- the answer

    async def reply(self, status: int, body: bytes, kind: bytes = b"application/json", headers: Headers = ()) -> None:
        """``kind``: the body's."""
        self.finished = True
        await self.begin(status, (*headers, (b"content-type", kind), (b"content-length", b"%d" % len(body))), body)
        self._end()

    async def reply_pieces(self, pieces: Sequence[bytes]) -> None:
        """A large answer, of which little more than a piece waits for the client in the connection. Returns when it
        has taken nearly all."""
        size = sum(map(len, pieces))
        if size <= _PART_BYTES:
            return await self.reply(200, b"".join(pieces))
        await self.begin(200, ((b"content-type", b"application/json"), (b"content-length", b"%d" % size)))
        self.finished = True
        for part in _parts(pieces):
            await self.write(part)
            await asyncio.sleep(0)
        await self.finish(b"")

    async def reply_json(self, value: Any) -> None:
        await self.reply(200, encode(value))

    async def reply_error(self, error: HeadraceError) -> None:
        await self.reply(error.status, self.errors.body(error), headers=_error_headers(error))

    async def begin(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """An answer whose length is not told comes in chunks; HTTP/1.0 knows none, and the connection's end is its."""
        self.status = status
        sized = any(name == b"content-length" for name, _ in headers)
        self._chunked = not sized and self.http_version != "1.0" and self.method != "HEAD"
        framing = ((b"transfer-encoding", b"chunked"),) if self._chunked else ()
        all_headers = ((b"x-request-id", self.request_id.encode()), *self.cors, *headers, *framing)
        await self._connection.drain()
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            all_headers = (*all_headers, CLOSE)
        self.begun = True
        self._connection.write(head_of(status, all_headers) + (body if self.method != "HEAD" else b""))

    async def write(self, body: bytes) -> None:
        await self._connection.drain()
        if self.begun:
            self._connection.write(self._framed(body))

    async def finish(self, body: bytes) -> None:
        self.finished = True
        await self._connection.drain()
        self._connection.write(self._framed(body) + (b"0\r\n\r\n" if self._chunked else b""))
        self._end()

    def _framed(self, body: bytes) -> bytes:
        if self.method == "HEAD" or not body:
            return b""
        return b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body

    def _end(self) -> None:
        self.complete = True
        self._connection.answered(self)

    def comment(self, text: bytes) -> None:
        """Written between two events, where the answer is a stream of such."""
        if self._chunked and not self.complete:
            self._connection.write(self._framed(text))

    # --- ends from outside

    def watch_disconnect(self) -> None:
        """From now on a client that leaves ends this exchange."""
        self._watched = True
        if self._connection.lost:
            self.leave()

    def leave(self) -> None:
        """The client has."""
        self._came.set()
        if self._watched:
            self.end(ClientLeft("The client left."))

    def end(self, cause: HeadraceError) -> None:
        """Cancels the handler; the application answers with ``cause`` as far as that is still possible."""
        if self.cause is None and not self.finished and self.task is not None:
            self.cause = cause
            self.task.cancel()

    def cut(self) -> None:
        """Drops the connection at once, with whatever the client has not read."""
        self.finished = True
        self._connection.abort()

    def close(self) -> None:
        """The handler is done: nothing may cancel its task any more."""
        self.finished = True
        self.task = None


def head_of(status: int, headers: Headers) -> bytes:
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"HTTP/1.1 %d %b\r\n%b\r\n" % (status, HTTPStatus(status).phrase.encode(), b"".join(lines))


def _parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts of about equal size."""
    small, size = list[bytes](), 0
    for piece in pieces:
        for start in range(0, len(piece), _PART_BYTES):
            part = piece if len(piece) <= _PART_BYTES else piece[start : start + _PART_BYTES]
            small.append(part)
            size += len(part)
            if size >= _PART_BYTES:
                yield b"".join(small)
                small, size = [], 0
    yield b"".join(small)


def _error_headers(error: HeadraceError) -> Headers:
    headers: list[tuple[bytes, bytes]] = []
    if error.status in (429, 503):
        seconds = error.retry_after if isinstance(error, (Overloaded, Unavailable)) else RETRY_SECONDS
        headers.append((b"retry-after", b"%d" % min(max(seconds, 1), 30)))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, (PayloadTooLarge, RequestTimeout)):
        headers.append(CLOSE)
    return tuple(headers)


PING_SECONDS = 8.0  # silence after which a comment is sent; clients must hear something every 10 s
LAGGARD_SECONDS = 60.0  # a client that takes nothing for so long is cut off
PULSE_SECONDS = 1.0

PING = b": ping\n\n"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """The status line leaves with the first event or the first ping, so that errors found before are plain HTTP
    errors."""

    __slots__ = ("_busy_since", "_exchange", "_last", "_ping")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._last = time.perf_counter()
        self._busy_since: float | None = None  # a send is waiting for the client to read
        self._ping: asyncio.Task[None] | None = None

    async def write(self, events: str) -> None:
        """ASCII events. Returns when the connection has taken them."""
        await self._send(self._exchange.write, events.encode("ascii"))

    async def finish(self, events: str) -> None:
        await self._send(self._exchange.finish, events.encode("ascii"))

    async def _send(self, send: Callable[[bytes], Awaitable[None]], events: bytes) -> None:
        if self._exchange.status is None:
            await self._exchange.begin(200, _HEADERS)
        self._busy_since = self._last = time.perf_counter()
        await send(events)
        self._busy_since = None

    def beat(self, now: float) -> None:
        """Called every PULSE_SECONDS."""
        if self._busy_since is not None:
            if now - self._busy_since > LAGGARD_SECONDS:
                self._exchange.end(ClientTooSlow(f"The client took nothing for {LAGGARD_SECONDS:.0f} s."))
        elif now - self._last > PING_SECONDS and not self._exchange.finished:
            self._ping = asyncio.create_task(self._send(self._exchange.write, PING))


async def fail_stream(exchange: Exchange, error: HeadraceError) -> None:
    """After a stream began: an error event, then a broken body; a clean end would look like success.

    The application returns without completing the body; the connection then closes after what was written.
    """
    if not isinstance(error, ClientTooSlow):
        await exchange.write(exchange.errors.event(error))
    exchange.finished = True


class StreamPings:
    """Beats for every open stream."""

    def __init__(self) -> None:
        self._streams: set[EventStream] = set()

    def add(self, stream: EventStream) -> Callable[[], None]:
        """Returns what takes it out again."""
        self._streams.add(stream)
        return lambda: self._streams.discard(stream)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PULSE_SECONDS)
            now = time.perf_counter()
            for stream in list(self._streams):
                stream.beat(now)
