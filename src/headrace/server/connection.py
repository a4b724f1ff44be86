"""uvicorn's HTTP/1.1 connection with the limits it does not have: size, number and time of headers; JSON errors.

What lives here: one protocol class. What may not: routes, bodies (exchange.py limits them).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headrace.server.http_errors import HeadersTooLarge, HttpError, RequestTimeout
from headrace.server.wire import encode, error_object

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
HEADER_SECONDS = 20.0  # from a connection's or a request's first moment to the end of its headers


class Connection(HttpToolsProtocol):
    """One client connection. ``scope["transport"]`` lets the server cut it without waiting for the client to read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes = 0
        self._refusal: HttpError | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Names and values reach on_header only when complete; a single endless one is counted here.
        if self._header_timer is not None:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and b"\r\n\r\n" not in data:
                self._refuse(HeadersTooLarge(f"The headers are longer than {MAX_HEADER_BYTES} bytes; send fewer."))
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
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
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not read: JSON as everywhere."""
        self._refuse(self._refusal or HttpError("The bytes received are not a valid HTTP/1.1 request; check the client.", code="invalid_http"))

    def _arm(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._expire)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _expire(self) -> None:
        self._refuse(RequestTimeout(f"The headers did not arrive within {HEADER_SECONDS:.0f} s; send them at once."))

    def _refuse(self, error: HttpError) -> None:
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = encode(error_object(error))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
