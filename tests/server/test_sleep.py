"""Sleep over HTTP: who may, what waiting requests are told, what they do under each --when-asleep."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import Unavailable
from headrace.server.service import WakeOnUse
from tests.support.serving import SERVE, Answer, Server, post_bytes, serving, wait_for

KEYS = ("--api-key", "one", "two", "--operator-key", "key1")
OPERATOR, OTHER = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
BODY = {
    "model": "m",
    "prompt": [5, 6, 7],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = (
        "--executor",
        "keyed-hash",
        "--device-time",
        "0.002",
        "--served-model-name",
        "m",
        *KEYS,
        "--enable-sleep-mode",
    )
    with serving(*flags, command=SERVE) as running:
        yield running


def later(
    server: Server, body: dict[str, Any], headers: dict[str, str] = OTHER
) -> tuple[threading.Thread, list[Answer]]:
    found: list[Answer] = []
    thread = threading.Thread(
        target=lambda: found.append(server.ask("POST", "/v1/completions", body, headers)), daemon=True
    )
    thread.start()
    return thread, found


def order(server: Server, path: str, headers: dict[str, str] = OPERATOR) -> Answer:
    return server.ask("POST", path, headers=headers)


def asleep(server: Server) -> bool:
    return bool(server.ask("GET", "/is_sleeping", headers=OTHER).json["is_sleeping"])


def held(server: Server) -> int:
    page = server.ask("GET", "/metrics", headers=OTHER).body.decode()
    return int(re.search(r'^headrace_num_requests_waiting_by_reason{.*reason="asleep"} (\d+)', page, re.M)[1])  # type: ignore[index]


@pytest.mark.parametrize("level", [1, 2])
def test_who_comes_meanwhile_waits_is_told_and_answered(server: Server, level: int) -> None:
    before = server.ask("POST", "/v1/completions", BODY, OTHER).json["choices"][0]["token_ids"]
    assert order(server, f"/sleep?level={level}").json == {"status": "ok"} and asleep(server)
    thread, found = later(server, BODY)
    wait_for(lambda: held(server) == 1, 5, "the request waits")
    (job,) = server.ask("GET", "/v1/requests", headers=OTHER).json["data"]
    told = server.ask("GET", f"/v1/requests/{job['id']}", headers=OTHER).json
    assert told["waits_for"]["kind"] == "asleep" and "/wake_up" in told["waits_for"]["text"]
    assert told["predicted_start"]["latest_seconds"] is None
    page = server.ask("GET", "/metrics", headers=OTHER).body.decode()
    state = ("awake", "weights_offloaded", "discard_all")[level]
    assert re.search(rf'^vllm:engine_sleep_state{{.*sleep_state="{state}"}} 1$', page, re.M)
    assert server.ask("GET", "/health").status == 200 and server.ask("GET", "/ready").status == 200
    assert order(server, "/wake_up").status == 200 and not asleep(server)
    thread.join(10)
    assert found[0].json["choices"][0]["token_ids"] == before


def test_who_leaves_while_waiting_is_forgotten(server: Server) -> None:
    order(server, "/sleep")
    sock = server.raw(post_bytes("/v1/completions", BODY, "Authorization: Bearer two"))
    wait_for(lambda: held(server) == 1, 5, "it waits")
    sock.close()
    wait_for(lambda: held(server) == 0, 5, "it is forgotten")
    order(server, "/wake_up")


def test_those_who_run_are_waited_for_or_ended(server: Server) -> None:
    thread, found = later(server, {**BODY, "max_tokens": 200})
    wait_for(lambda: server.running(OTHER) == 1, 5, "it runs")
    assert order(server, "/sleep").status == 200
    thread.join(5)
    assert len(found[0].json["choices"][0]["token_ids"]) == 200
    order(server, "/wake_up")
    thread, found = later(server, {**BODY, "max_tokens": 3000})
    wait_for(lambda: server.running(OTHER) == 1, 5, "it runs")
    assert order(server, "/sleep?mode=abort").status == 200
    thread.join(5)
    assert found[0].status == 503 and "put to sleep" in found[0].error["message"]
    order(server, "/wake_up")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/sleep", OTHER, 403),
        ("/wake_up", OTHER, 403),
        ("/sleep", {}, 401),
        ("/sleep?level=3", OPERATOR, 400),
        ("/sleep?level=1&level=2", OPERATOR, 400),
        ("/sleep?level=%00", OPERATOR, 400),
        ("/sleep?mode=kill", OPERATOR, 400),
        ("/sleep?tags=kv", OPERATOR, 400),
    ],
)
def test_what_is_refused_changes_nothing(server: Server, path: str, headers: dict[str, str], status: int) -> None:
    answer = order(server, path, headers)
    assert answer.status == status and answer.error["message"]
    assert not asleep(server)


class Sleeper:
    """As much of an engine as is asked."""

    asleep, woken = True, 0

    async def wake_up(self) -> None:
        self.woken += 1
        await asyncio.sleep(0)
        if self.woken == 1:
            raise Unavailable("no memory")
        self.asleep = False


def test_a_request_wakes_it_or_is_refused() -> None:
    async def use() -> None:
        engine: Any = Sleeper()
        WakeOnUse(engine, "wait")()
        with pytest.raises(Unavailable, match="/wake_up"):
            WakeOnUse(engine, "refuse")()
        rouse = WakeOnUse(engine, "wake")
        for expected in (1, 2, 2):
            rouse()
            rouse()
            for _ in range(4):
                await asyncio.sleep(0)
            assert engine.woken == expected
        assert not engine.asleep

    asyncio.run(use())
