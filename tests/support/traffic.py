"""Many clients at once, as bytes: each request on a connection of its own, read to its end or cut off where the caller
says.

What lives here: asking and cutting. What may not: what answers must look like (wire_rules.py), processes (serving.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.support.serving import events_of, post_bytes

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back. ``status`` 0: the connection ended before a status line. ``complete``: the body came to its
    proper end."""

    status: int
    head: bytes
    body: bytes
    complete: bool
    seconds: float
    first: float = 0.0  # seconds to the first byte of the body
    longest: float = 0.0  # seconds between two pieces of the body, at most

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        return events_of(self.body)

    @property
    def retry_after(self) -> int | None:
        found = [line.split(b":")[1] for line in self.head.lower().split(b"\r\n") if line.startswith(b"retry-after:")]
        return int(found[0]) if found else None

    @property
    def told(self) -> bool:
        """The client can see how it ended: an answer, an HTTP error, an error event, or a broken body; never a clean
        end of nothing."""
        if self.status != 200 or not self.complete:
            return True
        return b"[DONE]" in self.body or b'"finish_reason"' in self.body


async def ask(port: int, path: str, body: Any, *headers: str, cut: float | None = None, timeout: float = 60.0) -> Reply:
    """One POST. ``cut``: seconds after which the client is gone, wherever the answer is then."""
    return await send(port, post_bytes(path, body, "Connection: close", *headers), cut=cut, timeout=timeout)


async def leave(port: int, path: str, body: Any) -> None:
    """One streamed POST whose client is gone as soon as it has seen the first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post_bytes(path, {**body, "stream": True}))
        await asyncio.wait_for(reader.readuntil(b"\n\n"), 60)
    finally:
        writer.transport.abort()


async def send(port: int, data: bytes, *, cut: float | None = None, timeout: float = 60.0) -> Reply:
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(_read(reader, begun), timeout if cut is None else cut)
        assert cut is not None, f"no end of the answer after {timeout} s"
        return Reply(0, b"", b"", False, cut)
    except ConnectionError:
        return Reply(0, b"", b"", False, time.perf_counter() - begun)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, begun: float) -> Reply:
    data, first, longest, last = b"", 0.0, 0.0, begun
    while True:
        try:
            piece = await reader.read(1 << 16)
        except ConnectionError:
            piece = b""
        now = time.perf_counter()
        if not piece:
            break
        if first:
            longest = max(longest, now - last)
        elif b"\r\n\r\n" in data + piece:
            first = now - begun
        data, last = data + piece, now
    return _parsed(data, time.perf_counter() - begun, first, longest)


def _parsed(data: bytes, seconds: float, first: float, longest: float) -> Reply:
    head, gap, rest = data.partition(b"\r\n\r\n")
    if not gap:
        return Reply(0, head, b"", False, seconds)
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" not in head.lower():
        return Reply(status, head, rest, True, seconds, first, longest)
    parts, complete = [], False
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        complete = count == 0 and rest == b"\r\n"
        if count == 0:
            break
        parts.append(rest[:count])
        rest = rest[count + 2 :]
    return Reply(status, head, b"".join(parts), complete, seconds, first, longest)


async def all_of(work: Iterable[Awaitable[Result]]) -> list[Result]:
    return list(await asyncio.gather(*work))


def together(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """All of it at once, from a program that is not asynchronous itself."""
    return asyncio.run(all_of(work))
