"""/v1/responses: what the Responses API asks for becomes a request, and its objects and numbered events are as its
clients expect them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.server.dialects.responses import ResponseAnswer, ResponsesBody, parse_responses
from headrace.server.parsing.segments import Content, Reasoning, Segment, ToolCallArguments, ToolCallStart
from headrace.server.wire import PromptState
from tests.support.segments import SHAPE, Scripted, answered, named_events
from tests.support.serving import Server, post_bytes, read_until_closed, serving, split_response

DIES, STEP_FAILS, DEFECT, SEPARATORS, FAST = 1002, 1003, 1004, 1006, 1007
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def parse(**fields: Any) -> Any:
    return parse_responses({"input": "hi", **fields}, {})


def error_of(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value


def test_items_reach_the_template_as_messages() -> None:
    said = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "c"}],
    }
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        THOUGHT, said, CALL, {**CALL, "call_id": "c2"}, OUTPUT, {**OUTPUT, "output": [{"type": "input_text", "text": "s"}]}, THOUGHT, CALL,
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert parse(input=items, instructions="first").conversation.messages == [
        {"role": "system", "content": "first"},
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call, {**call, "id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "s"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
    ]
    assert parse().conversation.messages == [USER]


def test_options_come_by_this_apis_names() -> None:
    params = parse(max_output_tokens=7, temperature=0.5, top_p=0.5, stop="x").params
    assert (params.max_tokens, params.temperature, params.top_p, params.stop) == (7, 0.5, 0.5, ("x",))
    assert (
        error_of(max_output_tokens=0).param == "max_output_tokens"
        and error_of(max_output_tokens=10**30).param == "max_output_tokens"
    )
    assert parse(max_output_tokens=7).body.limit_name == "max_output_tokens" and parse().body.limit_name is None
    assert parse(reasoning={"effort": "low", "summary": "auto"}).conversation.variables == {"reasoning_effort": "low"}
    assert parse(reasoning={"effort": "none"}).conversation.variables == {"enable_thinking": False}
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert parse(tools=[TOOL]).conversation.tools == [{"type": "function", "function": function}]
    assert parse(tools=[TOOL], tool_choice="none").conversation.tools is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [USER] * 10_001}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [USER, {"role": "tool", "content": "x"}]}, "input[1].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
        ({"input": [{**OUTPUT, "output": 5}]}, "input[0].output"),
        ({"input": [{**THOUGHT, "content": [{"type": "text", "text": "x"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": 5}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"x": 1}}, "text.x"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"xyz": 1}, "xyz"),
    ],
)
def test_mistakes_are_named_by_place(fields: dict[str, Any], param: str) -> None:
    assert error_of(**fields).param == param


def test_known_but_unsupported_fields_are_refused_by_name_unless_they_ask_for_nothing() -> None:
    for name, refused in ResponsesBody.refused.items():
        error = error_of(**{name: "surely not neutral"})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        for neutral in (None, *refused.unless):
            parse(**{name: neutral})


# --- answers

PIECES: tuple[list[Segment], ...] = (
    [Reasoning("h")],
    [Reasoning("m"), Content("")],
    [Content("So: "), ToolCallStart(0, "c0", "f")],
    [ToolCallArguments(0, '{"a":')],
    [ToolCallArguments(0, " 1}")],
)


def answer(parser: Scripted | None) -> ResponseAnswer:
    return ResponseAnswer(SHAPE, PromptState([1, 2, 3]), parser, {"metadata": {"k": "v"}})


def numbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    return events


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers to the same request."""
    items = [{**item, "id": item["id"].partition("_")[0]} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": items}


def test_reasoning_text_and_calls_become_items() -> None:
    whole = answered(answer(Scripted(*PIECES, end="tool_calls")), *"abcde", streamed=False)
    thought = {"type": "reasoning_text", "text": "hm"}
    said = {"type": "output_text", "text": "So: ", "annotations": [], "logprobs": []}
    assert plain(whole)["output"] == [
        {"id": "rs", "status": "completed", "type": "reasoning", "summary": [], "content": [thought]},
        {"id": "msg", "status": "completed", "type": "message", "role": "assistant", "content": [said]},
        {
            "id": "fc",
            "status": "completed",
            "type": "function_call",
            "call_id": "c0",
            "name": "f",
            "arguments": '{"a": 1}',
        },
    ]
    assert whole["status"] == "completed" and whole["metadata"] == {"k": "v"}
    assert whole["usage"]["output_tokens"] == 5 and whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_events_tell_the_same_as_the_whole() -> None:
    whole = answered(answer(Scripted(*PIECES, end="tool_calls")), *"abcde", streamed=False)
    events = numbered(answered(answer(Scripted(*PIECES, end="tool_calls")), *"abcde", streamed=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    last = events[-1]["response"]
    assert plain(last) == plain(whole)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == last["output"]
    (done,) = (event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"]) == ("f", '{"a": 1}')
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (
        [item["status"] for item in added] == ["in_progress"] * 3
        and added[2]["arguments"] == ""
        and added[0]["content"] == []
    )
    assert (
        events[0]["response"]["status"] == "in_progress"
        and events[0]["response"]["output"] == []
        and events[0]["response"]["usage"] is None
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "cause"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
def test_ends(streamed: bool, reason: str, status: str, cause: str | None) -> None:
    shown = answered(answer(None), "", streamed=streamed, reason=reason)
    response = numbered(shown)[-1]["response"] if streamed else shown
    assert response["status"] == status and (response["incomplete_details"] or {}).get("reason") == cause
    assert not streamed or shown[-1]["type"] == f"response.{status}"
    (item,) = response["output"]
    assert item["status"] == status and item["content"][0]["text"] == ""


# --- on the wire


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def stream(server: Server, **fields: Any) -> tuple[list[dict[str, Any]], bool]:
    body = {"input": "hi", "max_output_tokens": 3, "stream": True, **fields}
    with server.raw(post_bytes("/v1/responses", body, "Connection: close")) as sock:
        _, received, complete = split_response(read_until_closed(sock))
    return numbered(named_events(received.decode("ascii"))), complete


def test_streamed_and_whole_are_the_same_response(server: Server) -> None:
    whole = server.ask(
        "POST",
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 3, "seed": FAST, "tools": [TOOL], "instructions": "be"},
    ).json
    events, complete = stream(server, seed=FAST, tools=[TOOL], instructions="be")
    assert complete and plain(events[-1]["response"]) == plain(whole)
    assert (
        whole["output"][0]["content"][0]["text"] == "tok0 tok1 tok2 "
        and whole["tools"] == [TOOL]
        and whole["instructions"] == "be"
    )
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"} and whole["usage"][
        "input_tokens_details"
    ] == {
        "cached_tokens": 1,
        "cache_write_tokens": 0,
    }


def test_line_separators_leave_as_escapes(server: Server) -> None:
    events, _ = stream(server, seed=SEPARATORS, max_output_tokens=1)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a\u2028b\u2029c\u0085d\U0001f600é"


def test_a_failure_after_the_start_fails_the_response_and_breaks_the_body(server: Server) -> None:
    events, complete = stream(server, seed=STEP_FAILS, max_output_tokens=9)
    failed, error = events[-2:]
    assert not complete and (failed["type"], error["type"]) == ("response.failed", "error")
    assert failed["response"]["status"] == "failed" and failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["status"] == "incomplete" and failed["response"]["output"][0]["content"][0][
        "text"
    ].startswith("tok0 ")
    assert set(error["error"]) == {"message", "type", "param", "code"} and error["message"] == error["error"]["message"]


def test_a_failure_before_the_start_is_a_plain_error(server: Server) -> None:
    got = server.ask("POST", "/v1/responses", {"input": "hi", "stream": True, "seed": DEFECT})
    assert got.status == 500 and got.error["type"] == "internal_error"
    too_long = server.ask("POST", "/v1/responses", {"input": "hello " * 2000})
    assert too_long.status == 400 and (too_long.error["param"], too_long.error["code"]) == (
        "input",
        "context_length_exceeded",
    )


def test_embeddings_say_why_there_are_none(server: Server) -> None:
    got = server.ask("POST", "/v1/embeddings", {"model": "demo", "input": "hi"})
    assert got.status == 404 and "embedding" in got.error["message"]
