"""One HTTP request and its answer, as handlers see them: reply once or stream, end early.

What lives here: the ASGI messages. What may not: routes, bodies (bodies.py), JSON fields, the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import HeadraceError, Overloaded, PayloadTooLarge, Unauthorized, Unavailable
from headrace.request import RequestTimes
from headrace.server.fields import Field
from headrace.server.http_errors import ClientLeft, MethodNotAllowed, RequestTimeout
from headrace.server.wire import ErrorShape, encode

RETRY_SECONDS = 5  # after which a client may try again, where the error does not say
_PART_BYTES = 64 * 1024  # of a large answer, that the connection takes at once
_MAX_REQUEST_ID = 128  # characters of a client's X-Request-Id

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Exchange:
    """``status`` is set once the answer has begun. ``cause`` says why the exchange was ended from outside."""

    __slots__ = (
        "_send", "_task", "_unframed", "_watch", "arrival", "cached_tokens", "cause", "completion_tokens", "cors", "error", "errors", "fields",
        "finish_reason",
        "finished", "headers", "key_name", "method", "path", "prompt_tokens", "receive", "request_id", "route", "scope", "status", "tenant", "times",
    )  # fmt: skip

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self.arrival = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.request_id = self._client_request_id() or uuid.uuid4().hex
        self.route = "-"  # the matched route's template: what logs and metrics show
        self.fields: tuple[Field, ...] = ()  # of the matched route's body
        self.errors = ErrorShape()  # the matched route's, or of the answer that has begun
        self.cors: tuple[tuple[bytes, bytes], ...] = ()  # of every answer, for a page of another site
        self.status: int | None = None
        self.finished = False
        self._unframed = False  # the answer ends with the connection
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

    # --- the answer

    async def reply(self, status: int, body: bytes, content_type: bytes = b"application/json", headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        await self.begin(status, (*headers, (b"content-type", content_type), (b"content-length", b"%d" % len(body))))
        self.finished = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_pieces(self, pieces: Sequence[bytes]) -> None:
        """A large answer, of which little more than a piece waits for the client in the connection. Returns when it has taken nearly all."""
        size = sum(map(len, pieces))
        if size <= _PART_BYTES:
            return await self.reply(200, b"".join(pieces))
        await self.begin(200, ((b"content-type", b"application/json"), (b"content-length", b"%d" % size)))
        self.finished = True
        for part in _parts(pieces):
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply_json(self, value: Any) -> None:
        await self.reply(200, encode(value))

    async def reply_error(self, error: HeadraceError) -> None:
        await self.reply(error.status, self.errors.body(error), headers=_error_headers(error))

    async def begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.status = status
        if self.scope["http_version"] == "1.0" and all(name != b"content-length" for name, _ in headers):
            self.scope["unframe"]()
            self._unframed, headers = True, (*headers, (b"connection", b"close"))
        always = ((b"x-request-id", self.request_id.encode()), *self.cors)
        await self._send({"type": "http.response.start", "status": status, "headers": [*always, *headers]})

    async def write(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self, body: bytes) -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": body, "more_body": self._unframed})

    # --- ends from outside

    def watch_disconnect(self) -> None:
        """From now on a client that leaves ends this exchange."""
        self._watch = asyncio.create_task(self._wait_for_disconnect())

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.end(ClientLeft("The client left."))

    def end(self, cause: HeadraceError) -> None:
        """Cancels the handler; the application answers with ``cause`` as far as that is still possible."""
        if self.cause is None and not self.finished and self._task is not None:
            self.cause = cause
            self._task.cancel()

    def cut(self) -> None:
        """Drops the connection at once, with whatever the client has not read."""
        self.finished = True
        transport = self.scope.get("transport")
        if transport is not None:
            transport.abort()

    def close(self) -> None:
        """The handler is done: nothing may cancel its task any more."""
        self.finished = True
        self._task = None
        if self._watch is not None:
            self._watch.cancel()


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


def _error_headers(error: HeadraceError) -> tuple[tuple[bytes, bytes], ...]:
    headers: list[tuple[bytes, bytes]] = []
    if error.status in (429, 503):
        seconds = error.retry_after if isinstance(error, (Overloaded, Unavailable)) else RETRY_SECONDS
        headers.append((b"retry-after", b"%d" % min(max(seconds, 1), 30)))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, (PayloadTooLarge, RequestTimeout)):
        headers.append((b"connection", b"close"))
    return tuple(headers)
