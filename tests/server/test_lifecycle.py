"""A server's life seen from outside: loading, a full queue, draining, death, and starts that fail."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.support.serving import (
    FAKE,
    SERVE,
    Server,
    environment,
    events_of,
    post_bytes,
    read_until,
    read_until_closed,
    serving,
    split_response,
    wait_for,
)

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
DIES, HANGS, STALLS = 1002, 1008, 1009  # behaviours of fake_engine.py


def streams(server: Server, count: int, **fields: Any) -> list[socket.socket]:
    """Open streams that have had their first event."""
    socks = [
        server.raw(post_bytes("/v1/chat/completions", {**CHAT, **fields, "stream": True}, "Connection: close"))
        for _ in range(count)
    ]
    for sock in socks:
        read_until(sock, b"\r\n\r\n")
    return socks


def test_while_loading_everything_is_answered_and_nothing_is_ready() -> None:
    server = Server([*FAKE, "--load-seconds", "0.6"])
    try:
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            answer = server.ask("GET", path)
            if path == "/metrics":
                assert answer.status == 200
                continue
            assert answer.status == 503 and answer.error["type"] == "service_unavailable_error"
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert server.ask("POST", "/v1/chat/completions", CHAT).status == 503
        server.wait_ready()
        assert server.ask("GET", "/health").status == 200
        assert not any("loading" in line for line in server.lines)  # probes that come too early are no news
    finally:
        server.stop()


def test_a_signal_while_loading_ends_the_start() -> None:
    server = Server([*FAKE, "--load-seconds", "30"])
    try:
        server.signal()
        assert server.wait(3) == 0
    finally:
        server.stop()


def test_a_full_queue_says_when_to_come_back() -> None:
    with serving("--max-queue", "2") as server:
        held = streams(server, 2, max_tokens=400)
        answer = server.ask("POST", "/v1/chat/completions", CHAT)
        assert answer.status == 429 and answer.error["code"] == "queue_full"
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert server.ask("POST", "/v1/completions", {"prompt": ["a", "b", "c"]}).error["param"] == "prompt"
        assert server.ask("POST", "/tokenize", {"prompt": "x"}).status == 200
        for sock in held:
            sock.close()
        server.wait_idle()
        assert server.ask("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 1}).status == 200


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    with serving() as server:
        held = streams(server, 4, max_tokens=80)
        idle = server.connect()
        idle.connect()
        server.signal()
        begun = time.monotonic()
        while server.ask("GET", "/ready").status != 503:
            assert time.monotonic() - begun < 0.5
        refused = server.ask("POST", "/v1/chat/completions", CHAT)
        assert refused.status == 503 and refused.headers["retry-after"] and server.ask("GET", "/health").status == 200
        for sock in held:
            data = b"x-head\r\ntransfer-encoding: chunked\r\n\r\n" + read_until_closed(sock)
            _, body, complete = split_response(data)
            events = events_of(body)
            assert complete and events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait(5) == 0


def test_after_the_timeout_streams_end_in_an_error_event_and_the_exit_is_clean() -> None:
    with serving("--shutdown-timeout", "0.4") as server:
        held = streams(server, 3, max_tokens=400)
        whole = server.raw(post_bytes("/v1/chat/completions", {**CHAT, "max_tokens": 400}))
        time.sleep(0.1)
        server.signal()
        for sock in held:
            _, body, complete = split_response(b"x\r\ntransfer-encoding: chunked\r\n\r\n" + read_until_closed(sock))
            assert not complete and "error" in events_of(body)[-1]
        assert b" 503 " in read_until_closed(whole).split(b"\r\n")[0]
        assert server.wait(4) == 0


def test_nohup_stays_nohup() -> None:
    server = Server(["nohup", *FAKE])
    try:
        server.wait_ready().signal(signal.SIGHUP)
        time.sleep(0.2)
        assert server.ask("GET", "/health").status == 200
    finally:
        server.stop()


class Unread(Server):
    """Nobody reads its stderr once it is ready."""

    def _read(self) -> None:
        assert self.process.stderr is not None
        fcntl.fcntl(self.process.stderr, fcntl.F_SETPIPE_SZ, 8192)
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if "Ready after" in line:
                self.held = self.process.stderr
                return


def test_a_pipe_that_nobody_reads_stops_no_request_and_a_terminal_that_closes_drains() -> None:
    """Lines are lost, and counted where the next one is read. Then SIGHUP to the whole group, twice: the terminal sends
    one, its shell another."""
    server = Unread([*SERVE, "--executor", "keyed-hash", "--device-time", "0.002"])
    try:
        server.wait_ready()
        for _ in range(80):
            assert server.ask("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 1}, timeout=5).status == 200
        threading.Thread(target=Server._read, args=(server,), daemon=True).start()
        wait_for(lambda: any("request" in line for line in server.lines))
        assert server.ask("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 1}).status == 200
        wait_for(lambda: any(re.search(r"\d+ lines are missing here", line) for line in server.lines))
        held = streams(server, 2, max_tokens=60, ignore_eos=True)
        for _ in range(2):
            os.killpg(server.process.pid, signal.SIGHUP)
            time.sleep(0.05)
        for sock in held:
            assert b"[DONE]" in read_until_closed(sock)
        assert server.wait(10) == 0
    finally:
        server.stop()


def test_a_second_signal_ends_within_two_seconds() -> None:
    with serving("--shutdown-timeout", "60") as server:
        held = streams(server, 2, max_tokens=400)
        server.signal()
        time.sleep(0.2)
        assert server.process.poll() is None
        server.signal(signal.SIGINT)
        assert server.wait(2) == 1
        for sock in held:
            assert b"[DONE]" not in read_until_closed(sock)


def test_a_dead_engine_ends_every_stream_visibly_and_the_process_with_an_error() -> None:
    with serving() as server:
        held = streams(server, 2, max_tokens=400)
        with server.raw(post_bytes("/v1/chat/completions", {**CHAT, "seed": DIES, "stream": True})) as sock:
            _, body, complete = split_response(read_until_closed(sock))
        assert not complete and "error" in events_of(body)[-1]
        for sock in held:
            _, body, complete = split_response(b"x\r\ntransfer-encoding: chunked\r\n\r\n" + read_until_closed(sock))
            assert not complete and events_of(body)[-1]["error"]["type"] == "service_unavailable_error"
        assert server.wait(5) == 1
        assert any("died" in line for line in server.lines)


def test_an_engine_that_hangs_is_unhealthy_at_once_and_given_up_later() -> None:
    with serving() as server:
        held = streams(server, 1, max_tokens=400, seed=HANGS)[0]
        begun = time.monotonic()
        while server.ask("GET", "/health").status == 200:
            assert time.monotonic() - begun < 0.5
        assert server.process.poll() is None and server.ask("GET", "/ready").status == 503
        _, body, complete = split_response(b"x\r\ntransfer-encoding: chunked\r\n\r\n" + read_until_closed(held))
        assert not complete and "error" in events_of(body)[-1]
        assert server.wait(5) == 1


def test_a_server_that_was_stopped_itself_does_not_take_that_time_for_the_engines() -> None:
    with serving() as server:
        with server.raw(
            post_bytes(
                "/v1/chat/completions", {**CHAT, "seed": STALLS, "stream": True, "max_tokens": 20}, "Connection: close"
            )
        ) as sock:
            while server.ask("GET", "/health").status == 200:
                pass
            server.signal(signal.SIGSTOP)
            time.sleep(1.2)  # longer than an engine may hang here
            server.signal(signal.SIGCONT)
            assert b"[DONE]" in read_until_closed(sock)
        assert server.ask("GET", "/ready").status == 200


def failing_start(*arguments: str, seconds: float = 15.0) -> tuple[int, list[str]]:
    """Exit status and lines on stderr of a start that fails, with nothing left behind."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": environment()}
    done = subprocess.run([*SERVE, *arguments], timeout=seconds, check=False, **options)
    return done.returncode, done.stderr.splitlines()


def test_a_port_in_use_is_one_line_and_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, lines = failing_start("--port", str(taken.getsockname()[1]))
    assert status == 2 and len(lines) == 1 and "address already in use" in lines[0] and "--port" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--no-such-flag",), "--no-such-flag"),
        (("--port", "http"), "--port"),
        (("--port", "70000"), "port"),
        (("--host", "0.0.0.0"), "--api-key"),
        (("--host", "no.such.host.invalid", "--api-key", "k"), "--host"),
        (("--max-num-seqs", "0"), "num_seqs"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_status_two(arguments: tuple[str, ...], word: str) -> None:
    status, lines = failing_start(*arguments)
    assert status == 2 and len(lines) == 1 and word in lines[0] and lines[0].startswith("headrace: ")


def test_serving_imports_no_torch_and_no_framework() -> None:
    """The front end's process stays light; the engine's has the rest."""
    heavy = ("torch", "fastapi", "starlette", "pydantic", "transformers", "numpy", "headrace.engine.core")
    code = f"import sys, headrace.server.run, headrace.engine.client; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, env=environment()
    )
    assert done.stdout.strip() == "[]"
