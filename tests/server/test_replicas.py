"""Several replicas behind one port: one that dies ends its own requests alone, and comes back; numbers by replica.

(No model: keyed hash.)
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.engine.client import AsyncLLM
from headrace.engine.replicas import _with_sums
from headrace.errors import ConfigError
from tests.support.serving import SERVE, Server, post_bytes, read_until, serving, wait_for

HASH = ("--executor", "keyed-hash", "--device-time", "0.004", "--data-parallel-size", "2")
TEXT: dict[str, Any] = {"prompt": [7] * 40, "max_tokens": 400, "ignore_eos": True, "stream": True}


def running(server: Server) -> list[int]:
    """By replica."""
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    told = {line.split()[0]: float(line.split()[1]) for line in lines if "num_requests_running{" in line}
    each = [int(told[f'vllm:num_requests_running{{model_name="demo",engine="{number}"}}']) for number in range(2)]
    assert told['headrace_num_requests_running{model_name="demo"}'] == sum(each)
    return each


def engines(server: Server) -> list[int]:
    return server.members("headrace.engine.process")


def begun(server: Server, count: int) -> list[Any]:
    """So many streams, each of which has come to its first text."""
    socks = [server.raw(post_bytes("/v1/completions", {**TEXT, "prompt": [9 + at] * 40})) for at in range(count)]
    for sock in socks:
        read_until(sock, b"\n\n\r\n")
    return socks


def ends(socks: Sequence[Any]) -> list[str]:
    """What each stream said last."""
    return [end_of(sock) for sock in socks]


def end_of(sock: Any) -> str:
    text = b""
    while b"[DONE]" not in text and (part := sock.recv(65536)):
        text += part
    return "done" if b"[DONE]" in text else "error" if b"service_unavailable_error" in text else text[-200:].decode()


def test_a_killed_replica_ends_its_own_requests_and_is_replaced() -> None:
    """Under a parent, with two front ends, each of which is handed the new one's socket."""
    with serving(*HASH, "--supervise", "--api-server-count", "2", command=SERVE) as server:
        before = engines(server)
        socks = begun(server, 6)
        assert running(server) == [3, 3]
        os.kill(before[0], signal.SIGKILL)
        assert sorted(ends(socks)) == ["done"] * 3 + ["error"] * 3
        wait_for(lambda: any("serves again" in line for line in server.lines), 20)
        assert len(engines(server)) == 2 and len(set(engines(server)) & set(before)) == 1
        socks = begun(server, 6)  # over both front ends
        assert running(server) == [3, 3]
        assert ends(socks) == ["done"] * 6


def test_without_supervision_the_others_go_on_until_none_is_left() -> None:
    with serving(*HASH, command=SERVE) as server:
        first, second = engines(server)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: any("of 2: the engine process" in line for line in server.lines), 5)
        asked = {**TEXT, "stream": False, "max_tokens": 5}
        assert [server.ask("POST", "/v1/completions", asked).status for _ in range(3)] == [200] * 3
        assert server.ask("GET", "/health").status == 200
        os.kill(second, signal.SIGKILL)
        assert server.wait(10) == 1


def test_a_conversation_finds_its_prefix_and_a_stopped_server_lets_answers_end() -> None:
    with serving(*HASH, command=SERVE) as server:
        for talk in range(4):
            ids = [50 + talk] * 64
            for turn in range(3):
                answer = server.ask("POST", "/v1/completions", {"prompt": ids, "max_tokens": 20, "ignore_eos": True})
                cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= (len(ids) - 36 if turn else 0), (talk, turn)
                ids = [*ids, *[90 + turn] * 16]
        socks = begun(server, 4)
        server.process.send_signal(signal.SIGTERM)
        assert ends(socks) == ["done"] * 4 and server.wait(10) == 0
        wait_for(lambda: not server.children(), 5)


def test_a_replica_that_cannot_start_ends_all() -> None:
    with pytest.raises(ConfigError, match="give 1 to 64"):
        asyncio.run(AsyncLLM.start(executor="keyed-hash", data_parallel_size=65))
    with pytest.raises(ConfigError, match="max_model_len"):
        asyncio.run(AsyncLLM.start(executor="keyed-hash", data_parallel_size=2, max_model_len=1 << 30))


def test_sums_are_of_what_can_be_summed() -> None:
    histogram = {"bounds": [1.0, 2.0], "counts": [1, 0, 2], "sum": 9.0}
    steps = {"measured_seconds": 2.0, "idle_seconds": 2.0, "floor_seconds": 1.0, "promise_tail": 1.5, "promise_seconds": 0.1,
             "last_step": {"begin": 4.0, "step_id": 8}, "prediction_errors": {"fit": {"signed": 0.5}}, "histograms": {"step": histogram}}  # fmt: skip
    idle = {
        **steps,
        "measured_seconds": 0.0,
        "idle_seconds": 0.0,
        "floor_seconds": 0.0,
        "last_step": None,
        "promise_tail": 3.0,
    }
    total = _with_sums(
        {
            0: {"num_running": 2, "steps": steps, "adapters": None, "drafts": {"accepted": [3]}},
            1: {"num_running": 3, "steps": idle, "adapters": None, "drafts": {"accepted": [2, 1]}},
            2: {"num_running": 0, "steps": None, "adapters": None, "drafts": {"accepted": []}},
        }
    )
    assert total["num_running"] == 5 and total["adapters"] is None and list(total["replicas"]) == [0, 1, 2]
    assert total["drafts"] == {"accepted": [5, 1]}  # counts by position begin with a replica's first draft of it
    found = total["steps"]
    assert (found["roofline_fraction"], found["idle_share"], found["promise_tail"]) == (0.5, 0.5, 3.0)
    assert found["histograms"]["step"] == {"bounds": [1.0, 2.0], "counts": [2, 0, 4], "sum": 18.0}
    assert found["last_step"]["step_id"] == 8 and found["prediction_errors"]["fit"]["signed"] == 0.5
