"""/v1/messages: what Anthropic's API asks for becomes a request, and answers and errors are as its clients expect
them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.server.dialects.messages import CountBody, MessageAnswer, MessagesBody, parse_count_tokens, parse_messages
from headrace.server.parsing.segments import Content, Reasoning, Segment, ToolCallArguments, ToolCallStart
from headrace.server.wire import PromptState
from tests.support.segments import SHAPE, Scripted, answered, named_events
from tests.support.serving import Server, post_bytes, read_until_closed, serving, split_response

DIES, STEP_FAILS, SEPARATORS, FAST = 1002, 1003, 1006, 1007
USER = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def parse(**fields: Any) -> Any:
    return parse_messages({"max_tokens": 5, "messages": [USER], **fields}, {})


def error_of(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value


def test_blocks_reach_the_template_as_messages() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    turns = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "assistant", "content": [thought, {"type": "text", "text": "c"}, USE]},
        {
            "role": "user",
            "content": [RESULT, {"type": "tool_result", "tool_use_id": "t2"}, {"type": "text", "text": "d"}],
        },
    ]
    read = parse(messages=turns, system=[{"type": "text", "text": "be"}])
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert read.conversation.messages == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "r"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "d"},
    ]
    _, counted = parse_count_tokens({"messages": turns, "system": "be", "tools": [TOOL]})
    assert counted.messages == read.conversation.messages and counted.tools is not None


def test_sampling_comes_by_anthropics_names() -> None:
    params = parse(stop_sequences=["x"], top_k=5, temperature=0.5).params
    assert (params.max_tokens, params.stop, params.top_k, params.temperature) == (5, ("x",), 5, 0.5)
    assert error_of(stop_sequences=[""]).param == "stop_sequences[0]" and error_of(max_tokens=0).param == "max_tokens"
    assert (
        error_of(max_tokens=None).code == "missing_required_parameter"
        and error_of(max_tokens=10**30).param == "max_tokens"
    )
    assert parse(thinking={"type": "disabled"}).conversation.variables == {"enable_thinking": False}
    assert parse(thinking={"type": "adaptive"}, chat_template_kwargs={"x": 1}).conversation.variables == {
        "enable_thinking": True,
        "x": 1,
    }


def test_tools_reach_the_template_in_its_form() -> None:
    expected = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    assert parse(tools=[TOOL]).conversation.tools == expected
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).conversation.tools is None
    assert parse(tools=[]).conversation.tools is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [USER] * 10_001}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "tool_use_id": 5}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**USE, "input": "{}"}]}, USER]},
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER]},
            "messages[0].content[0]",
        ),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": "no"}}, "tool_choice.disable_parallel_tool_use"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 0}}, "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"xyz": 1}, "xyz"),
    ],
)
def test_mistakes_are_named_by_place(fields: dict[str, Any], param: str) -> None:
    assert error_of(**fields).param == param


@pytest.mark.parametrize("kind", [MessagesBody, CountBody])
def test_known_but_unsupported_fields_are_refused_by_name_unless_they_ask_for_nothing(kind: Any) -> None:
    read = parse if kind is MessagesBody else lambda **given: parse_count_tokens({"messages": [USER], **given})
    for name, refused in kind.refused.items():
        with pytest.raises(InvalidRequest) as caught:
            read(**{name: "surely not neutral"})
        assert (caught.value.param, caught.value.code) == (name, refused.code)
        for neutral in (None, *refused.unless):
            read(**{name: neutral})


# --- answers


PIECES: tuple[list[Segment], ...] = (
    [Reasoning("h")],
    [Reasoning("m"), Content("")],
    [Content("So: "), ToolCallStart(0, "c0", "f")],
    [ToolCallArguments(0, '{"a":')],
    [ToolCallArguments(0, " 1}"), ToolCallStart(1, "c1", "g"), ToolCallArguments(1, "{}")],
)
CALLS = [
    {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1}},
    {"type": "tool_use", "id": "c1", "name": "g", "input": {}},
]


def answer(parser: Scripted | None, stops: tuple[str, ...] = ()) -> MessageAnswer:
    return MessageAnswer(SHAPE, PromptState([1, 2, 3]), parser, stops)


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client adds up from events."""
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"]})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
                block[name] = block.get(name, "") + next(value for key, value in delta.items() if key != "type")
            case "content_block_stop":
                block = message["content"][event["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block.pop("json", "{}"))
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


@pytest.mark.parametrize("streamed", [False, True])
def test_reasoning_text_and_calls_become_blocks(streamed: bool) -> None:
    shown = answered(answer(Scripted(*PIECES, end="tool_calls")), *"abcde", streamed=streamed, cached=2)
    if streamed:
        assert [shown[0]["type"], shown[1]["type"], shown[-1]["type"]] == ["message_start", "ping", "message_stop"]
        assert shown[0]["message"]["usage"] == {
            "input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 1,
        }  # fmt: skip
        shown = folded(shown)
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    assert shown["content"] == [thinking, {"type": "text", "text": "So: "}, *CALLS]
    assert (shown["stop_reason"], shown["stop_sequence"], shown["role"], shown["type"]) == (
        "tool_use",
        None,
        "assistant",
        "message",
    )
    assert shown["id"].startswith("msg_") and shown["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("reason", "found", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "zz", ("stop_sequence", "zz")),
        ("stop", "repetition", ("end_turn", None)),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_ends(streamed: bool, reason: str, found: Any, expected: tuple[str, str | None]) -> None:
    shown = answered(answer(None, ("zz",)), "", streamed=streamed, reason=reason, stop_reason=found)
    shown = folded(shown) if streamed else shown
    assert (shown["stop_reason"], shown["stop_sequence"]) == expected
    assert shown["content"] == [{"type": "text", "text": ""}]


def test_a_call_that_was_cut_has_no_input_and_says_max_tokens() -> None:
    pieces: list[Segment] = [ToolCallStart(0, "c", "f"), ToolCallArguments(0, '{"a"')]
    shown = answered(answer(Scripted(pieces, end="length")), "x", streamed=False, reason="length")
    assert (
        shown["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
        and shown["stop_reason"] == "max_tokens"
    )


# --- on the wire


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--api-key", "sk-right") as running:
        yield running


BODY: dict[str, Any] = {"model": "demo", "max_tokens": 3, "messages": [USER]}
KEY = {"x-api-key": "sk-right", "anthropic-version": "2023-06-01"}


def stream(server: Server, **fields: Any) -> tuple[list[dict[str, Any]], bool]:
    with server.raw(
        post_bytes("/v1/messages", {**BODY, "stream": True, **fields}, "Connection: close", "x-api-key: sk-right")
    ) as sock:
        _, body, complete = split_response(read_until_closed(sock))
    return named_events(body.decode("ascii")), complete


def test_streamed_and_whole_are_the_same_message(server: Server) -> None:
    whole = server.ask("POST", "/v1/messages", {**BODY, "seed": FAST}, KEY).json
    events, complete = stream(server, seed=FAST)
    streamed = folded(events)
    assert complete and streamed | {"id": ""} == whole | {"id": ""}
    assert (
        whole["content"][0]["text"] == "tok0 tok1 tok2 "
        and whole["stop_reason"] == "max_tokens"
        and whole["model"] == "demo"
    )
    assert whole["usage"]["cache_read_input_tokens"] == 1 and whole["usage"]["output_tokens"] == 3


def test_line_separators_leave_as_escapes(server: Server) -> None:
    assert (
        folded(stream(server, seed=SEPARATORS, max_tokens=1)[0])["content"][0]["text"]
        == "a\u2028b\u2029c\u0085d\U0001f600é"
    )


def test_a_failure_after_the_start_is_an_error_event_and_a_broken_body(server: Server) -> None:
    events, complete = stream(server, seed=STEP_FAILS, max_tokens=9)
    assert not complete and events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert events[-1]["error"]["message"] and not any(event["type"] == "message_stop" for event in events)


def test_errors_have_anthropics_shape_and_ours(server: Server) -> None:
    for headers, body, status, kind in (
        ({}, BODY, 401, "authentication_error"),
        (KEY, {**BODY, "max_tokens": -1}, 400, "invalid_request_error"),
        (KEY, {**BODY, "model": "claude"}, 404, "not_found_error"),
        (KEY, {**BODY, "system": "x" * (1 << 20)}, 413, "request_too_large"),
        (KEY, {**BODY, "seed": 1004}, 500, "api_error"),
    ):
        got = server.ask("POST", "/v1/messages", body, headers)
        assert got.status == status and got.json["type"] == "error" and got.error["type"] == kind
    assert server.ask("GET", "/v1/messages", None, KEY).json["type"] == "error"
    assert set(server.ask("GET", "/v1/completions", None, KEY).json) == {"error"}


def test_counting_equals_what_is_used(server: Server) -> None:
    asked = {
        "model": "demo",
        "messages": [USER, {"role": "assistant", "content": "x"}, USER],
        "system": "be brief",
        "tools": [TOOL],
    }
    counted = server.ask("POST", "/v1/messages/count_tokens", asked, KEY).json
    used = server.ask("POST", "/v1/messages", {**asked, "max_tokens": 1, "seed": FAST}, KEY).json["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
