"""What no honest client does: requests that are no requests, connections without end, JSON that explodes. One server
takes it all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.server.app import AccessLog
from headrace.server.exchange import Exchange
from tests.support.serving import FAKE, Server, events_of, post_bytes, read_until, read_until_closed, serving, wait_for

HOST = b"Host: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
BODY = b'{"prompt":"hi","max_tokens":1}'
FAST = 1007  # a behaviour of fake_engine.py


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--max-body-bytes", str(40 << 20), "--max-model-len", "4096") as running:
        yield running


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def is_held(server: Server, sock: socket.socket) -> bool:
    """The server's process has the other end of this connection."""
    ends = f":{server.port:04X}", f":{sock.getsockname()[1]:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return any(
        (words[1][-5:], words[2][-5:]) == ends and words[9] != "0" for words in lines
    )  # an inode: somebody's descriptor


def status_of(data: bytes) -> int:
    return int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/1.1 ") else 0


SMUGGLED = [
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 30\r\n\r\n" + BODY,
    POST + b"Content-Length: -5\r\n\r\n" + BODY,
    POST + b"Content-Length: +30\r\n\r\n" + BODY,
    POST + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY,
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: localhost\n\n",
    b"GET /\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
]


@pytest.mark.parametrize("data", SMUGGLED)
def test_requests_that_two_servers_could_read_differently_are_refused(server: Server, data: bytes) -> None:
    with server.raw(data) as sock:
        answer = read_until_closed(sock)
    assert status_of(answer) == 400 and answer.count(b"content-length:") == 1 and b'"code":"invalid_http"' in answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 1_000_000,
        b"GET /" + b"a" * 1_000_000,
        b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"X%d: a\r\n" % i for i in range(10_000)) + b"\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1e\r\n" + BODY + b"\r\n0\r\nX: " + b"a" * 2_000_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n1e;" + b"a" * 2_000_000,
    ],
    ids=["header", "path", "count", "trailer", "chunk extension"],
)
def test_nothing_endless_is_collected(server: Server, head: bytes) -> None:
    with server.raw() as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(head)
        assert status_of(read_until_closed(sock)) in (431, 0)  # 0: the answer was lost, as we went on sending


def test_half_sent_headers_are_told_and_ended(server: Server) -> None:
    """After 1 s here (20 s in the product, which test_figures.py holds)."""
    begun = time.monotonic()
    socks = [server.raw(half) for half in (b"GET /health HTTP/1.1\r\nX: ", b"GET /health HT", POST)]
    answers = [read_until_closed(sock) for sock in socks]
    assert [status_of(answer) for answer in answers] == [408] * 3 and time.monotonic() - begun < 5


def test_a_body_far_beyond_the_limit_is_not_read(server: Server) -> None:
    with server.raw(POST + b"Content-Length: 1000000000000\r\n\r\n") as sock:
        assert status_of(read_until_closed(sock)) == 413


def test_http_1_0_streams_come_without_chunks(server: Server) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 3, "seed": FAST, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    with server.raw(request + body) as sock:
        head, _, events = read_until_closed(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    assert events_of(events)[-1] == "[DONE]" and len(events_of(events)) == 4


BOMBS: dict[str, Any] = {
    "prompt": [{} for _ in range(2_000_000)],
    "messages": [[] for _ in range(2_000_000)],
    "stop": ["" for _ in range(2_000_000)],
    "allowed_token_ids": [1] * 4_000_000,
}


@pytest.mark.parametrize("field", BOMBS)
def test_json_that_would_explode_is_counted_before_it_is_built(server: Server, field: str) -> None:
    body = json.dumps({"prompt": "x", field: BOMBS[field]}).encode()
    before = peak_of(server)
    answer = server.ask("POST", "/v1/completions", body)
    assert answer.status == 400 and "more than" in answer.error["message"]
    assert peak_of(server) - before < 50 << 20


def peak_of(server: Server) -> int:
    """Most bytes that the front end ever had in memory, less what the body itself takes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_text_full_of_brackets_is_no_bomb(server: Server) -> None:
    text = '{"a": [1, "b\\\\"]}, ' * 100_000
    answer = server.ask("POST", "/v1/completions", {"prompt": text, "max_tokens": 1})
    assert answer.error["code"] == "context_length_exceeded"


def probed(server: Server, bodies: Sequence[bytes]) -> tuple[list[int], float]:
    """What came of these at once, and the longest that a probe waited meanwhile."""
    statuses: list[int] = []
    senders = [
        threading.Thread(target=lambda body=body: statuses.append(server.ask("POST", "/v1/completions", body).status))
        for body in bodies
    ]
    worst, connection = 0.0, server.connect()
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        begun = time.perf_counter()
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        worst = max(worst, time.perf_counter() - begun)
    connection.close()
    return statuses, worst


def assert_leaves_the_loop(server: Server, bodies: Sequence[bytes], status: int, seconds: float) -> None:
    """A probe waits less than ``seconds``. What holds up the loop does so every time, what holds up the machine does
    not: three tries."""
    waits = []
    for _ in range(3):
        statuses, worst = probed(server, bodies)
        assert statuses == [status] * len(bodies)
        waits.append(worst)
        if worst < seconds:
            return
    raise AssertionError(f"probes waited {waits} s")


def test_a_million_tokens_of_prompt_leave_the_event_loop_to_others(server: Server) -> None:
    """Texts and ids of a million tokens, ten at once, while probes and a stream go on."""
    text = json.dumps({"prompt": "Once upon a time there was a cat. " * 120_000}).encode()
    ids = json.dumps({"prompt": [8000] * 1_000_000}).encode()
    assert_leaves_the_loop(server, [text, ids] * 5, 400, 1.0)


def test_a_thousand_prompts_leave_the_event_loop_to_others(server: Server) -> None:
    """And what they share is worked out once."""
    body = {
        "prompt": ["one two three " * 100] * 64,
        "max_tokens": 1,
        "seed": FAST,
        "bad_words": [f"{index} " + "x" * 70 for index in range(110)],
    }
    assert_leaves_the_loop(server, [json.dumps(body).encode()], 200, 0.2)


HALF_SENT = b"Content-Length: 100000\r\n\r\n" + b" " * 99_999
SMALL = json.dumps({"prompt": "x", "max_tokens": 1, "user": "x" * 1000}).encode()
LARGE = SMALL + b" " * 70_000


def test_bodies_are_bounded_in_all_together() -> None:
    """Large ones, for whose room many small ones may wait that never come; small ones find room."""
    with serving("--max-body-bytes", "100000") as server:
        held = [server.raw(POST + HALF_SENT) for _ in range(8)]
        wait_for(lambda: server.ask("POST", "/v1/completions", LARGE).status == 429, 2)
        assert server.ask("POST", "/v1/completions", LARGE).headers["retry-after"] == "1"
        assert server.ask("POST", "/v1/completions", SMALL).status == 200
        for sock in held:
            sock.close()
        wait_for(lambda: server.ask("POST", "/v1/completions", LARGE).status == 200, 2)


def test_a_key_that_fills_the_room_for_bodies_leaves_others_theirs() -> None:
    with serving("--max-body-bytes", "100000", "--api-key", "hog", "--api-key", "polite") as server:
        hog, polite = ({"Authorization": f"Bearer {key}"} for key in ("hog", "polite"))
        held = [server.raw(POST + b"Authorization: Bearer hog\r\n" + HALF_SENT) for _ in range(8)]
        wait_for(lambda: server.ask("POST", "/v1/completions", LARGE, hog).status == 429, 2)
        for body in (SMALL, LARGE, SMALL + b" " * (99_999 - len(SMALL))):
            assert server.ask("POST", "/v1/completions", body, polite).status == 200
        told = server.ask("POST", "/v1/completions", LARGE, hog).error["message"]
        assert "of your key" in told and "800000 bytes" in told, told
        for sock in held:
            sock.close()
        wait_for(lambda: server.ask("POST", "/v1/completions", LARGE, hog).status == 200, 2)


def test_idle_and_slow_connections_make_room_for_new_ones_and_running_streams_stay() -> None:
    with serving("--max-connections", "40", "--max-queue", "20") as server, contextlib.ExitStack() as open_sockets:
        stream = open_sockets.enter_context(
            server.raw(post_bytes("/v1/completions", {"prompt": "x", "max_tokens": 60, "stream": True}))
        )
        read_until(stream, b"\r\n\r\n")
        for index in range(150):
            half = (b"", b"GET /health HTTP/1.1\r\nX: ", POST + b"Content-Length: 100\r\n\r\n{")[index % 3]
            with contextlib.suppress(ConnectionError):
                open_sockets.enter_context(server.raw(half))
            if index % 30 == 29:
                assert server.ask("GET", "/health").status == 200
                assert descriptors(server) < 40 + 20
        assert b"[DONE]" in read_until(stream, b"[DONE]")
        server.wait_idle()


def test_when_every_connection_is_at_work_the_next_is_told_to_come_back() -> None:
    with (
        serving("--max-connections", "16", "--max-queue", "8", "--token-seconds", "0.05") as server,
        contextlib.ExitStack() as open_sockets,
    ):
        for _ in range(8):
            sock = open_sockets.enter_context(
                server.raw(post_bytes("/v1/completions", {"prompt": "x", "max_tokens": 400, "stream": True}))
            )
            read_until(sock, b"\r\n\r\n")
        whole = [
            open_sockets.enter_context(server.raw(post_bytes("/v1/completions", {"prompt": "x"}))) for _ in range(8)
        ]
        assert all(status_of(read_until(sock, b"\r\n\r\n")) == 429 for sock in whole)
        assert server.ask("GET", "/health").status == 200  # those that were refused are idle now, and make room


def test_answers_that_nobody_reads_are_dropped() -> None:
    """Pipelined requests whose answers pile up beyond what the system buffers: the connection goes, its memory with
    it."""
    with serving("--unread-seconds", "0.5") as server:
        sock = server.raw(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000, receive_buffer=2048)
        wait_for(lambda: is_held(server, sock))
        wait_for(lambda: not is_held(server, sock))
        assert read_until_closed(sock).count(b"HTTP/1.1 200 OK") < 1000
        assert server.ask("GET", "/health").status == 200


def test_a_server_with_few_descriptors_goes_on() -> None:
    server_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1200, server_limit[1]), server_limit[1]))
    with serving("--max-connections", "1000000") as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (120, 120))
        socks: list[socket.socket] = []
        try:
            for _ in range(300):
                with contextlib.suppress(OSError):
                    socks.append(server.raw())
            wait_for(lambda: any("can be accepted" in line for line in server.lines), what="it finds no descriptor")
        finally:
            for sock in socks:
                sock.close()
        deadline = time.monotonic() + 5
        while True:
            with contextlib.suppress(OSError):
                if server.ask("GET", "/health", timeout=2).status == 200:
                    break
            assert time.monotonic() < deadline
    resource.setrlimit(resource.RLIMIT_NOFILE, server_limit)


def test_idle_connections_beyond_the_descriptors_hold_up_nobody() -> None:
    """The limit is there before the start; accepting a crowd must not use up what the connections that give way still
    hold."""
    command = ("bash", "-c", 'ulimit -n 256; exec "$0" "$@"', *FAKE)
    with serving("--token-seconds", "0", command=command) as server, contextlib.ExitStack() as idle:
        for _ in range(3):
            for _ in range(250):
                idle.enter_context(server.raw())
            begun = time.perf_counter()
            assert server.ask("POST", "/v1/completions", json.loads(BODY)).status == 200
            assert time.perf_counter() - begun < 1.0
        assert not [line for line in server.lines if "accepted" in line]


def test_floods_of_refusals_become_a_count_and_probes_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def record() -> None:
        now = [0.0]
        log, exchange = AccessLog(lambda: now[0]), Exchange(None, "GET", "/x", b"", [])  # type: ignore[arg-type]
        for second in (0.0, 0.5, 2.0):
            now[0] = second
            for _ in range(100):
                log.record(exchange, 404)
        exchange.prompt_tokens = 5
        log.record(exchange, 200)
        exchange.route = "/ready"
        log.record(exchange, 503)

    with caplog.at_level(logging.INFO, "headrace.access"):
        asyncio.run(record())
    messages = [entry.getMessage() for entry in caplog.records]
    statuses = [entry.__dict__["facts"]["status"] for entry in caplog.records if entry.getMessage() == "request"]
    assert statuses.count(404) == 40 and statuses.count(200) == 1 and len(statuses) == 41
    assert "… and 180 more requests without a generation" in messages
