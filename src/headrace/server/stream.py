"""Server-sent events on one exchange: a lazy start, keep-alives, slow readers, and ends that no client can mistake.

What lives here: SSE framing and its timing. What may not: the shape of events (answers.py), the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.errors import HeadraceError
from headrace.server.exchange import Exchange
from headrace.server.http_errors import ClientTooSlow

PING_SECONDS = 8.0  # silence after which a comment is sent; clients must hear something every 10 s
LAGGARD_SECONDS = 60.0  # a client that takes nothing for so long is cut off
PULSE_SECONDS = 1.0

PING = b": ping\n\n"
_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class EventStream:
    """The status line leaves with the first event or the first ping, so that errors found before are plain HTTP errors."""

    __slots__ = ("_busy_since", "_exchange", "_last", "_ping")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._last = time.perf_counter()
        self._busy_since: float | None = None  # a send is waiting for the client to read
        self._ping: asyncio.Task[None] | None = None

    async def write(self, events: str) -> None:
        """ASCII events. Returns when the connection has taken them."""
        if self._exchange.status is None:
            await self._exchange.begin(200, _HEADERS)
        self._busy_since = self._last = time.perf_counter()
        await self._exchange.write(events.encode("ascii"))
        self._busy_since = None

    async def finish(self, events: str) -> None:
        if self._exchange.status is None:
            await self._exchange.begin(200, _HEADERS)
        self._busy_since = time.perf_counter()
        await self._exchange.finish(events.encode("ascii"))
        self._busy_since = None

    def beat(self, now: float) -> None:
        """Called every PULSE_SECONDS."""
        if self._busy_since is not None:
            if now - self._busy_since > LAGGARD_SECONDS:
                self._exchange.end(ClientTooSlow(f"The client took nothing for {LAGGARD_SECONDS:.0f} s."))
        elif now - self._last > PING_SECONDS and not self._exchange.finished:
            self._ping = asyncio.create_task(self._send_ping())

    async def _send_ping(self) -> None:
        if self._exchange.status is None:
            await self._exchange.begin(200, _HEADERS)
        self._busy_since = self._last = time.perf_counter()
        await self._exchange.write(PING)
        self._busy_since = None


async def fail_stream(exchange: Exchange, error: HeadraceError) -> None:
    """After a stream began: an error event, then a broken body; a clean end would look like success.

    The application returns without completing the body; the connection then closes after what was written.
    """
    if not isinstance(error, ClientTooSlow):
        await exchange.write(exchange.errors.event(error))
    exchange.finished = True


class Pulse:
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
