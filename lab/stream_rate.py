"""How many tokens a second one server streams: many clients, one event a token, nothing computed.

What lives here: a client that only reads sockets, the server it can start for itself, the figures. What may not:
models.

``python -m lab stream-rate`` starts ``headrace serve --executor keyed-hash``, opens the streams from this process and
counts every event. An event that is missing, or two tokens in one, is an error and not a figure. Then it compares the
first token's time with an engine's without HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.bench.arguments import add_server_arguments, count
from headrace.bench.sweep import Sweep
from headrace.errors import HeadraceError
from headrace.portability import process_status

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_READ_BYTES = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")


class StreamRateError(HeadraceError):
    """A stream that was not what it should be."""


@dataclass(frozen=True, slots=True)
class StreamRate:
    """``tokens_per_second``: all tokens over the time from the first request sent to the last byte read.

    ``steady_tokens_per_second``: while all streams ran. CPU times are of that whole run, in microseconds a token, by
    process.
    """

    clients: int
    tokens_per_client: int
    route: str
    seconds: float
    tokens_per_second: float
    steady_tokens_per_second: float
    server_microseconds: float | None = None
    engine_microseconds: float | None = None
    client_microseconds: float | None = None


@dataclass(slots=True)
class _Client:
    """One stream's reader. Events end in a blank line; chunk framing never holds one."""

    sock: socket.socket
    events: int = 0
    first: float | None = None
    last: float = 0.0
    tail: bytes = b""
    head: bytes = field(default=b"")

    def read(self) -> bool:
        """False at the end of the stream."""
        data = self.sock.recv(_READ_BYTES)
        self.last = time.perf_counter()
        if not data:
            return False
        if not self.head:
            self.head = data.partition(b"\r\n")[0]
        if self.first is None and b"data: " in data:
            self.first = self.last
        self.events += data.count(b"\n\n") + (self.tail[-1:] == b"\n" and data[:1] == b"\n")
        self.tail = (self.tail + data)[-400:]
        return True


def request_bytes(url: str, route: str, tokens: int, seed: int, api_key: str | None) -> bytes:
    """A streaming request of exactly ``tokens`` tokens."""
    body: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
    }
    prompt = f"client {seed}"
    body |= {"messages": [{"role": "user", "content": prompt}]} if route == "chat" else {"prompt": prompt}
    data = json.dumps(body).encode()
    key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
    head = (
        f"POST {ROUTES[route]} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n{key}"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


def measure(
    url: str, *, clients: int = 64, tokens: int = 1000, route: str = "completions", api_key: str | None = None
) -> StreamRate:
    """Streams from a server that is ready. Raises StreamRateError when a stream is not complete or tokens share
    events."""
    parts = urlsplit(url)
    opened = [
        _Client(socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=60))
        for _ in range(clients)
    ]
    selector = selectors.DefaultSelector()
    cpu, begun = time.process_time(), time.perf_counter()
    for seed, client in enumerate(opened):
        selector.register(client.sock, selectors.EVENT_READ, client)
        client.sock.sendall(request_bytes(url, route, tokens, seed, api_key))
    _read_all(selector, len(opened))
    seconds = max(client.last for client in opened) - begun
    for client in opened:
        client.sock.close()
        _check(client, tokens, route)
    total = clients * tokens
    spent = (time.process_time() - cpu) / total * 1e6
    return StreamRate(
        clients, tokens, route, seconds, total / seconds, _steady(opened, tokens), client_microseconds=spent
    )


def _read_all(selector: selectors.BaseSelector, remaining: int) -> None:
    while remaining:
        ready = selector.select(60.0)
        if not ready:
            raise StreamRateError("nothing arrived for 60 s; look at the server's log.")
        for key, _ in ready:
            if not key.data.read():
                selector.unregister(key.fileobj)
                remaining -= 1


def _check(client: _Client, tokens: int, route: str) -> None:
    """Chat: a role event before and a finish event after; both: usage and [DONE] at the end."""
    expected = tokens + (4 if route == "chat" else 2)
    usage = re.search(rb'"completion_tokens":(\d+)', client.tail)
    if b" 200 " not in client.head or b"data: [DONE]" not in client.tail or usage is None:
        raise StreamRateError(
            f"a stream ended early after {client.events} events: {client.head!r} … {client.tail[-200:]!r}; look at the server's log."
        )
    if int(usage[1]) != tokens or client.events != expected:
        raise StreamRateError(
            f"{int(usage[1])} tokens came in {client.events} events instead of {tokens} in {expected}; one event a token is promised."
        )


def _steady(clients: Sequence[_Client], tokens: int) -> float:
    """Tokens a second between the last stream's first token and the first stream's last, taking each stream's pace as
    even."""
    begun = max(client.first or client.last for client in clients)
    ended = min(client.last for client in clients)
    if ended <= begun:
        return 0.0
    return sum(tokens / (client.last - (client.first or 0.0)) for client in clients)


@contextmanager
def served(*flags: str) -> Iterator[tuple[str, int]]:
    """A server with the keyed-hash executor for the length of a with block: its URL and process id."""
    command = [sys.executable, "-m", "headrace", "serve", "--executor", "keyed-hash", "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "HEADRACE_LOG_LEVEL": "error"},
    )
    try:
        yield _wait_ready(process), process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line.rstrip())
        found = re.search(r"^Ready .* (http://\S+?)/v1", line)
        if found:
            return found[1]
    raise StreamRateError(f"the server did not start: {' '.join(said)[-500:]}")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def show_first(first: FirstToken) -> str:
    return (
        f"first token: {first.http_milliseconds:.2f} ms over HTTP, {first.offline_milliseconds:.2f} ms offline, "
        f"{first.distance:.2f} ms between (medians of {first.requests}, one after the other)"
    )


def _with_cpu_times(url: str, pid: int, clients: int, tokens: int, **shape: Any) -> StreamRate:
    """The server is ours: all front ends together, and the engine."""
    if not process_status():  # times of other processes are told by the same files
        return measure(url, clients=clients, tokens=tokens, **shape)
    family = [pid, *children(pid)]
    engine = [each for each in family if b"headrace.engine.process" in Path(f"/proc/{each}/cmdline").read_bytes()]
    fronts = [each for each in family if each not in engine]
    before = sum(map(cpu_seconds, fronts)), sum(map(cpu_seconds, engine))
    rate = measure(url, clients=clients, tokens=tokens, **shape)
    after = sum(map(cpu_seconds, fronts)), sum(map(cpu_seconds, engine))
    server, core = ((then - now) / (clients * tokens) * 1e6 for now, then in zip(before, after, strict=True))
    return replace(rate, server_microseconds=server, engine_microseconds=core)


def show(rate: StreamRate) -> str:
    cpu = ", ".join(
        f"{name} {value:.1f}"
        for name, value in (
            ("server", rate.server_microseconds),
            ("engine", rate.engine_microseconds),
            ("client", rate.client_microseconds),
        )
        if value is not None
    )
    return (
        f"{rate.clients} clients x {rate.tokens_per_client} tokens, {rate.route}: {rate.tokens_per_second:,.0f} tokens/s "
        f"(steady {rate.steady_tokens_per_second:,.0f}) in {rate.seconds:.2f} s; CPU microseconds a token: {cpu}"
    )


# --- the first token


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Medians in milliseconds of requests sent one after the other: over HTTP, and by an engine in this process."""

    requests: int
    http_milliseconds: float
    offline_milliseconds: float

    @property
    def distance(self) -> float:
        return self.http_milliseconds - self.offline_milliseconds


def first_token(url: str, *, requests: int = 200, route: str = "completions", api_key: str | None = None) -> FirstToken:
    """From the first byte sent to the first event read, on a connection that is open; beside it ``LLM.generate`` of one
    token."""
    over_http, offline = [_first_event(url, route, seed, api_key) for seed in range(requests)], _offline(requests)
    return FirstToken(requests, 1e3 * statistics.median(over_http), 1e3 * statistics.median(offline))


def _first_event(url: str, route: str, seed: int, api_key: str | None) -> float:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=60) as sock:
        client = _Client(sock)
        time.sleep(0.002)  # the connection is accepted meanwhile
        begun = time.perf_counter()
        sock.sendall(request_bytes(url, route, 2, seed, api_key))
        while client.read():
            pass
        _check(client, 2, route)
        assert client.first is not None
        return client.first - begun


def _offline(requests: int) -> list[float]:
    from headrace.engine.llm import LLM
    from headrace.request import SamplingParams

    llm, params, times = LLM(executor="keyed-hash"), SamplingParams(max_tokens=1, ignore_eos=True), []
    for seed in range(requests):
        begun = time.perf_counter()
        llm.generate([f"client {seed}"], params, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    return times


# --- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    running = "a server that is running; without it one is started with the keyed-hash executor"
    add_server_arguments(parser, default=None, help=running)
    parser.add_argument(
        "--api-server-count", type=count, default=1, help="front ends of the server that is started (default: 1)"
    )
    parser.add_argument("--clients", type=count, default=64, help="streams at once (default: 64)")
    parser.add_argument("--tokens", type=count, default=1000, help="tokens a client (default: 1000)")
    parser.add_argument("--endpoint", choices=sorted(ROUTES), default="completions", help="default: completions")
    parser.add_argument("--repeats", type=count, default=3, help="timed repeats (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    sweep = Sweep()
    with _server(args) as (url, pid):
        measure(url, clients=args.clients, tokens=16, route=args.endpoint, api_key=args.api_key)  # warms up
        shape = {"clients": args.clients, "tokens": args.tokens, "route": args.endpoint, "api_key": args.api_key}
        rates = sweep.take(
            measure(url, **shape) if pid is None else _with_cpu_times(url, pid, **shape) for _ in range(args.repeats)
        )
        first = sweep.take(first_token(url, route=args.endpoint, api_key=args.api_key) for _ in range(1))
    if args.json:
        print(
            json.dumps(
                {"rates": [asdict(rate) for rate in rates], "first_token": asdict(first[0]) if first else None},
                indent=1,
            )
        )
    else:
        print("\n".join([*map(show, rates), *map(show_first, first)]))
    return sweep.status()


@contextmanager
def _server(args: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    if args.base_url:
        yield args.base_url, None
        return
    with served("--max-num-seqs", str(args.clients), "--api-server-count", str(args.api_server_count)) as started:
        yield started
