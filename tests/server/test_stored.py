"""Stored responses: a conversation goes on where one ended, what is kept has bounds, and nobody sees another's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headrace.server.stored import MAX_SECONDS, Stored, StoredResponses
from tests.server.fake_engine import SCRIPTED, STEP_FAILS
from tests.support.serving import Server, post_bytes, read_until_closed, serving, split_response

PATH = "/v1/responses"
KEYS: Any = [{"x-api-key": "sk-one"}, {"x-api-key": "sk-two"}]
TOOL = {
    "type": "function",
    "name": "grind",
    "parameters": {"type": "object", "properties": {"size": {"type": "integer"}}},
}


# --- the register


def entry(size: int) -> Stored:
    return Stored(b"x" * (size - Stored(b"", b"").size), b"")


def test_the_oldest_of_whoever_holds_most_give_way() -> None:
    kept = StoredResponses(max_responses=100, max_bytes=10_000)
    kept.put("quiet", "q", entry(1000))
    for number in range(50):
        kept.put("busy", f"b{number}", entry(2000))
    assert kept.find("quiet", "q") is not None
    assert [number for number in range(50) if kept.find("busy", f"b{number}")] == [46, 47, 48, 49]
    kept.put("busy", "huge", entry(10_001))
    assert kept.find("busy", "huge") is None and len(kept) == 5
    few = StoredResponses(max_responses=3)
    for number in range(9):
        few.put("", str(number), entry(600))
    assert [number for number in range(9) if few.find("", str(number))] == [6, 7, 8]


def test_a_response_is_its_tenants_alone_and_ends_with_its_time() -> None:
    now = [0.0]
    kept = StoredResponses(lambda: now[0])
    kept.put("a", "r", entry(600))
    assert kept.find("b", "r") is None and not kept.delete("b", "r") and kept.find("a", "r") is not None
    now[0] = MAX_SECONDS + 1
    assert kept.find("a", "r") is None and len(kept) == 0
    kept.put("a", "r", entry(600))
    assert kept.delete("a", "r") and not kept.delete("a", "r") and kept.find("a", "r") is None


# --- the routes


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input="What does a mill do?", instructions="Be brief.", **asked)
    second = client.responses.create(input="Why?", previous_response_id=first.id, **asked)
    said: Any = [item.model_dump() for item in first.output]
    conversation = [{"role": "user", "content": "What does a mill do?"}, *said, {"role": "user", "content": "Why?"}]
    whole = client.responses.create(input=conversation, store=False, **asked)
    assert second.output_text == whole.output_text and second.usage and whole.usage
    assert second.usage.input_tokens == whole.usage.input_tokens and second.previous_response_id == first.id
    third: Any = list(client.responses.create(input="And?", previous_response_id=second.id, stream=True, **asked))[
        -1
    ].response
    shown = client.responses.retrieve(third.id)
    assert shown.output_text == third.output_text and shown.usage == third.usage
    client.responses.delete(third.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(third.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)  # it was not to be stored


def test_a_call_and_its_result_go_on(scripted: Server) -> None:
    said = '⟦<tool_call>\n{"name": "grind", "arguments": {"size": 3}}\n</tool_call>⟧'
    first = scripted.ask("POST", PATH, {"input": said, "tools": [TOOL], "seed": SCRIPTED, "max_output_tokens": 90}).json
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "⟦done⟧"}
    asked = {
        "input": [result],
        "previous_response_id": first["id"],
        "tools": [TOOL],
        "seed": SCRIPTED,
        "max_output_tokens": 90,
    }
    second = scripted.ask("POST", PATH, asked).json
    assert second["output"][0]["content"][0]["text"] == "done"


def test_what_is_not_shown_is_refused_by_name(scripted: Server) -> None:
    made = scripted.ask("POST", PATH, {"input": "hi", "max_output_tokens": 2}).json["id"]
    for query, param in {
        "stream=true": "stream",
        "include[]=reasoning": "include[]",
        "starting_after=3": "starting_after",
        "stream=false&stream=false": "stream",
        "&".join(["stream=false"] * 99): "query",
    }.items():
        answer = scripted.ask("GET", f"{PATH}/{made}?{query}")
        assert (answer.status, answer.error["param"]) == (400, param), query
    assert scripted.ask("GET", f"{PATH}/{made}?stream=false").json["id"] == made


def test_what_was_cut_in_a_call_is_no_conversation_to_go_on_with(scripted: Server) -> None:
    said = '⟦<tool_call>\n{"name": "grind", "arguments": {"size": 3333333333}}\n</tool_call>⟧'
    first = scripted.ask("POST", PATH, {"input": said, "tools": [TOOL], "seed": SCRIPTED, "max_output_tokens": 18}).json
    assert first["status"] == "incomplete" and first["output"][-1]["type"] == "function_call", first
    answer = scripted.ask("POST", PATH, {"input": "Go on.", "previous_response_id": first["id"]})
    assert answer.status == 400 and answer.error["param"].startswith("previous_response_id[1]")


@pytest.fixture(scope="module")
def several() -> Iterator[Server]:
    with serving("--token-seconds", "0", "--api-key", "sk-one", "--api-key", "sk-two") as running:
        yield running


def test_another_keys_response_does_not_exist(several: Server) -> None:
    made = several.ask("POST", PATH, {"input": "hi", "max_output_tokens": 2}, KEYS[0]).json["id"]
    for method in ("GET", "DELETE"):
        answer = several.ask(method, f"{PATH}/{made}", headers=KEYS[1])
        unknown = several.ask(method, f"{PATH}/resp_unknown", headers=KEYS[1])
        assert answer.status == unknown.status == 404
        assert json.dumps(answer.error).replace(made, "") == json.dumps(unknown.error).replace("resp_unknown", "")
    other = several.ask("POST", PATH, {"input": "x", "previous_response_id": made}, KEYS[1])
    assert (other.status, other.error["code"]) == (400, "previous_response_not_found")
    assert several.ask("GET", f"{PATH}/{made}", headers=KEYS[0]).json["id"] == made
    assert several.ask("GET", f"{PATH}/{made}").status == 401


@pytest.mark.parametrize(
    "path", [f"{PATH}/", f"{PATH}//input_items", f"{PATH}/a/cancel", f"{PATH}/%00", f"{PATH}/{'x' * 5000}"]
)
def test_no_path_is_a_defect(scripted: Server, path: str) -> None:
    for method in ("GET", "DELETE"):
        answer = scripted.ask(method, path)
        assert answer.status in (404, 405)
        assert (answer.error["code"] == "response_not_found") <= ("/" not in path.removeprefix(f"{PATH}/"))
    assert scripted.ask("GET", f"{path}?order=up&limit=99999&after=%ff").status == 404


def test_a_response_that_failed_is_not_kept(scripted: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 9, "seed": STEP_FAILS, "stream": True}
    with scripted.raw(post_bytes(PATH, body)) as sock:
        _, events, whole = split_response(read_until_closed(sock))
    (name,) = set(re.findall(r'"id":"(resp_\w+)"', events.decode()))
    assert b"response.failed" in events and not whole and scripted.ask("GET", f"{PATH}/{name}").status == 404
