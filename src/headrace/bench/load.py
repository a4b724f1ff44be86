"""Sends conversations to a server and records what the client saw of each request.

What lives here: the load generator (open and closed loop), requests in OpenAI's format, reading streams, and a light
HTTP/1.1 client for server-sent events, which timestamps what arrives and parses it later. What may not: figures and
workloads (planner/workload/), command lines.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httptools

from headrace.errors import BenchFailed, ConfigError
from headrace.planner.workload.conversations import Conversation, Turn, as_text
from headrace.planner.workload.statistics import Sample

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "embeddings": "/v1/embeddings"}


async def first_model(client: HttpClient) -> str:
    """The first model that the server lists. Raises BenchFailed if there is no such server."""
    where = f"{client.host}:{client.port}/v1/models"
    try:
        answer = await client.get("/v1/models")
        if answer.status != 200:
            said = error_message(answer.body).rstrip(".")
            raise BenchFailed(f"{where} answers with status {answer.status}: {said}. {_remedy(answer.status)}")
        return str(answer.json()["data"][0]["id"])
    except (OSError, TimeoutError, BrokenAnswer) as error:
        why = error or type(error).__name__
        raise BenchFailed(
            f"No server answers at {client.host}:{client.port} ({why}); start one or give --base-url."
        ) from error
    except (KeyError, IndexError, TypeError) as error:
        raise BenchFailed(f"{where} lists no model; give --model.") from error


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "Give --api-key, or set HEADRACE_API_KEY."
    if status in (429, 503):
        return "Wait until the server is ready (GET /ready answers 200) and has room."
    return "Check --base-url, --model, --endpoint and the lengths."


class LoadGenerator:
    """Sends conversations when they are due, at most ``concurrency`` requests at once, and keeps a sample of each
    request."""

    def __init__(
        self,
        client: HttpClient,
        model: str,
        endpoint: str,
        concurrency: float,
        *,
        as_ids: bool,
        extra: Mapping[str, Any] | None = None,
        reads_late: bool = False,
    ) -> None:
        """``extra``: goes with each request. ``reads_late``: answers are read by ``read_late``, for reading one takes half a
        millisecond in which arrivals of the others are not seen; not where what was answered is sent again."""
        self._extra = extra or {}
        self._unread: list[tuple[Sample, Answer]] | None = [] if reads_late else None
        self.samples: list[Sample] = []
        self._client = client
        self.model = model
        self._endpoint = endpoint
        self._as_ids = as_ids
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(1 << 30 if math.isinf(concurrency) else int(concurrency))

    async def warm_up(self, conversations: Sequence[Conversation], count: int) -> None:
        """Uses other tokens than the measurement, so that they are not in the server's prefix cache. Raises
        BenchFailed."""
        for conversation in conversations[:count]:
            turn = replace(conversation.turns[0], new_ids=tuple(reversed(conversation.turns[0].new_ids)))
            await self._conversation(Conversation((turn,)), time.perf_counter())
        failed = [sample for sample in self.samples if sample.error is not None]
        if failed and len(failed) == len(self.samples):
            why = str(failed[0].error).rstrip(".")
            status = re.search(r"\bstatus (\d{3})\b", why)
            raise BenchFailed(f"Every warm-up request failed: {why}. {_remedy(int(status[1]) if status else 0)}")
        self.samples.clear()

    def read_late(self) -> None:
        """What ``reads_late`` left."""
        for sample, answer in self._unread or ():
            self._read(sample, answer)

    async def run(self, conversations: Sequence[Conversation]) -> None:
        origin = time.perf_counter()
        if any(conversation.arrival is None for conversation in conversations):
            queue, workers = iter(conversations), int(min(len(conversations), self._concurrency))
            await asyncio.gather(*(self._worker(queue, origin) for _ in range(workers)))
        else:
            await asyncio.gather(*(self._conversation(conversation, origin) for conversation in conversations))

    async def _worker(self, queue: Iterator[Conversation], origin: float) -> None:
        for conversation in queue:
            await self._conversation(conversation, origin)

    async def _conversation(self, conversation: Conversation, origin: float) -> None:
        history: list[tuple[str, str]] = []  # (what was asked, what was answered)
        due = None if conversation.arrival is None else origin + conversation.arrival
        for turn in conversation.turns:
            if turn.think_seconds:
                due = time.perf_counter() + turn.think_seconds
            if due is not None:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            async with self._slots:
                sample, text = await self._request({**self._body(turn, history), **self._extra}, due)
            self.samples.append(sample)
            if sample.error is not None:
                return
            history.append((as_text(turn.new_ids), text))
            due = None

    def _body(self, turn: Turn, history: Sequence[tuple[str, str]]) -> dict[str, Any]:
        if self._endpoint == "embeddings":
            asked: Any = list(turn.new_ids) if self._as_ids else as_text(turn.new_ids)
            return {"model": self.model, "input": asked, "encoding_format": "base64"}
        body = {
            "model": self.model,
            "max_tokens": turn.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
        }
        body["stream_options"] = {"include_usage": True}
        if self._as_ids:
            return {**body, "prompt": list(turn.new_ids)}
        asked = as_text(turn.new_ids)
        if self._endpoint == "completions":
            return {**body, "prompt": "".join(f"{question}\n{answer}\n" for question, answer in history) + asked}
        earlier = [
            message
            for question, answer in history
            for message in (_message("user", question), _message("assistant", answer))
        ]
        return {**body, "messages": [*earlier, _message("user", asked)]}

    async def _request(self, body: Mapping[str, Any], due: float | None) -> tuple[Sample, str]:
        sample = Sample(sent=time.perf_counter(), due=due)
        try:
            answer = await self._client.post(ROUTES[self._endpoint], body)
        except (OSError, TimeoutError, BrokenAnswer) as error:
            sample.ended, sample.error = time.perf_counter(), f"{type(error).__name__}: {error}"
            return sample, ""
        sample.ended = time.perf_counter()
        if self._unread is None:
            return sample, self._read(sample, answer)
        self._unread.append((sample, answer))
        return sample, ""

    def _read(self, sample: Sample, answer: Answer) -> str:
        try:
            return read_vector(answer, sample) if self._endpoint == "embeddings" else read_stream(answer, sample)
        except BrokenAnswer as error:
            sample.error = f"{type(error).__name__}: {error}"
            return ""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def read_vector(answer: Answer, sample: Sample) -> str:
    """As ``read_stream``, of an embedding, which is there all at once."""
    if answer.status != 200:
        raise BrokenAnswer(f"status {answer.status}: {error_message(answer.body)}")
    if not answer.json().get("data"):
        raise BrokenAnswer("the answer holds no embedding")
    _take_usage(answer.json().get("usage"), sample)
    sample.arrivals.append(sample.ended)
    return ""


def read_stream(answer: Answer, sample: Sample) -> str:
    """Fills the sample from an answer's events; returns the text. Raises BrokenAnswer if the stream is incomplete."""
    if answer.status != 200:
        raise BrokenAnswer(f"status {answer.status}: {error_message(answer.body)}")
    if not answer.events or answer.events[-1][1] != b"[DONE]":
        raise BrokenAnswer("the stream ended without [DONE]")
    pieces: list[str] = []
    closed: float | None = None  # by an event without text: it may have brought the last token, too
    for when, data in answer.events[:-1]:
        event = json.loads(data)
        if "error" in event:
            raise BrokenAnswer(f"an error event: {error_message(data)}")
        _take_usage(event.get("usage"), sample)
        for choice in event.get("choices", ()):
            piece = choice["text"] if "text" in choice else _delta_text(choice["delta"])
            # an event without text may be a token's first bytes
            if piece or not (choice.get("finish_reason") or "delta" in choice):
                sample.arrivals.append(when)
                pieces.append(piece)
            elif choice.get("finish_reason"):
                closed = when
    # every other token had an event of its own
    if closed is not None and sample.output_tokens == len(sample.arrivals) + 1:
        sample.arrivals.append(closed)
    sample.output_tokens = sample.output_tokens or len(sample.arrivals)
    return "".join(pieces)


def _delta_text(delta: Mapping[str, Any]) -> str:
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


def _take_usage(usage: Mapping[str, Any] | None, sample: Sample) -> None:
    if usage:
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
        sample.output_tokens = usage.get("completion_tokens", 0)
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return repr(body[:100])


class BrokenAnswer(Exception):
    """An answer that was incomplete or malformed."""


@dataclass(slots=True)
class Answer:
    """Status and the body's events (``data:`` lines without the prefix) with the time at which each one's bytes were
    read, in seconds."""

    status: int
    content_type: str
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""  # of an answer that is no stream

    def json(self) -> Any:
        """Raises BrokenAnswer if the body is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise BrokenAnswer(f"status {self.status} with a body that is not JSON") from error


class HttpClient:
    """Keeps connections open between requests. One event loop; any number of requests at once."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        from msgspec import json  # the table's rows, which need no server, run where it is missing

        self._encode = json.encode  # Python's own takes 0.2 ms for 2,000 ids, in which arrivals are not seen
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url is {base_url!r}; give one like http://127.0.0.1:8000.")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._headers = f"Host: {parts.netloc}\r\nAccept: */*\r\n" + (
            f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        )

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Raises OSError, TimeoutError or BrokenAnswer."""
        data = self._encode(body)
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        return await asyncio.wait_for(self._exchange(head.encode() + data), self._timeout)

    async def get(self, path: str) -> Answer:
        """Raises OSError, TimeoutError or BrokenAnswer."""
        return await asyncio.wait_for(
            self._exchange(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()), self._timeout
        )

    async def open(self, count: int) -> None:
        """So many connections, ahead of requests that come at once: their time is then not that of connecting."""
        self._idle += await asyncio.gather(*(self._connect() for _ in range(count)))

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes) -> Answer:
        reused = bool(self._idle)
        connection = self._idle.pop() if reused else await self._connect()
        try:
            answer = await connection.exchange(request)
        except BaseException as error:
            connection.close()
            # closed by the server while it lay idle
            if reused and isinstance(error, (ConnectionError, asyncio.IncompleteReadError)):
                return await self._exchange(request)
            if isinstance(error, asyncio.IncompleteReadError):
                raise BrokenAnswer("the server closed the connection before it answered") from error
            raise
        if connection.kept:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(_Connection, self.host, self.port, ssl=self._tls))[1]


class _Connection(asyncio.Protocol):
    """One answer after the other, each read as it comes: by way of a stream and a task, a busy client would see tokens
    later. Also the parser's callbacks. ``kept``: it can be used again."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.kept = False
        self._answer = Answer(0, "")
        self._waiter: asyncio.Future[Answer] | None = None  # for the whole answer
        self._parser: Any = None
        self._framed = False  # the body's end is told by its length or its chunks, not by the connection's
        self._buffer = b""  # of the body, up to the last whole event

    async def exchange(self, request: bytes) -> Answer:
        """Raises BrokenAnswer or OSError; IncompleteReadError if nothing was received."""
        if self._transport.is_closing():
            raise ConnectionResetError("the server has closed the connection")
        self._answer, self._buffer, self._framed, self.kept = Answer(0, ""), b"", False, False
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenAnswer(f"not an HTTP/1.1 answer: {error} at {data[:60]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._fail(exc)
        elif not self._answer.status:
            self._fail(asyncio.IncompleteReadError(b"", None))
        elif self._framed:
            self._fail(BrokenAnswer("the connection broke in the middle of the answer"))
        else:
            self._end()

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    def _end(self) -> None:
        if not self._is_stream:
            self._answer.body = self._buffer
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._answer)

    @property
    def _is_stream(self) -> bool:
        return self._answer.content_type.startswith("text/event-stream")

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key == b"content-type":
            self._answer.content_type = value.decode("latin-1")
        self._framed |= key in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._buffer += data
        if self._is_stream:
            now = time.perf_counter()
            *events, self._buffer = self._buffer.replace(b"\r\n", b"\n").split(b"\n\n")
            self._answer.events += [(now, event[5:].strip()) for event in events if event.startswith(b"data:")]

    def on_message_complete(self) -> None:
        self.kept = self._parser.should_keep_alive()
        self._end()
