"""uvicorn's HTTP/1.1 connection with the limits it does not have: number of connections; size, number and time of headers;
time that a client takes nothing; JSON errors; HTTP/1.0 without chunks; upgrades ignored, half-closed clients answered, early
answers delivered.

What lives here: one protocol class. What may not: routes, bodies (bodies.py limits them), which connection has to go (crowd.py).
"""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.errors import HeadraceError, Unavailable
from headrace.server.crowd import Crowd
from headrace.server.http_errors import HeadersTooLarge, HttpError, RequestTimeout
from headrace.server.stream import PING
from headrace.server.wire import encode, error_object

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
WRITE_BYTES = 64 * 1024  # that may wait for a client before its answer does
HEADER_SECONDS = 20.0  # from a connection's or a request's first moment to the end of its headers
UNREAD_SECONDS = 65.0  # in which a client has to take UNREAD_BYTES of what waits for it; streams have a limit of their own, just below
UNREAD_BYTES = 32 * 1024
LINGER_SECONDS = 5.0  # and
LINGER_BYTES = 64 * 2**20  # that a client may go on sending after an answer that came before its request was whole
PROBE_SECONDS = 0.05, 5.0  # between looks whether a client that ceased to send is still there: at first, and at most

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # every client passes over it
_PING_CHUNK = b"%x\r\n%b\r\n" % (len(PING), PING)


class Connection(HttpToolsProtocol):
    """One client connection. ``scope["transport"]`` lets the server cut it without waiting for the client to read."""

    def __init__(self, *args: Any, crowd: Crowd, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._crowd = crowd
        self._header_bytes = 0
        self._silent_bytes = 0  # received since anything of a body came out of them: trailers and chunk extensions
        self._progress = False
        self._refusal: HttpError | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._drained = 0  # bytes received while it lingers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.scheme == "https":
            transport.set_write_buffer_limits(WRITE_BYTES)  # else half a megabyte for each client that does not read
        if self._crowd.enter(self):
            self._arm()
        else:
            self._refuse(Unavailable(f"All {self._crowd.limit} connections of this server are in use; try again in 5 s.", retry_after=5))

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._stop_unread_timer()
        for timer in (self._probe_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._crowd.leave(self)
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.transport = self.transport  # not this object, which would hold itself

    def evict(self) -> None:
        self.transport.abort()

    # --- what the client sends

    def data_received(self, data: bytes) -> None:
        # Names and values reach on_header only when complete; a single endless one is counted here.
        if self.transport.is_closing():
            return
        if self._linger_timer is not None:
            self._drained += len(data)
            if self._drained > LINGER_BYTES:
                self.transport.abort()
            return
        if self._header_timer is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and b"\r\n\r\n" not in data:
                self._refuse_headers()
                return
        self._progress = False
        self._unset_keepalive_if_required()
        self._parse(data)
        self._silent_bytes = 0 if self._progress else self._silent_bytes + len(data)
        if self._silent_bytes > 2 * MAX_HEADER_BYTES:
            self._refuse_headers()

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                self._ignore_upgrade()
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _ignore_upgrade(self) -> None:
        """The parser takes what follows for another protocol. A new one reads the same head without the offer, and then the body."""
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode(), b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has sent its request and will send no more still gets its answer, where TCP can tell that from leaving."""
        if self.scheme == "https" or self._linger_timer is not None or self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self._probe(PROBE_SECONDS[0])
        return True

    def _probe(self, seconds: float) -> None:
        """One that has left altogether answers with a reset, and only if it is sent something."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.cycle.response_started and self.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)
        elif self.cycle.chunked_encoding and not self.cycle.response_complete:  # only streams of events come in chunks
            self.transport.write(_PING_CHUNK)
        self._probe_timer = self.loop.call_later(seconds, self._probe, min(2 * seconds, PROBE_SECONDS[1]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._progress = True
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["transport"] = self.transport
        if self._header_timer is None:
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = HeadersTooLarge(f"The request has more than {MAX_HEADERS} headers; send fewer.")
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._progress = True
        if self.parser.get_method() == b"CONNECT":
            self._refusal = HttpError("This server is no proxy; send the request itself.", code="invalid_http")
            raise self._refusal
        if self.parser.should_upgrade():
            return
        self._disarm()
        super().on_headers_complete()
        self.cycle.transport = self  # type: ignore[assignment]  # which hears of its close
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        if scope["http_version"] == "1.0":  # only where it is needed: a connection that holds itself waits for the garbage collector
            scope["unframe"] = self._unframe
        self.headers = []  # trailers, which nobody reads, are not added to what has been judged

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if not self.cycle.response_complete:
            self._crowd.work(self)

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read: JSON as everywhere."""
        self._refuse(self._refusal or HttpError("The bytes received are not a valid HTTP/1.1 request; check the client.", code="invalid_http"))

    # --- what the client reads

    # What a cycle asks of its transport: is_closing, write and close.

    def is_closing(self) -> bool:
        return self.transport.is_closing()

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def close(self) -> None:
        if self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Closes when the client has: closing on data that nobody has read is a reset, which destroys an answer on its way."""
        if not self._crowd.may_linger(self):
            self.transport.close()
        elif self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def on_response_complete(self) -> None:
        if self._linger_timer is None:
            super().on_response_complete()
            if self._probe_timer is not None and self.cycle.response_complete:
                self.transport.close()
        if not self.pipeline:
            self._crowd.wait(self)
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._start_unread_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._stop_unread_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # after so long it waits for a client that does not read
        else:
            super().timeout_keep_alive_handler()

    def _start_unread_timer(self) -> None:
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reader, self.transport.get_write_buffer_size())

    def _check_reader(self, before: int) -> None:
        self._unread_timer = None
        if self.transport.get_write_buffer_size() > before - UNREAD_BYTES:
            self.transport.abort()
        else:
            self._start_unread_timer()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _unframe(self) -> None:
        """HTTP/1.0 knows no chunks: the next body of unknown length ends with the connection."""
        self.cycle.chunked_encoding = False
        self.cycle.expected_content_length = math.inf  # type: ignore[assignment]

    # --- ends

    def _arm(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _expire(self) -> None:
        self._refuse(RequestTimeout(f"The headers did not arrive within {HEADER_SECONDS:.0f} s; send them at once."))

    def _refuse_headers(self) -> None:
        self._refuse(HeadersTooLarge(f"The headers are longer than {MAX_HEADER_BYTES} bytes; send fewer."))

    def _refuse(self, error: HeadraceError) -> None:
        self._disarm()
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = encode(error_object(error))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            if isinstance(error, Unavailable):
                head += b"retry-after: %d\r\n" % error.retry_after
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self._linger()
