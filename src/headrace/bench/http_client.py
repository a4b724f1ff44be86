"""A light HTTP/1.1 client for streams of server-sent events: it stamps what arrives and parses it later.

What lives here: connections, requests, chunk framing, events. What may not: figures, workloads, anything about one server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import ConfigError

READ_BYTES = 1 << 16
MAX_HEAD = 1 << 16


class BrokenAnswer(Exception):
    """An answer that ended or looked as none may."""


@dataclass(slots=True)
class Answer:
    """Status and the body's events (``data:`` lines without the prefix) with the time each one's bytes were read, in seconds."""

    status: int
    content_type: str
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""  # of an answer that is no stream

    def json(self) -> Any:
        """Raises BrokenAnswer when the body is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BrokenAnswer(f"status {self.status} with a body that is not JSON") from error


class HttpClient:
    """Keeps connections open between requests. One event loop; any number of requests at once."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url is {base_url!r}; give one like http://127.0.0.1:8000.")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout = timeout
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._headers = f"Host: {parts.netloc}\r\nAccept: */*\r\n" + (f"Authorization: Bearer {api_key}\r\n" if api_key else "")

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Raises OSError, TimeoutError or BrokenAnswer."""
        data = json.dumps(body).encode()
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        return await asyncio.wait_for(self._exchange(head.encode() + data), self._timeout)

    async def get(self, path: str) -> Answer:
        """Raises OSError, TimeoutError or BrokenAnswer."""
        return await asyncio.wait_for(self._exchange(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()), self._timeout)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _exchange(self, request: bytes) -> Answer:
        reused = bool(self._idle)
        reader, writer = self._idle.pop() if reused else await self._connect()
        try:
            writer.write(request)
            answer, keep = await _Reading(reader).run()
        except BaseException as error:
            writer.close()
            if reused and isinstance(error, (ConnectionError, asyncio.IncompleteReadError)):  # closed by the server while it lay idle
                return await self._exchange(request)
            if isinstance(error, asyncio.IncompleteReadError):
                raise BrokenAnswer("the server closed the connection before it answered") from error
            raise
        if keep:
            self._idle.append((reader, writer))
        else:
            writer.close()
        return answer

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, ssl=self._tls, limit=MAX_HEAD)


class _Reading:
    """One answer being read."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._buffer = bytearray()  # of the body, up to the last whole event

    async def run(self) -> tuple[Answer, bool]:
        """The answer, and whether the connection can be used again."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, headers = _parse_head(head)
        answer = Answer(status, headers.get("content-type", ""))
        is_stream = answer.content_type.startswith("text/event-stream")
        if "chunked" in headers.get("transfer-encoding", ""):
            await self._chunks(answer, is_stream)
        elif "content-length" in headers:
            self._take(answer, is_stream, await self._reader.readexactly(int(headers["content-length"])))
        else:
            while data := await self._reader.read(READ_BYTES):
                self._take(answer, is_stream, data)
            return self._finished(answer, is_stream), False
        return self._finished(answer, is_stream), headers.get("connection", "").lower() != "close"

    async def _chunks(self, answer: Answer, is_stream: bool) -> None:
        """Raises BrokenAnswer when the chunked body ends before its last chunk."""
        raw = bytearray()
        while True:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise BrokenAnswer("the connection broke in the middle of the answer")
            raw += data
            body, done = _unchunk(raw)
            if body:
                self._take(answer, is_stream, body)
            if done:
                return

    def _take(self, answer: Answer, is_stream: bool, data: bytes) -> None:
        self._buffer += data
        if not is_stream:
            return
        now = time.perf_counter()
        *events, rest = bytes(self._buffer).replace(b"\r\n", b"\n").split(b"\n\n")
        self._buffer = bytearray(rest)
        answer.events += [(now, event[5:].strip()) for event in events if event.startswith(b"data:")]

    def _finished(self, answer: Answer, is_stream: bool) -> Answer:
        if not is_stream:
            answer.body = bytes(self._buffer)
        return answer


def _parse_head(head: str) -> tuple[int, dict[str, str]]:
    first, *lines = head.split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise BrokenAnswer(f"not an HTTP/1.1 answer: {first[:60]!r}")
    headers = (line.partition(":") for line in lines if line)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in headers}


def _unchunk(raw: bytearray) -> tuple[bytes, bool]:
    """Takes whole chunks from the front of ``raw``; (their bytes, whether the last chunk was among them)."""
    body = bytearray()
    while (end := raw.find(b"\r\n")) >= 0:
        try:
            size = int(raw[:end].split(b";")[0], 16)
        except ValueError as error:
            raise BrokenAnswer(f"a chunk of size {bytes(raw[:end])[:20]!r}") from error
        if len(raw) < end + 2 + size + 2:
            break
        body += raw[end + 2 : end + 2 + size]
        del raw[: end + 2 + size + 2]
        if size == 0:
            return bytes(body), True
    return bytes(body), False
