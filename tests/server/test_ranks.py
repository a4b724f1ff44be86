"""A served model over two ranks: one that is killed ends the server's answers and itself, by name; nothing stays
behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.support import tiny
from tests.support.serving import (
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

TEXT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
FLAGS = (
    "--tensor-parallel-size",
    "2",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--kv-cache-memory",
    "8M",
    "--dtype",
    "float32",
)


def test_a_killed_rank_is_told_to_clients_and_ends_the_server(tmp_path: Path) -> None:
    with serving(str(tiny.save("llama", tmp_path)), *FLAGS, command=SERVE) as server:
        (rank,) = server.members("headrace.parallel.follower")
        sock = server.raw(post_bytes("/v1/completions", TEXT))
        head = read_until(sock, b"\n\n\r\n")
        os.kill(rank, signal.SIGKILL)
        begun = time.monotonic()
        _, body, complete = split_response(head + read_until_closed(sock))
        last = events_of(body)[-1]
        assert not complete and last["error"]["type"] == "service_unavailable_error"
        assert server.wait(10) == 1 and time.monotonic() - begun < 5
        assert any("rank 1 (process" in line and "SIGKILL" in line for line in server.lines), server.lines
        wait_for(lambda: not server.children(), 5)


def test_a_supervised_server_comes_back_on_its_port_with_new_ranks(tmp_path: Path) -> None:
    """The rank is killed while nobody asks for anything. Then the engine is: it takes its rank along."""
    with serving(str(tiny.save("llama", tmp_path)), *FLAGS, "--supervise", command=SERVE) as server:
        asked = {**TEXT, "stream": False, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        wanted = server.ask("POST", "/v1/completions", asked).json["choices"][0]["token_ids"]
        (rank,) = server.members("headrace.parallel.follower")
        os.kill(rank, signal.SIGKILL)
        wait_for(lambda: (found := server.members("headrace.parallel.follower")) and found != [rank], 20)
        wait_for(lambda: is_ready(server), 40)
        assert server.ask("POST", "/v1/completions", asked).json["choices"][0]["token_ids"] == wanted
        (engine,), (rank,) = server.members("headrace.engine.process"), server.members("headrace.parallel.follower")
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: not {engine, rank} & {*server.children()}, 5)


def is_ready(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return server.ask("GET", "/ready", timeout=2).status == 200
    return False
