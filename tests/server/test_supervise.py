"""``--supervise``: whoever dies, the server comes back clean on the same port, and a parent that dies takes all with
it. (No model: keyed hash.)"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import time
from typing import Any

import pytest

from headrace.errors import ConfigError, EngineDead, HeadraceError, ModelError
from headrace.processes import child
from headrace.server.frontends import parent
from headrace.server.lifecycle import Signals
from tests.support.serving import (
    ROOT,
    SERVE,
    Server,
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


def members(server: Server) -> tuple[int, int]:
    """(front end, engine process) of a supervised server."""
    (engine,) = server.members("headrace.engine.process")
    (front,) = server.members("headrace.server.frontends.child")
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
        for victim in (1, 0):  # the engine first, with which all go, then the front end, which is replaced alone
            with server.raw(post_bytes("/v1/completions", TEXT)) as sock:
                head = read_until(sock, b"\n\n\r\n")
                before = members(server)
                os.kill(before[victim], signal.SIGKILL)
                _, body, complete = split_response(head + read_until_closed(sock)) if victim else (b"", b"", False)
                assert not complete and (
                    not victim or events_of(body)[-1]["error"]["type"] == "service_unavailable_error"
                )
            gone = {*before[: victim + 1]}
            wait_for(lambda gone=gone: not gone & {*server.children()}, 5)  # type: ignore[misc]
            wait_for(lambda: is_ready(server), 10)
            assert not gone & {*members(server)}
        assert sum("it starts again" in line for line in server.lines) == 2
        assert sum("The engine has died" in line for line in server.lines) == 1
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


class Life:
    """Of all front ends: it ends as it is told, after it was ready or before."""

    def __init__(self, end: int | HeadraceError, *, was_ready: bool, signals: Signals | None = None) -> None:
        self.was_ready = was_ready
        self._end, self._signals = end, signals

    async def run(self) -> int:
        if self._signals is not None:
            self._signals.count = 1
        if isinstance(self._end, HeadraceError):
            raise self._end
        return self._end


def supervised(*ends: tuple[int | HeadraceError, bool], signalled: bool = False) -> tuple[int | HeadraceError, int]:
    """How it ended, and after how many lives; the last goes on for ever."""

    async def run() -> int:
        return await parent.supervise(begin, signals)  # type: ignore[arg-type]

    signals, lives = Signals(), itertools.count(1)
    begun = 0

    def begin() -> Life:
        nonlocal begun
        begun = next(lives)
        end, was_ready = ends[min(begun, len(ends)) - 1]
        return Life(end, was_ready=was_ready, signals=signals if signalled else None)

    try:
        return asyncio.run(run()), begun
    except HeadraceError as error:
        return error, begun


DEAD, WRONG, GONE = EngineDead("it died"), ConfigError("a wrong setting"), ModelError("no such model")


@pytest.mark.parametrize(
    ("ends", "last", "lives"),
    [
        ([(0, True)], 0, 1),
        ([(WRONG, False)], WRONG, 1),  # wrong settings stay wrong
        ([(GONE, False)], GONE, 1),
        ([(1, True), (GONE, False), (0, True)], 0, 3),  # which was there before may come back
        ([(1, False)], 1, 5),
        ([(DEAD, False)], DEAD, 5),
        ([(DEAD, False)] * 4 + [(1, True)] + [(DEAD, False)], DEAD, 10),  # only a row of failed starts is hopeless
        ([(1, True)] * 7 + [(0, True)], 0, 8),
    ],
)
def test_what_cannot_succeed_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: list[Any], last: Any, lives: int
) -> None:
    monkeypatch.setattr(child, "FIRST_WAIT", 0.0)
    assert supervised(*ends) == (last, lives)
    assert ("Giving up" in caplog.text) == (lives in (5, 10)) and caplog.text.count("it starts again") == lives - 1


def test_after_a_signal_nothing_starts_again() -> None:
    assert supervised((1, True), signalled=True) == (1, 1)
