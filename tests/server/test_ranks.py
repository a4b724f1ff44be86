"""A served model over two ranks: one that is killed ends the server's answers and itself, by name; nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.serving import SERVE, events_of, post_bytes, read_until, read_until_closed, serving, split_response, wait_for

TEXT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True}
FLAGS = ("--tensor-parallel-size", "2", "--device", "cpu", "--threads", "1", "--kv-cache-memory", "8M", "--dtype", "float32")


@pytest.mark.parametrize("running", [True, False])
def test_a_killed_rank_is_told_to_clients_and_ends_the_server(tmp_path: Path, running: bool) -> None:
    with serving(str(tiny.save("llama", tmp_path)), *FLAGS, command=SERVE) as server:
        (rank,) = server.members("headrace.parallel.follower")
        sock = server.raw(post_bytes("/v1/completions", TEXT)) if running else None
        head = read_until(sock, b"\n\n\r\n") if sock is not None else b""
        os.kill(rank, signal.SIGKILL)
        begun = time.monotonic()
        if sock is not None:
            _, body, complete = split_response(head + read_until_closed(sock))
            last = events_of(body)[-1]
            assert not complete and last["error"]["type"] == "service_unavailable_error"
        assert server.wait(10) == 1 and time.monotonic() - begun < 5
        assert any("rank 1 (process" in line and "SIGKILL" in line for line in server.lines), server.lines
        wait_for(lambda: not server.children(), 5)


def test_a_killed_engine_takes_its_ranks_along(tmp_path: Path) -> None:
    with serving(str(tiny.save("llama", tmp_path)), *FLAGS, command=SERVE) as server:
        (engine,), (rank,) = server.members("headrace.engine.process"), server.members("headrace.parallel.follower")
        os.kill(engine, signal.SIGKILL)
        assert server.wait(10) == 1
        wait_for(lambda: rank not in server.children(), 5)
