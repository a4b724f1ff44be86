"""Several front ends of one engine: whichever answers says the same, and one that dies or stops costs the others'
clients nothing.

(No model: keyed hash.)
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config import ServerConfig
from headrace.errors import ConfigError, Unavailable
from headrace.processes.messages import Channel, Question, Respond
from headrace.server import app
from headrace.server import service as service_module
from headrace.server.exposition import Counters
from headrace.server.frontends import link
from headrace.server.lifecycle import bind_unix
from headrace.server.service import Service
from tests.server.fake_engine import FakeEngine
from tests.support.serving import (
    SERVE,
    Server,
    events_of,
    post_bytes,
    read_until,
    read_until_closed,
    send,
    serving,
    split_response,
    wait_for,
)

HASH = ("--executor", "keyed-hash", "--device-time", "0.004", "--api-server-count", "2", "--max-queue", "16")
KEYS = ("--api-key", "key-one", "key-two")
ONE, TWO = {"Authorization": "Bearer key-one"}, {"Authorization": "Bearer key-two"}
AS_ONE = "Authorization: Bearer key-one"
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 200, "ignore_eos": True, "stream": True}
LONG = 3900  # tokens: longer than a test looks
QUICK_TO_JUDGE = (  # a front end that hangs is found after a second
    sys.executable, "-c",
    "import sys; from headrace.server.frontends import parent; parent.FRONT_HANG_SECONDS = 2.5; from headrace.cli import main; sys.exit(main())",
    "serve", "--port", "0",
)  # fmt: skip


def fronts(server: Server) -> list[int]:
    return server.members("headrace.server.frontends.child")


def owners(server: Server, socks: Sequence[socket.socket]) -> list[int]:
    """The front ends that hold the other ends of these connections."""
    holders = {
        os.readlink(link): pid
        for pid in fronts(server)
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_socket()
    }
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    inodes = {(fields[1].partition(":")[2], fields[2].partition(":")[2]): fields[9] for fields in table}
    ends = [(f"{sock.getpeername()[1]:04X}", f"{sock.getsockname()[1]:04X}") for sock in socks]
    return [holders[f"socket:[{inodes[end]}]"] for end in ends]


def accepted(server: Server, path: Path) -> list[int]:
    """How many connections over this Unix socket each front end holds."""
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    inodes = {f"socket:[{fields[6]}]" for fields in table if fields[-1] == str(path) and fields[5] == "03"}  # connected
    return [sum(os.readlink(link) in inodes for link in Path(f"/proc/{pid}/fd").iterdir()) for pid in fronts(server)]


def streams_of(server: Server, count: int, **fields: Any) -> list[tuple[socket.socket, bytes, int]]:
    """Streams that have begun, what has been read of each, and whose it is."""
    data = post_bytes("/v1/completions", {**TEXT, **fields}, AS_ONE, "Connection: close")
    socks = [server.raw(data) for _ in range(count)]
    heads = [read_until(sock, b"data: ") for sock in socks]
    while len({*owners(server, socks)}) < min(
        count, 2
    ):  # they are dealt out evenly, but not to somebody who gets no time
        assert len(socks) < 16
        socks.append(server.raw(data))
        heads.append(read_until(socks[-1], b"data: "))
    return list(zip(socks, heads, owners(server, socks), strict=True))


def ended(sock: socket.socket, head: bytes) -> tuple[list[Any], bool]:
    _, body, complete = split_response(head + read_until_closed(sock))
    return events_of(body), complete


def goes_on(sock: socket.socket) -> bool:
    """More comes than what lies there already."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1 << 20):
            pass
    sock.settimeout(20)
    data = b""
    while data.count(b"data: ") < 20:
        part = sock.recv(1 << 16)
        assert part and b'"error"' not in part
        data += part
    return True


def each_front(server: Server) -> list[http.client.HTTPConnection]:
    """One connection to each front end: they are dealt out evenly among those that hold none."""
    opened: dict[int, http.client.HTTPConnection] = {}
    for _ in range(40):
        connection = server.connect()
        connection.connect()
        send(connection, "GET", "/health")
        opened.setdefault(owners(server, [connection.sock])[0], connection)
        if len(opened) == 2:
            return list(opened.values())
    raise AssertionError("one front end takes all connections")


def serving_again(server: Server) -> int:
    """How often a front end has been replaced so far."""
    return sum("serves again" in line for line in server.lines)


def counted(page: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.M))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*HASH, *KEYS, "--debug", command=QUICK_TO_JUDGE) as running:
        wait_for(lambda: any(line.startswith("Ready after") for line in running.lines))
        yield running


def test_the_start_says_it_once_and_lines_say_whose_they_are(server: Server) -> None:
    for connection in each_front(server):
        assert send(connection, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, ONE).status == 200
    wait_for(
        lambda: {found[1] for line in server.lines if (found := re.search(r"request front=(\d) ", line))} == {"1", "2"}
    )
    assert (
        sum("listens on" in line for line in server.lines)
        == sum(line.startswith("Ready after") for line in server.lines)
        == 1
    )
    assert any(line.split()[:2] == ["api_server_count", "2:"] for line in server.lines)


def test_whoever_is_asked_counts_for_all(server: Server) -> None:
    connections = each_front(server)
    before = send(connections[0], "GET", "/metrics", headers=ONE).body.decode()
    for connection in connections:
        for _ in range(3):
            assert (
                send(
                    connection, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 5, "ignore_eos": True}, ONE
                ).status
                == 200
            )
    pages = [send(connection, "GET", "/metrics", headers=ONE).body.decode() for connection in connections]
    for name, more in (("vllm:generation_tokens_total", 30), ("vllm:request_success_total", 6), ("vllm:time_to_first_token_seconds_count", 6),
                       ("headrace_steps_total", None)):  # fmt: skip
        values = [counted(page, name) for page in (before, *pages)]
        assert values == sorted(values) and (more is None or values[1] == values[2] == values[0] + more), name
    wait_for(
        lambda: send(connections[0], "GET", "/v1/dashboard", headers=ONE).json["steps"]["rows"], 3
    )  # the next sample
    shown = [send(connection, "GET", "/v1/dashboard", headers=ONE).json for connection in connections]
    assert shown[0]["created"] == shown[1]["created"] and shown[0]["finished"] == shown[1]["finished"]
    assert (
        shown[0]["steps"]["rows"]
        and shown[0]["decisions"]
        and {row[0] for row in shown[0]["steps"]["rows"]} <= {row[0] for row in shown[1]["steps"]["rows"]}
    )
    assert any(re.match(r"Request [12]\.\d+ admitted", entry["text"]) for entry in shown[1]["decisions"])


def test_a_request_is_found_from_any_front_end_by_its_own_key_alone(server: Server) -> None:
    ((sock, head, _),) = streams_of(server, 1, max_tokens=2000)
    found = re.search(rb"x-request-id: (\w+)", head)
    assert found is not None
    name = found[1].decode()
    for connection in each_front(server):
        shown = send(connection, "GET", f"/v1/requests/{name}", headers=ONE)
        assert shown.status == 200 and shown.json["state"] == "running" and shown.json["prompts"]["running"] == 1
        assert [each["id"] for each in send(connection, "GET", "/v1/requests", headers=ONE).json["data"]] == [
            shown.json["id"]
        ]
        assert send(connection, "GET", f"/v1/requests/{name}", headers=TWO).status == 404
        assert not send(connection, "GET", "/v1/requests", headers=TWO).json["data"]
    sock.close()


def test_a_stored_response_is_found_from_any_front_end(server: Server) -> None:
    first, second = each_front(server)
    asked = {"input": "x", "max_output_tokens": 2}
    name = send(first, "POST", "/v1/responses", asked, ONE).json["id"]
    assert send(second, "GET", f"/v1/responses/{name}", headers=ONE).json["id"] == name
    assert send(second, "GET", f"/v1/responses/{name}", headers=TWO).status == 404
    assert (
        send(second, "POST", "/v1/responses", {**asked, "previous_response_id": name}, ONE).json["previous_response_id"]
        == name
    )
    assert send(second, "DELETE", f"/v1/responses/{name}", headers=ONE).json["deleted"]
    assert [send(each, "GET", f"/v1/responses/{name}", headers=ONE).status for each in (first, second)] == [404, 404]


def test_prefixes_and_the_queue_are_those_of_the_whole_server(server: Server) -> None:
    server.wait_idle(headers=ONE)
    first, second = each_front(server)
    asked = {"prompt": "a long and shared beginning " * 20, "max_tokens": 1}
    cached = [
        send(each, "POST", "/v1/completions", asked, ONE).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for each in (first, second)
    ]
    assert cached[0] == 0 < cached[1]  # the tenant is the same to both
    assert (
        send(first, "POST", "/v1/completions", asked, TWO).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    )
    streams = [server.raw(post_bytes("/v1/completions", TEXT, AS_ONE, "Connection: close")) for _ in range(20)]
    heads = [read_until(sock, b"\r\n") for sock in streams]
    taken = [head.split()[1] for head in heads].count(b"200")
    assert 13 <= taken <= 14 and b"429" in {
        head.split()[1] for head in heads
    }  # eight ninths of 16: two that come at once may both be refused
    assert server.ask("POST", "/v1/completions", {**TEXT, "stream": False, "max_tokens": 1}, TWO).status == 200
    for sock in streams:
        sock.close()


def test_a_front_end_that_is_killed_is_replaced_and_nobody_elses_stream_is_hurt(server: Server) -> None:
    server.wait_idle(headers=ONE)
    replaced, streams = serving_again(server), streams_of(server, 6, max_tokens=LONG)
    victim = streams[0][2]
    assert {whose for *_, whose in streams} == set(fronts(server))
    before = counted(server.ask("GET", "/metrics", headers=ONE).body.decode(), "vllm:generation_tokens_total")
    os.kill(victim, signal.SIGKILL)
    lost = sum(whose == victim for *_, whose in streams)
    for sock, _, whose in streams:
        if whose == victim:
            assert b"[DONE]" not in read_until_closed(sock)
    for sock, _, whose in streams:
        assert whose == victim or goes_on(sock)
        sock.close()
    wait_for(lambda: serving_again(server) == replaced + 1)
    server.wait_idle(headers=ONE)
    page = server.ask("GET", "/metrics", headers=ONE).body.decode()
    assert counted(page, "vllm:generation_tokens_total") >= before
    assert counted(page, 'headrace_request_success_total{model_name="demo",finished_reason="abort"}') >= lost
    assert any(re.search(r"Front end \d ended: signal 9 \(SIGKILL\).*the others' go on", line) for line in server.lines)
    assert victim not in fronts(server) and len(each_front(server)) == 2
    assert any(re.search(rf"debug front end \d has left; {lost} of its requests end", line) for line in server.lines), (
        "--debug is the engine's, too"
    )


def test_a_front_end_that_hangs_is_replaced_and_nobody_waits_for_it(server: Server) -> None:
    server.wait_idle(headers=ONE)
    replaced, streams = serving_again(server), streams_of(server, 4, max_tokens=LONG)
    victim = streams[0][2]
    os.kill(victim, signal.SIGSTOP)
    time.sleep(0.2)
    assert (
        all(goes_on(sock) for sock, _, whose in streams if whose != victim)
        and server.ask("GET", "/health").status == 200
    )
    for sock, *_ in streams:
        sock.close()
    wait_for(lambda: serving_again(server) == replaced + 1)
    assert victim not in fronts(server) and len(fronts(server)) == 2
    assert any("hangs: its event loop has not turned" in line for line in server.lines)
    server.wait_idle(headers=ONE)


def test_a_signal_lets_all_streams_of_all_front_ends_end(server: Server) -> None:
    """The last one that this server is used for."""
    streams = streams_of(server, 6, max_tokens=250)
    server.signal()
    for sock, head, _ in streams:
        events, complete = ended(sock, head)
        assert complete and events[-1] == "[DONE]"
    assert server.wait(5) == 0 and not server.children()
    assert any("Stopping: " in line and "running requests" in line for line in server.lines)


def test_the_engines_death_is_told_by_every_front_end_and_ends_all(tmp_path: Path) -> None:
    """Over a Unix socket, which is its owner's alone and goes with the server."""
    path = tmp_path / "api"
    with serving(*HASH, "--uds", str(path), command=SERVE) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        socks, heads = [], []
        while len(socks) < 12 or not all(
            accepted(server, path)
        ):  # dealt out evenly, but not to somebody who gets no time
            assert len(socks) < 16
            socks.append(server.raw(post_bytes("/v1/completions", {**TEXT, "max_tokens": LONG}, "Connection: close")))
            heads.append(read_until(socks[-1], b"data: "))
        (engine,) = server.members("headrace.engine.process")
        os.kill(engine, signal.SIGKILL)
        begun = time.monotonic()
        for sock, head in zip(socks, heads, strict=True):
            events, complete = ended(sock, head)
            assert not complete and events[-1]["error"]["type"] == "service_unavailable_error"
        assert server.wait(10) == 1 and time.monotonic() - begun < 5
        assert {found[1] for line in server.lines if (found := re.search(r"request front=(\d) ", line))} == {"1", "2"}
        assert sum("The engine has died" in line for line in server.lines) == 1
        wait_for(lambda: not server.children() and not path.exists(), 5)


def test_ready_speaks_for_all_front_ends_and_one_that_is_replaced_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        async def reply_json(self, body: Any) -> None:
            assert body == {"status": "ready"}

    def ready(service: Service) -> bool:
        with contextlib.suppress(Unavailable):
            asyncio.run(app.ready(service, Asked()))  # type: ignore[arg-type]
            return True
        return False

    monkeypatch.setattr(service_module, "freeze_start", lambda: None)
    counters, engine = Counters.create(2), FakeEngine(64, 0.0)
    first, second, later = (Service(ServerConfig(), "0", [], counters=counters, number=number) for number in (0, 1, 1))
    first.attach(engine)  # type: ignore[arg-type]
    assert not ready(first) and not ready(second)
    second.attach(engine)  # type: ignore[arg-type]
    assert ready(first) and ready(second)
    second.limits.page.vacate()  # its process is gone
    assert ready(first) and not ready(later)


def test_what_one_front_end_does_not_answer_the_others_still_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks still waits when the parent stops waiting for one that hangs."""
    assert link.PASSED_ON_SECONDS <= link.ANSWER_SECONDS - 0.5
    monkeypatch.setattr(link, "PASSED_ON_SECONDS", 0.3)

    async def talk(sock: socket.socket, kinds: Any, respond: Respond) -> Channel:
        made = Channel(kinds, print, lambda: None, respond)
        await made.open(sock)
        return made

    async def own(question: Question) -> Any:
        return [{"id": "mine"}]

    async def ask() -> Sequence[Any]:
        with contextlib.ExitStack() as stack:
            pairs = [
                tuple(map(stack.enter_context, socket.socketpair())) for _ in range(3)
            ]  # to who asks, one that answers, one that hangs
            others = [await talk(ours, link.FromFront, own) for ours, _ in pairs[1:]]

            async def passed_on(question: link.Ask) -> Any:
                return await link.ask_all(others, question.what, question.about)

            await talk(pairs[0][0], link.FromFront, passed_on)
            await talk(pairs[1][1], link.FromParent, own)
            return await link.PeersBehindParent(await talk(pairs[0][1], link.FromParent, own)).others(
                "list_requests", ""
            )

    assert asyncio.run(ask()) == [[{"id": "mine"}]]


def test_a_unix_socket_takes_the_place_of_one_that_nobody_listens_on_and_of_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "api"
    first = bind_unix(str(path), 0o666)
    assert path.stat().st_mode & 0o777 == 0o666
    with pytest.raises(ConfigError, match="in use"):
        bind_unix(str(path), 0o600)
    first.listen(0)
    with pytest.raises(ConfigError, match="in use"):  # its queue is full (with the one above): whoever listens hangs
        bind_unix(str(path), 0o600)
    first.close()  # as a killed server leaves it
    bind_unix(str(path), 0o600).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="--uds"):
        bind_unix(str(path), 0o600)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="uds is empty"):  # the kernel would choose a name of its own
        ServerConfig(uds="")
