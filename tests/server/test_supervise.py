"""``--supervise``: whoever dies, the server comes back clean on the same port, and a parent that dies takes all with it. (No model: keyed hash.)"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import (
    ROOT,
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

HASH = ("--executor", "keyed-hash", "--device-time", "0.005", "--supervise")
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 3000, "ignore_eos": True, "stream": True}
SCRIPT = """
import os, sys
from headrace.server import supervisor
supervisor.FIRST_WAIT, supervisor.LOOK_SECONDS, supervisor.HANG_LOOKS = 0.01, 0.05, {looks}
lives = 0
def start(ready):
    print("life", flush=True)
    {body}
sys.exit(supervisor.Supervisor(start).run())
"""


def members(server: Server) -> tuple[int, int]:
    """(server process, engine process) of a supervised server."""
    (engine,) = server.members("headrace.engine.process")
    (front,) = server.members("serve")
    return front, engine


def is_ready(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return server.ask("GET", "/ready", timeout=2).status == 200
    return False


def is_free(port: int) -> bool:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        return True
    return False


def test_a_dead_engine_is_told_and_the_server_comes_back_on_its_port() -> None:
    with serving(*HASH, command=SERVE) as server:
        for victim in (1, 0):  # the engine first, then the server process
            with server.raw(post_bytes("/v1/completions", TEXT)) as sock:
                head = read_until(sock, b"\n\n\r\n")
                before = members(server)
                os.kill(before[victim], signal.SIGKILL)
                _, body, complete = split_response(head + read_until_closed(sock)) if victim else (b"", b"", False)
                assert not complete and (not victim or events_of(body)[-1]["error"]["type"] == "service_unavailable_error")
            wait_for(lambda before=before: not {*before} & {*server.children()}, 5)  # type: ignore[misc]
            wait_for(lambda: is_ready(server), 10)
            assert not {*before} & {*members(server)}
        assert sum("it starts again" in line for line in server.lines) == 2
        assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2}).status == 200
        server.signal()
        assert server.wait(5) == 0 and not server.children()


def test_the_example_of_a_config_file_starts_as_it_is() -> None:
    """But for its port, which others may hold."""
    with serving("--config", str(ROOT / "deploy" / "serve.yaml"), command=SERVE) as server:
        answer = server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 2})
        assert answer.status == 200 and json.loads(server.lines[-1])["message"] and members(server)


def test_a_signal_drains_and_a_second_one_does_not() -> None:
    with serving(*HASH, command=SERVE) as server:
        sock = server.raw(post_bytes("/v1/completions", {**TEXT, "max_tokens": 60}, "Connection: close"))
        head = read_until(sock, b"\n\n")
        server.signal()
        _, body, complete = split_response(head + read_until_closed(sock))
        assert complete and events_of(body)[-1] == "[DONE]" and server.wait(5) == 0 and not server.children()
    with serving(*HASH, command=SERVE) as server:
        with server.raw(post_bytes("/v1/completions", TEXT)) as sock:
            read_until(sock, b"\n\n")
            server.signal()
            time.sleep(0.3)
            server.signal(signal.SIGINT)
            assert b"[DONE]" not in read_until_closed(sock)
        assert server.wait(3) == 1 and not server.children()


def test_a_killed_parent_takes_everybody_along_even_those_that_are_stopped() -> None:
    with serving(*HASH, command=SERVE) as server:
        _, engine = members(server)
        os.kill(engine, signal.SIGSTOP)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: not server.children(), 5)
        wait_for(lambda: is_free(server.port), 1)  # a process that is ending loses its memory before its files


def supervised(body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(body=body, looks=3 if "sleep(60)" in body else 8)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, env=environment())


@pytest.mark.parametrize(
    ("body", "lives", "status"),
    [
        ("return 0", 1, 0),
        ("return 2", 1, 2),  # wrong settings stay wrong
        ("from headrace.errors import ModelError; raise ModelError('no such model')", 1, 1),
        ("return 3", 5, 3),
        ("os.kill(os.getpid(), 9)", 5, 137),
        ("import time; time.sleep(60)", 5, 137),  # its event loop does not turn
        ("os.kill(os.getppid(), 15); import time; time.sleep(9)", 1, 0),  # a signal before the server handles any
    ],
)
def test_what_cannot_succeed_is_given_up(body: str, lives: int, status: int) -> None:
    done = supervised(body)
    assert done.returncode == status and done.stdout.count("life") == lives, done
    assert ("Giving up" in done.stderr) == (lives == 5) and done.stderr.count("The server hangs") == (5 if "sleep(60)" in body else 0)


def test_lives_that_became_ready_are_not_counted_as_failed_starts(tmp_path: Path) -> None:
    count = tmp_path / "count"
    done = supervised(f"ready(); lives = os.path.getsize({str(count)!r}) if os.path.exists({str(count)!r}) else 0\n"
                      f"    open({str(count)!r}, 'a').write('x'); return 0 if lives == 7 else 1")  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("life") == 8
