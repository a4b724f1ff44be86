"""What an operator relies on: health that tells the truth, lines that a collector can read, tenants that share nothing. (No model: keyed hash.)"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.serving import SERVE, Server, serving, wait_for

HASH = ("--executor", "keyed-hash", "--device-time", "0.002")
PROMPT = "a secret plan " * 40
ONE, TWO = {"Authorization": "Bearer key-one"}, {"Authorization": "Bearer key-two"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*HASH, "--log-format", "json", "--api-key", "key-one", "key-two", command=SERVE) as server:
        yield server


def cached(server: Server, headers: dict[str, str], **fields: Any) -> int:
    answer = server.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **fields}, headers)
    assert answer.status == 200, answer
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_prefixes_belong_to_the_key_and_the_salt_that_made_them(server: Server) -> None:
    assert cached(server, ONE) == 0 and cached(server, ONE) > 0
    assert cached(server, TWO) == 0 and cached(server, TWO) > 0  # the other's are as if they were not there
    own = "mine" * 256  # as long as it may be
    assert cached(server, ONE, cache_salt=own) == 0 and cached(server, ONE, cache_salt=own) > 0
    assert cached(server, TWO, cache_salt=own) == 0  # the same salt of another key is another


def test_prefixes_of_all_keys_may_be_shared_where_that_is_wanted() -> None:
    with serving(*HASH, "--prefix-sharing", "all", "--api-key", "key-one", "key-two", command=SERVE) as server:
        assert cached(server, ONE) == 0 and cached(server, TWO) > 0 and cached(server, TWO, cache_salt="mine") == 0


def test_every_line_is_an_object_and_none_holds_what_a_client_wrote(server: Server) -> None:
    named = {**ONE, "X-Request-Id": "client-7"}
    server.ask("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}, named)
    server.ask("POST", "/v1/completions", {"prompt": PROMPT, "temperature": "hot" + PROMPT}, ONE)
    server.ask("GET", "/no/such%1b%0aroute", headers=ONE)
    server.ask("GET", "/v1/models", headers={"Authorization": "Bearer wrong-key"})
    wait_for(lambda: any('"status": 401' in line for line in server.lines), 5)
    entries = [json.loads(line) for line in server.lines]
    (mine,) = [entry for entry in entries if entry.get("id") == "client-7"]
    assert (mine["message"], mine["route"], mine["status"], mine["tokens_out"], mine["finish_reason"]) == (
        "request",
        "/v1/completions",
        200,
        3,
        "length",
    )
    assert mine["tokens_in"] > 0 and mine["cached"] >= 0 and all(mine[phase] >= 0 for phase in ("queue", "prefill", "decode", "seconds"))
    assert {200, 400, 404, 401} <= {entry.get("status") for entry in entries}
    everything = "\n".join(server.lines)
    assert not re.search(r"secret plan|key-one|key-two|wrong-key|no/such|Traceback|site-packages|0x[0-9a-f]{6,}", everything)


def steps(server: Server) -> float:
    page = server.ask("GET", "/metrics", headers=ONE).body.decode()
    (found,) = re.findall(r"^headrace_steps_total (\S+)", page, re.M)
    return float(found)


def test_health_is_true_both_ways_and_costs_the_engine_nothing(server: Server) -> None:
    before = steps(server)
    assert all(server.ask("GET", "/health").status == 200 for _ in range(50)) and steps(server) == before
    (engine,) = server.members("headrace.engine.process")
    os.kill(engine, signal.SIGSTOP)
    begun = time.monotonic()
    while (answer := server.ask("GET", "/health")).status == 200:
        assert time.monotonic() - begun < 8, "a frozen engine counts as healthy"
        time.sleep(0.1)
    assert time.monotonic() - begun > 3 and answer.error["type"] == "service_unavailable_error"
    os.kill(engine, signal.SIGCONT)
    begun = time.monotonic()
    while server.ask("GET", "/health").status != 200:
        assert time.monotonic() - begun < 3, "an engine that is back counts as sick"
        time.sleep(0.05)
    assert cached(server, ONE) >= 0


def test_saturation_with_long_prompts_raises_no_alarm(server: Server) -> None:
    body = {"prompt": list(range(5, 4000)), "max_tokens": 8, "ignore_eos": True}
    until = time.monotonic() + 1.5

    def load(index: int) -> int:
        count = 0
        while time.monotonic() < until:
            assert server.ask("POST", "/v1/completions", {**body, "cache_salt": f"{index} {count}"}, ONE).status == 200
            count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, index) for index in range(8)]
        times = []
        while time.monotonic() < until:
            begun = time.monotonic()
            assert server.ask("GET", "/health").status == 200
            times.append(time.monotonic() - begun)
            time.sleep(0.05)
        assert sum(each.result() for each in loads) > 8
    assert len(times) > 5
