"""Why is my request waiting: GET /v1/requests/{id}, and where the time went: explain. (An engine without a model: keyed
hash.)"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import (
    SERVE,
    Server,
    events_of,
    post_bytes,
    read_until_closed,
    serving,
    split_response,
    wait_for,
)

KEYS = ("--api-key", "one", "two", "boss", "--operator-key", "key3")
HASH = ("--executor", "keyed-hash", "--device-time", "0.01", "--max-num-seqs", "2", *KEYS)
LONG = {"prompt": "hello there", "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "hello there", "max_tokens": 5, "ignore_eos": True}
ONE, TWO = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*HASH, command=SERVE) as running:
        yield running


@contextlib.contextmanager
def streams(server: Server, count: int, *headers: str) -> Iterator[None]:
    """So many long streams, all submitted; cut at the end."""
    sockets = [
        server.raw(post_bytes("/v1/completions", LONG, "Authorization: Bearer one", *headers)) for _ in range(count)
    ]
    try:
        wait_for(lambda: len(listed(server)) >= count, 5)
        yield
    finally:
        for sock in sockets:
            sock.close()
        wait_for(lambda: not listed(server), 5)


def listed(server: Server, key: dict[str, str] = ONE) -> list[dict[str, Any]]:
    answer = server.ask("GET", "/v1/requests", headers=key)
    assert answer.status == 200
    return list(answer.json["data"])


def shown(server: Server, name: str, key: dict[str, str] = ONE) -> dict[str, Any]:
    answer = server.ask("GET", f"/v1/requests/{name}", headers=key)
    assert answer.status == 200, answer
    return dict(answer.json)


def test_running_and_waiting_requests_say_where_they_stand_and_why(server: Server) -> None:
    with streams(server, 4):
        wait_for(lambda: sum(each["state"] == "running" for each in listed(server)) == 2, 5)
        found = [shown(server, each["id"]) for each in listed(server)]
        running, waiting = ([each for each in found if each["state"] == state] for state in ("running", "waiting"))
        assert len(running) == len(waiting) == 2
        assert all(each["completion_tokens"] > 0 and "waits_for" not in each for each in running)
        assert [each["queue"]["position"] for each in waiting] == [1, 2] and {
            each["queue"]["length"] for each in waiting
        } == {2}
        first, second = (each["waits_for"] for each in waiting)
        assert (first["kind"], first["needed"], first["available"]) == ("rows", 1, 0)
        assert "--max-num-seqs" in first["text"] and second["text"].startswith("1 requests are before it")
        start = waiting[0]["predicted_start"]
        assert 0 < start["earliest_seconds"] < start["latest_seconds"] < 60 and "Between" in start["text"]


def test_requests_of_another_key_are_unknown(server: Server) -> None:
    with streams(server, 1):
        (mine,) = listed(server)
        assert listed(server, TWO) == []
        for name in (mine["id"], "nonsense", "x" * 5000, "%2e%2e", mine["id"][:-1]):
            answer = server.ask("GET", f"/v1/requests/{name}", headers=TWO)
            assert (
                answer.status == 404 and answer.error["param"] == "id" and answer.error["code"] == "request_not_found"
            )
        assert server.ask("GET", f"/v1/requests/{mine['id']}").status == 401


def test_the_dashboard_tells_a_key_of_its_own_requests(server: Server) -> None:
    """One by one; an operator's key is told of all, and sums are everybody's."""
    boss = {"Authorization": "Bearer boss"}
    assert server.ask("POST", "/v1/completions", {**SHORT, "user": "key2"}, ONE).status == 200

    def told(key: dict[str, str]) -> dict[str, Any]:
        return dict(server.ask("GET", "/v1/dashboard", headers=key).json)

    wait_for(lambda: told(ONE)["decisions"], 5)
    assert told(ONE)["decisions"] == told(boss)["decisions"] and told(TWO)["decisions"] == []
    assert [told(key)["scope"] for key in (ONE, TWO, boss)] == ["own", "own", "all"]
    assert told(TWO)["samples"]["rows"] and told(TWO)["finished"]["length"] >= 1
    assert server.ask("POST", "/v1/completions", SHORT, TWO).status == 200
    wait_for(lambda: told(TWO)["decisions"], 5)
    both = [each["number"] for key in (ONE, TWO) for each in told(key)["decisions"]]
    assert sorted(both) == [each["number"] for each in told(boss)["decisions"]] and len(set(both)) == len(both)


def test_a_clients_own_id_is_never_a_key(server: Server) -> None:
    with streams(server, 2, "X-Request-Id: mine"):
        assert server.ask("GET", "/v1/requests/mine", headers=ONE).status == 404
        assert [each["client_request_id"] for each in listed(server)] == ["mine", "mine"]


def test_the_servers_request_id_is_one(server: Server) -> None:
    answer = server.ask("POST", "/v1/completions", SHORT, ONE)
    ended = shown(server, answer.headers["x-request-id"])
    assert ended["id"] == answer.json["id"] and ended["state"] == "finished" and ended["finish_reasons"] == ["length"]
    assert ended["completion_tokens"] == 5 and ended["explain"]["decode_seconds"] > 0


def test_an_answer_explains_itself_whole_and_streamed(server: Server) -> None:
    block = server.ask("POST", "/v1/completions", {**SHORT, "explain": True}, ONE).json["explain"]
    assert (
        block["steps"] == 5
        and block["preemptions"] == 0
        and block["limit_share"] is None
        and block["completion_tokens"] == 5
    )
    assert block["queue_seconds"] >= 0 and block["prefill_seconds"] > 0.005 and block["decode_seconds"] > 0.03
    for options in ({}, {"stream_options": {"include_usage": True}}):
        body = {**SHORT, **options, "stream": True, "explain": True}
        with server.raw(post_bytes("/v1/completions", body, "Authorization: Bearer one", "Connection: close")) as sock:
            *chunks, last, done = events_of(split_response(read_until_closed(sock))[1])
        assert (
            done == "[DONE]"
            and last["choices"] == []
            and last["explain"]["steps"] == 5
            and ("usage" in last) == bool(options)
        )
        assert all("explain" not in chunk for chunk in chunks)


def test_an_answer_that_ends_at_a_stop_string_knows_its_steps_too(server: Server) -> None:
    body = {**SHORT, "max_tokens": 40, "seed": 3, "explain": True}
    text = server.ask("POST", "/v1/completions", body, ONE).json["choices"][0]["text"]
    ended = server.ask("POST", "/v1/completions", {**body, "stop": text[len(text) // 2 :][:3]}, ONE).json
    assert ended["choices"][0]["finish_reason"] == "stop" and 1 <= ended["explain"]["steps"] <= 42


def test_without_the_field_nothing_is_explained(server: Server) -> None:
    answer = server.ask("POST", "/v1/completions", SHORT, ONE).json
    assert "explain" not in answer
    refused = server.ask("POST", "/v1/completions", {**SHORT, "explain": "yes"}, ONE)
    assert refused.status == 400 and refused.error["param"] == "explain"


def test_several_prompts_are_one_request(server: Server) -> None:
    body = {**SHORT, "prompt": ["a", "b c", "d"], "n": 2, "max_tokens": 3, "explain": True}
    answer = server.ask("POST", "/v1/completions", body, ONE).json
    assert answer["explain"]["steps"] >= 9 and answer["explain"]["completion_tokens"] == 18
    assert len(shown(server, answer["id"])["finish_reasons"]) == 6
