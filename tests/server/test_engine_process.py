"""The server and its engine process together: whichever of them dies, nothing hangs, lies or stays behind. (No model:
keyed hash.)"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from headrace import LLM
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

HASH = ("--executor", "keyed-hash", "--device-time", "0.005", "--max-num-seqs", "16")
TEXT: dict[str, Any] = {"prompt": "hello there", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """For what leaves a server as it was."""
    with serving(*HASH, "--device-time", "0.002", command=SERVE) as running:
        yield running


def test_an_engine_killed_mid_stream_is_told_to_every_client_and_ends_the_server() -> None:
    with serving(*HASH, command=SERVE) as server:
        socks = [server.raw(post_bytes("/v1/completions", TEXT)) for _ in range(4)]
        heads = [read_until(sock, b"\n\n\r\n") for sock in socks]
        (engine,), whole = (
            server.members("headrace.engine.process"),
            post_bytes("/v1/completions", {**TEXT, "stream": False}),
        )
        answers = [server.raw(whole) for _ in range(5)]  # some are read before the engine's end is known, some after
        os.kill(engine, signal.SIGKILL)
        begun = time.monotonic()
        for sock, head in zip(socks, heads, strict=True):
            _, body, complete = split_response(head + read_until_closed(sock))
            last = events_of(body)[-1]
            assert not complete and last["error"]["type"] == "service_unavailable_error"
        assert all(b" 503 " in read_until_closed(sock).split(b"\r\n")[0] for sock in answers), server.lines
        assert server.wait(10) == 1 and time.monotonic() - begun < 5
        wait_for(lambda: not server.children(), 5)


def test_an_engine_seed_gives_the_same_tokens_offline_and_served() -> None:
    """Requests without a seed of their own, in order of arrival; what was refused in between has no place in it. (With
    a model.)"""
    small: dict[str, Any] = {"seed": 11, "max_model_len": 64, "kv_cache_memory": 8 << 20, "threads": 1}
    drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    prompts = [[5, 6, 7], [5, 6, 7], [8]]
    with LLM(**small) as llm:
        params = replace(llm.get_default_sampling_params(), **drawn)
        expected = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert expected[0] != expected[1]
    flags = [text for name, value in small.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    with serving(*flags, command=SERVE) as server:
        bodies = [
            {**drawn, "prompt": prompt, "return_token_ids": True} for prompt in (prompts[0], [10**6], *prompts[1:])
        ]
        answers = [server.ask("POST", "/v1/completions", body) for body in bodies]
    assert [answer.status for answer in answers] == [200, 400, 200, 200]
    assert [answer.json["choices"][0]["token_ids"] for answer in answers if answer.status == 200] == expected


def test_a_killed_server_takes_its_engine_along() -> None:
    with serving(*HASH, command=SERVE) as server:
        with server.raw(post_bytes("/v1/completions", TEXT)) as sock:
            read_until(sock, b"\n\n")
            assert server.children()
            os.kill(server.process.pid, signal.SIGKILL)
            assert b"[DONE]" not in read_until_closed(sock)
        wait_for(lambda: not server.children(), 5)


def test_a_second_signal_does_not_wait_for_a_long_step() -> None:
    with serving("--executor", "keyed-hash", "--device-time", "6", command=SERVE) as server:
        with server.raw(post_bytes("/v1/completions", TEXT)):
            time.sleep(0.3)
            server.signal()
            time.sleep(0.2)
            server.signal()
            assert server.wait(2) == 1
        wait_for(lambda: not server.children(), 2)


def test_a_signal_while_the_model_loads_leaves_nothing() -> None:
    server = Server(SERVE)
    try:
        wait_for(server.children, 5)
        server.signal()
        assert server.wait(3) == 0
        wait_for(lambda: not server.children(), 2)
    finally:
        server.stop()


def test_a_terminated_server_leaves_nothing() -> None:
    with serving(*HASH, command=SERVE) as server:
        sock = server.raw(post_bytes("/v1/completions", {**TEXT, "max_tokens": 60}, "Connection: close"))
        head = read_until(sock, b"\n\n")
        server.signal()
        _, body, complete = split_response(head + read_until_closed(sock))
        assert complete and events_of(body)[-1] == "[DONE]"
        assert server.wait(5) == 0
        assert not server.children()


@pytest.mark.parametrize("streamed", [True, False])
def test_clients_that_leave_give_their_blocks_back(server: Server, streamed: bool) -> None:
    for wait in (0.0, 0.02, 0.2):
        socks = [server.raw(post_bytes("/v1/completions", {**TEXT, "n": 2, "stream": streamed})) for _ in range(6)]
        time.sleep(wait)
        for sock in socks:
            sock.close()
    server.wait_idle(2)
    page = server.ask("GET", "/metrics").body.decode()
    usage = next(line for line in page.splitlines() if line.startswith("vllm:kv_cache_usage_perc"))
    assert float(usage.split()[-1]) == 0.0


def test_hostile_requests_change_nobody_elses_tokens(server: Server) -> None:
    """Neighbours answer alone first, then beside wrong ids, wrong types and clients that leave, twice."""
    asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    hostile: list[dict[str, Any]] = [
        {"prompt": [-1]}, {"prompt": [8192]}, {"prompt": [[1], [2**31]]}, {"logit_bias": {"8192": 1}}, {"allowed_token_ids": [-1]},
        {"stop_token_ids": [2**31]}, {"prompt": [5] * 5000}, {"max_tokens": 10**6}, {"n": 10**9}, {"temperature": 1e308}, {"stop": [[]]},
        {"seed": "x"},
    ]  # fmt: skip

    def neighbour(index: int) -> list[int]:
        answer = server.ask("POST", "/v1/completions", {**asked, "prompt": f"neighbour {index}"}).json
        return list(answer["choices"][0]["token_ids"])

    alone = [neighbour(index) for index in range(6)]
    with ThreadPoolExecutor(6) as threads:
        beside = [threads.submit(neighbour, index) for index in range(6)]
        for fields in hostile:
            left = server.raw(post_bytes("/v1/completions", TEXT, "X-Request-Id: same"))
            refused = server.ask("POST", "/v1/completions", {"prompt": "x", **fields}, {"X-Request-Id": "same"})
            assert refused.status == 400 and refused.error["param"].partition("[")[0] in fields
            left.close()
            left.close()
        assert [each.result() for each in beside] == alone
    server.wait_idle(2)


def test_a_model_that_is_not_there_is_one_line_and_leaves_nothing() -> None:
    server = Server([*SERVE, "--model", "/nowhere/at/all"])
    try:
        assert server.wait(15) == 1
        errors = [line for line in server.lines if "headrace:" in line]
        assert (
            len(errors) == 1
            and "/nowhere/at/all" in errors[0]
            and not any("Traceback" in line for line in server.lines)
        )
        assert not server.children()
    finally:
        server.stop()
