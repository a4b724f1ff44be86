"""What an operator relies on: health that tells the truth, lines that a collector can read, tenants that share nothing.
(No model: keyed hash.)"""

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

from headrace.server.limits import MAX_NAMES, IgnoredFields
from tests.support.serving import SERVE, Server, serving, wait_for

HASH = ("--executor", "keyed-hash", "--device-time", "0.002")
PROMPT = "a secret plan " * 40
ONE, TWO = {"Authorization": "Bearer key-one"}, {"Authorization": "Bearer key-two"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(
        *HASH, "--log-format", "json", "--api-key", "key-one", "key-two", "--unknown-fields", "ignore", command=SERVE
    ) as server:
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
    assert (
        mine["tokens_in"] > 0
        and mine["cached"] >= 0
        and all(mine[phase] >= 0 for phase in ("queue", "prefill", "decode", "seconds"))
    )
    assert {200, 400, 404, 401} <= {entry.get("status") for entry in entries}
    everything = "\n".join(server.lines)
    assert not re.search(
        r"secret plan|key-one|key-two|wrong-key|no/such|Traceback|site-packages|0x[0-9a-f]{6,}", everything
    )


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


def test_prefixes_are_forgotten_on_demand_and_who_runs_goes_on(server: Server) -> None:
    assert cached(server, ONE) >= 0 and cached(server, ONE) > 0 and cached(server, TWO) >= 0
    assert server.ask("POST", "/reset_prefix_cache").status == 401 and cached(server, ONE) > 0
    body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.ask, "POST", "/v1/completions", body, ONE)
        wait_for(lambda: server.ask("GET", "/load", headers=TWO).json == {"server_load": 1}, 5)
        answer = server.ask("POST", "/reset_prefix_cache", headers=ONE)
        assert (answer.status, answer.json) == (200, {"status": "ok"}) and not running.done()
        assert cached(server, ONE) == 0 and cached(server, ONE) > 0 and cached(server, TWO) == 0, (
            "nobody's is left, whoever asks"
        )
        alone = running.result()
    assert (
        alone.status == 200
        and alone.json["choices"][0]["text"]
        == server.ask("POST", "/v1/completions", body, ONE).json["choices"][0]["text"]
    )
    assert (
        server.ask("GET", "/load", headers=ONE).json == {"server_load": 0} and server.ask("GET", "/load").status == 401
    )


def test_a_probe_under_another_name_and_what_a_server_is_set_to(server: Server) -> None:
    for method in ("GET", "POST", "HEAD"):
        assert server.ask(method, "/ping").status == 200 and server.ask(method, "/ping").body == b""
    assert server.ask("GET", "/server_info").status == 401
    info = server.ask("GET", "/server_info?config_format=json", headers=ONE)
    config = info.json["config"]
    assert (
        config["device"]["executor"] == "keyed-hash"
        and config["server"]["max_queue"] == 1024
        and config["server"]["api_key"] == "2 set"
    )
    assert {"name", "value", "reason"} == set(info.json["decisions"][0]) and info.json["engine"]["served_names"]
    assert "key-one" not in info.body.decode() and "key-two" not in info.body.decode()


def test_fields_that_no_route_knows_are_left_out_where_that_is_wanted_and_told(server: Server) -> None:
    fields = {"prompt": "x", "max_tokens": 1, "frobnicate": {"deep": [1]}, "evil\nname": 1, "frobnicate2": None}
    for _ in range(2):
        assert server.ask("POST", "/v1/completions", fields, ONE).status == 200
    lines = [line for line in server.lines if "left out" in line]
    assert sum("frobnicate " in line for line in lines) == 1 and sum("(no plain name)" in line for line in lines) == 1
    assert "evil" not in "".join(server.lines)
    page = server.ask("GET", "/metrics", headers=ONE).body.decode()
    assert re.search(r"^headrace_ignored_fields_total{.*} 6$", page, re.M)
    known = server.ask("POST", "/v1/completions", {"prompt": "x", "best_of": 3, "frobnicate": 1}, ONE)
    assert known.status == 400 and known.error["code"] == "unsupported_parameter" and known.error["param"] == "best_of"
    chat = server.ask("GET", "/openapi.json", headers=ONE).json["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["additionalProperties"] is True


def test_unknown_names_are_told_a_bounded_number_of_times(caplog: pytest.LogCaptureFixture) -> None:
    total = [0]
    fields = IgnoredFields(lambda count: total.__setitem__(0, total[0] + count))
    for number in range(10 * MAX_NAMES):
        fields.note("/v1/completions", [f"field{number}", "x" * 100])
    assert total[0] == 20 * MAX_NAMES and len(caplog.records) == MAX_NAMES


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
