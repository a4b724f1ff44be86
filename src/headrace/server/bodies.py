"""Request bodies: received under limits of size, time and memory in all, then decoded and checked where nothing else waits for it.

What lives here: the way from ASGI messages to a parsed request. What may not: JSON itself (wire.py), fields (protocol/), answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from headrace.errors import Overloaded, PayloadTooLarge
from headrace.server.exchange import Exchange, Message
from headrace.server.fields import Field
from headrace.server.http_errors import ClientLeft, RequestTimeout, UnsupportedMediaType
from headrace.server.ignored_fields import IgnoredFields, split
from headrace.server.threads import Threads
from headrace.server.wire import decode_object

IDLE_SECONDS = 30.0  # between two pieces of a body
WHOLE_SECONDS = 300.0  # for all of it
HELD_BODIES = 8  # as many of the largest allowed may be in memory at once
_INLINE_BYTES = 64 * 1024  # decoding is faster than tokenising
_PATIENT_BYTES = 256 * 1024  # what is longer waits its turn for every further piece

Parsed = TypeVar("Parsed")


class _Turns:
    """One waiter goes on in each turn of the event loop, so that a crowd of large bodies leaves most of every turn to the streams."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._calling = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if not self._calling:
            self._calling = True
            loop.call_soon(self._call, loop)
        await turn

    def _call(self, loop: asyncio.AbstractEventLoop) -> None:
        called = False
        while self._waiting and not called:
            turn = self._waiting.popleft()
            if called := not turn.done():
                turn.set_result(None)
        self._calling = bool(self._waiting)
        if self._calling:
            loop.call_soon(self._call, loop)


class Bodies:
    """All bodies that a server holds. ``max_bytes``: of one; nothing larger is ever in memory.

    ``ignored`` hears of fields that their route does not know, which are left out then; None: they are errors.
    """

    def __init__(self, max_bytes: int, threads: Threads, ignored: IgnoredFields | None = None) -> None:
        self._ignored = ignored
        self.max_bytes = max_bytes
        self._threads = threads
        self._limit = HELD_BODIES * max_bytes
        self._turns = _Turns()
        self._held: dict[Exchange, int] = {}
        self._total = 0

    async def read(self, exchange: Exchange, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
        """The parsed body, which counts as held until ``release``. Raises 408, 413, 415, 429 and 400 errors."""
        _check_kind(exchange)
        body = await self._receive(exchange)
        size = len(body) if len(body) > _INLINE_BYTES else 0
        if self._ignored is None:
            return await self._threads.run(size, lambda: parse(decode_object(body, pack=True)), exchange.tenant)
        parsed, unknown = await self._threads.run(size, lambda: _parse_known(body, exchange.fields, parse), exchange.tenant)
        if unknown:
            self._ignored.note(exchange.route, unknown)
        return parsed

    def release(self, exchange: Exchange) -> None:
        """Nothing of its body is needed any more. May be called again."""
        self._total -= self._held.pop(exchange, 0)

    async def _receive(self, exchange: Exchange) -> bytearray:
        too_large = PayloadTooLarge(f"The body is larger than {self.max_bytes} bytes; send less.", code="body_too_large")
        announced = int(exchange.header(b"content-length") or b"0")
        # A client that waits for 100 Continue has sent nothing yet; what is far too large is not even read to be thrown away.
        if announced > self._most_dropped or (announced > self.max_bytes and exchange.header(b"expect") is not None):
            raise too_large
        body, received, more = bytearray(), 0, True
        deadline = time.perf_counter() + WHOLE_SECONDS
        while more:
            if received > _PATIENT_BYTES:
                await self._turns.wait()
            message = await _receive_piece(exchange, deadline)
            piece: bytes = message["body"]
            received += len(piece)
            more = message["more_body"]
            if received <= self.max_bytes:
                self._hold(exchange, len(piece))
                body += piece
            elif received > self._most_dropped:
                raise too_large
        # A client that is still sending would not read an answer, so a body that is too large is dropped piece by piece before.
        if received > self.max_bytes:
            raise too_large
        return body

    @property
    def _most_dropped(self) -> int:
        return 4 * self.max_bytes + 2**20

    def _hold(self, exchange: Exchange, size: int) -> None:
        if self._total + size > self._limit:
            raise Overloaded(f"Large bodies fill the {self._limit} bytes that are kept for them; try again in 1 s.", retry_after=1)
        self._total += size
        self._held[exchange] = self._held.get(exchange, 0) + size


def _parse_known(
    body: bytearray, fields: Iterable[Field], parse: Callable[[dict[str, Any]], Parsed]
) -> tuple[Parsed, list[str]]:
    known, unknown = split(decode_object(body, pack=True), fields)
    return parse(known), unknown


def _check_kind(exchange: Exchange) -> None:
    kind = (exchange.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise UnsupportedMediaType("The body must be JSON; send Content-Type: application/json.")
    if (exchange.header(b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise UnsupportedMediaType("Compressed bodies are not taken; send the JSON as it is.")


async def _receive_piece(exchange: Exchange, deadline: float) -> Message:
    try:
        async with asyncio.timeout(min(IDLE_SECONDS, max(deadline - time.perf_counter(), 0.0))):
            message = await exchange.receive()
    except TimeoutError:
        raise RequestTimeout("The body did not arrive in time; send it at once.") from None
    if message["type"] == "http.disconnect":
        raise ClientLeft("The client left while sending its request.")
    return message
