"""Tool calls and reasoning over the wire, seen by the real client; tool_choice and the schema that forces a call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace.server.dialects.body import ChatRequest
from headrace.server.dialects.chat import ChatBody, parse_chat
from headrace.server.dialects.conversation import Mode, ToolChoice, offer
from headrace.server.dialects.responses import parse_responses
from headrace.server.tools import forced_schema
from server.fake_engine import SCRIPTED
from tests.support.serving import Server, events_of

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
TOOLS: Any = [WEATHER, TIME]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bézier 😀"}}\n</tool_call>\n'
    '<tool_call>{"name":"get_time"}</tool_call>'
)


@pytest.fixture(scope="module")
def client(scripted: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="unused", max_retries=0, timeout=20) as made:
        yield made


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "seed": SCRIPTED,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": f"⟦{text}⟧"}],
        **fields,
    }


def streamed(client: openai.OpenAI, text: str, **fields: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a client puts together, and how it ended; checks what every stream must keep."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reason, first = None, True
    for chunk in client.chat.completions.create(**asked(text, stream=True, **fields)):
        delta = chunk.choices[0].delta
        assert (delta.role == "assistant") is first
        first = False
        message["content"] += delta.content or ""
        extra = delta.model_extra or {}
        message["reasoning"] += extra.get("reasoning_content", "")
        assert extra.get("reasoning", "") == extra.get("reasoning_content", "")
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.id is not None:
                assert call.index == len(message["calls"]) and call.type == "function" and call.function.name
                message["calls"].append([call.function.name, ""])
            else:
                assert call.function.name is None and call.index == len(message["calls"]) - 1
            message["calls"][call.index][1] += call.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    return message, reason


def whole(client: openai.OpenAI, text: str, **fields: Any) -> tuple[dict[str, Any], str | None]:
    choice = client.chat.completions.create(**asked(text, **fields)).choices[0]
    calls = [
        [call.function.name, call.function.arguments]
        for call in choice.message.tool_calls or []
        if call.type == "function"
    ]
    extra = choice.message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return {
        "content": choice.message.content or "",
        "reasoning": extra.get("reasoning") or "",
        "calls": calls,
    }, choice.finish_reason


WEATHER_CALL = ["get_weather", '{"city": "Bézier 😀"}']


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        (
            CALLS,
            {},
            ({"content": "Let me see.", "reasoning": "", "calls": [WEATHER_CALL, ["get_time", "{}"]]}, "tool_calls"),
        ),
        (
            CALLS,
            {"parallel_tool_calls": False},
            ({"content": "Let me see.", "reasoning": "", "calls": [WEATHER_CALL]}, "tool_calls"),
        ),
        (CALLS, {"tool_choice": "none"}, ({"content": CALLS, "reasoning": "", "calls": []}, "stop")),
        (CALLS, {"tools": openai.NOT_GIVEN}, ({"content": CALLS, "reasoning": "", "calls": []}, "stop")),
        ("<think>\nhm\n</think>\n\nYes", {}, ({"content": "Yes", "reasoning": "hm", "calls": []}, "stop")),
        (
            "<tool_call>junk</tool_call>",
            {},
            ({"content": "<tool_call>junk</tool_call>", "reasoning": "", "calls": []}, "stop"),
        ),
        (CALLS[:67], {}, ({"content": "Let me see.", "reasoning": "", "calls": [["get_weather", '{"city']]}, "length")),
        (CALLS, {"max_tokens": 11}, ({"content": "Let me see.", "reasoning": "", "calls": []}, "length")),
        (CALLS, {"max_tokens": 6}, ({"content": "Let me see.", "reasoning": "", "calls": []}, "length")),
        (
            CALLS,
            {"max_tokens": 22},
            ({"content": "Let me see.", "reasoning": "", "calls": [["get_weather", '{"cit']]}, "length"),
        ),
    ],
)
def test_streamed_is_whole_is_what_was_written(
    client: openai.OpenAI, text: str, fields: dict[str, Any], expected: Any
) -> None:
    given = {"tools": TOOLS, **fields}
    assert whole(client, text, **given) == expected
    assert streamed(client, text, **given) == expected


def test_the_wire_in_full(scripted: Server) -> None:
    """content is null where there are only calls; a call's id and name come once; arguments come in pieces; the end
    says why."""
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Ulm"}}</tool_call>'
    message = scripted.ask("POST", "/v1/chat/completions", asked(text, tools=TOOLS)).json["choices"][0]["message"]
    call = message["tool_calls"][0]
    assert message == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'},
    }
    assert call["id"].startswith("call_")
    *events, done = events_of(scripted.ask("POST", "/v1/chat/completions", asked(text, tools=TOOLS, stream=True)).body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert done == "[DONE]" and deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert len(deltas) > 6, "arguments come as they are written"
    assert [name for delta in deltas for each in delta.get("tool_calls", ()) for name in each if name == "id"] == ["id"]
    assert all(set(delta) == {"tool_calls"} for delta in deltas[1:-1])
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_tokens_are_told_of_while_text_is_held_back(scripted: Server) -> None:
    answer = scripted.ask(
        "POST", "/v1/chat/completions", asked(CALLS, tools=TOOLS, stream=True, return_token_ids=True, logprobs=True)
    )
    choices = [event["choices"][0] for event in events_of(answer.body)[:-1]]
    assert all(choice["logprobs"] is None or choice["logprobs"]["content"] == [] for choice in choices)
    assert [token for choice in choices for token in choice.get("token_ids", ())] == list(range(-(-len(CALLS) // 3)))


def test_each_of_n_answers_is_taken_apart(client: openai.OpenAI) -> None:
    choices = client.chat.completions.create(**asked(CALLS, tools=TOOLS, n=3)).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 6 and {choice.finish_reason for choice in choices} == {"tool_calls"}


def test_the_other_routes_have_the_same_calls(scripted: Server) -> None:
    messages = [{"role": "user", "content": f"⟦{CALLS}⟧"}]
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
    body = {"model": "demo", "seed": SCRIPTED, "tools": [tool]}
    message = scripted.ask("POST", "/v1/messages", {**body, "max_tokens": 99, "messages": messages}).json
    assert [block["type"] for block in message["content"]] == ["text", "tool_use", "tool_use"] and message[
        "stop_reason"
    ] == "tool_use"
    tool = {"type": "function", **WEATHER["function"]}
    response = scripted.ask("POST", "/v1/responses", {**body, "input": messages, "tools": [tool]}).json
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]


# --- custom tools

SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
SHELL_CALL = '<tool_call>{"name": "shell", "arguments": {"input": "echo \\"é\\\\\\n\\ud83d\\ude00 \\ud83dx\\u0041\\""}}</tool_call>'
TYPED_IN = 'echo "é\\\n😀 \ufffdxA"'


def test_a_custom_tool_gets_a_text(scripted: Server) -> None:
    """Without JSON around it, streamed as whole, on both routes; beside functions, whose calls stay what they are."""
    tools = [SHELL, TIME]
    text = SHELL_CALL + '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    choice = scripted.ask("POST", "/v1/chat/completions", asked(text, tools=tools)).json["choices"][0]
    custom, function = choice["message"]["tool_calls"]
    assert custom == {"id": custom["id"], "type": "custom", "custom": {"name": "shell", "input": TYPED_IN}}
    assert function["function"] == {"name": "get_time", "arguments": "{}"} and choice["finish_reason"] == "tool_calls"
    answer = scripted.ask("POST", "/v1/chat/completions", asked(text, tools=tools, stream=True))
    deltas = [
        each for event in events_of(answer.body)[:-1] for each in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    first, *more = [each for each in deltas if each["index"] == 0]
    assert first == {"index": 0, "id": first["id"], "type": "custom", "custom": {"name": "shell", "input": ""}}
    assert "".join(each["custom"]["input"] for each in more) == TYPED_IN and len(more) > 5
    flat = [{"type": "custom", "name": "shell", "format": {"type": "text"}}, {"type": "function", **TIME["function"]}]  # type: ignore[dict-item]
    asking = {"model": "demo", "seed": SCRIPTED, "input": [{"role": "user", "content": f"⟦{text}⟧"}], "tools": flat}
    response = scripted.ask("POST", "/v1/responses", asking).json
    custom, function = response["output"]
    assert (custom["type"], custom["name"], custom["input"], custom["status"]) == (
        "custom_tool_call",
        "shell",
        TYPED_IN,
        "completed",
    )
    assert custom["id"].startswith("ctc_") and function["type"] == "function_call" and response["tools"] == flat
    answer = scripted.ask("POST", "/v1/responses", {**asking, "stream": True})
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    told = {
        kind: [event for event in events if event["type"] == f"response.custom_tool_call_input.{kind}"]
        for kind in ("delta", "done")
    }
    assert "".join(event["delta"] for event in told["delta"]) == TYPED_IN == told["done"][0]["input"]


def test_arguments_that_are_no_text_are_given_as_they_are(scripted: Server) -> None:
    for arguments in ('{"cmd": "ls"}', '{"input": 5}', "{}", '{"input": "ls", "cwd": "/"}'):
        call = f'<tool_call>{{"name": "shell", "arguments": {arguments}}}</tool_call>'
        message = scripted.ask("POST", "/v1/chat/completions", asked(call, tools=[SHELL])).json["choices"][0]["message"]
        assert message["tool_calls"][0]["custom"]["input"] == ("ls" if "cwd" in arguments else arguments)


def test_calls_of_custom_tools_come_back_with_the_conversation(scripted: Server) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
    messages = [
        {"role": "user", "content": "List"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a b"},
    ]
    ids = scripted.ask("POST", "/tokenize", {"messages": messages, "tools": [SHELL]}).json["tokens"]
    prompt = scripted.ask("POST", "/detokenize", {"tokens": ids}).json["prompt"]
    assert (
        '{"name": "shell", "arguments": {"input": "ls"}}' in prompt
        and "Runs a command." in prompt
        and "custom" not in prompt
    )
    items = [
        {"role": "user", "content": "List"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "a b"},
    ]
    read = parse_responses({"input": items, "tools": [{"type": "custom", "name": "shell"}]}, {}).conversation.messages
    assert (
        read[1]["tool_calls"][0]["function"] == {"name": "shell", "arguments": {"input": "ls"}}
        and read[2]["role"] == "tool"
    )


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": ""}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "f", "description": 5}}, "tools[0].custom.description"),
        ({"type": "custom", "custom": {"name": "f", "format": {"type": "xml"}}}, "tools[0].custom.format.type"),
        (
            {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}},
            "tools[0].custom.format.grammar.definition",
        ),
        ({"type": "custom", "custom": {"name": "get_time"}}, "tools"),
    ],
)
def test_custom_tools_that_cannot_be_offered(tool: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(tools=[tool, TIME])
    assert caught.value.param == param


# --- what the model reads


def test_calls_and_results_of_the_conversation_reach_the_template(scripted: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "5 "}, {"type": "text", "text": "degrees"}],
        },
    ]
    ids = scripted.ask("POST", "/tokenize", {"messages": messages, "tools": TOOLS}).json["tokens"]
    prompt = scripted.ask("POST", "/detokenize", {"tokens": ids}).json["prompt"]
    assert "<|im_start|>tool\n5 \ndegrees<|im_end|>" in prompt and '"name": "get_time"' in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>' in prompt


# --- tool_choice


def chat(**fields: Any) -> ChatRequest[ChatBody]:
    return parse_chat({"messages": [{"role": "user", "content": "hi"}], **fields}, {})


def test_choices() -> None:
    places = ("tools[0].function.parameters", "tools[1].function.parameters")
    assert chat(tools=TOOLS).conversation.choice == ToolChoice(places=places)
    assert chat(tools=TOOLS, parallel_tool_calls=False).conversation.choice == ToolChoice(parallel=False, places=places)
    assert chat(tools=TOOLS, tool_choice="required").conversation.choice == ToolChoice(Mode.REQUIRED, places=places)
    named = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_time"}}).conversation
    assert named.choice == ToolChoice(Mode.NAMED, "get_time", parallel=False, places=places) and named.tools == TOOLS
    assert chat(tools=TOOLS, tool_choice="none").conversation.tools is None


ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}


def test_tools_that_are_not_allowed_are_not_shown_and_cannot_be_called() -> None:
    """In chat completions' spelling, and in that of responses."""
    flat = {"mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    for nested in ({"allowed_tools": ALLOWED}, flat):
        conversation = chat(tools=TOOLS, tool_choice={"type": "allowed_tools", **nested}).conversation
        assert conversation.tools == [TIME]
        assert conversation.choice == ToolChoice(Mode.REQUIRED, only=True, places=("tools[1].function.parameters",))
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    responses = parse_responses(
        {"input": "hi", "tools": tools, "tool_choice": {"type": "allowed_tools", **flat, "mode": "auto"}}, {}
    )
    assert (
        responses.conversation.choice == ToolChoice(only=True, places=("tools[1].parameters",))
        and responses.shown["tools"] == tools
    )


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, None),
        ({"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": "none"}}, TOOLS),
        ({"type": "allowed_tools", "allowed_tools": {**ALLOWED, "tools": []}}, TOOLS),
        (
            {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "tools": [{"type": "function", "name": ["x"]}]}},
            TOOLS,
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "tools": [{"type": "function", "name": "other"}]}},
            TOOLS,
        ),
        ({"type": "allowed_tools", "allowed_tools": [5]}, TOOLS),
        ("required", None),
        ("some", TOOLS),
        ({"type": "function", "function": {"name": "other"}}, TOOLS),
        ({"type": "function", "function": {"name": "get_time"}}, None),
        ({"type": "function", "function": "get_time"}, TOOLS),
        ({"type": "function"}, TOOLS),
        ({"type": "allowed_tools"}, TOOLS),
        ({}, TOOLS),
    ],
)
def test_choices_that_cannot_be_kept(choice: Any, tools: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(tool_choice=choice, **({} if tools is None else {"tools": tools}))
    assert (caught.value.param or "").partition(".")[0] == "tool_choice"


def test_the_schema_that_forces_a_call() -> None:
    required = json.loads(forced_schema(TOOLS, offer(ToolChoice(Mode.REQUIRED, parallel=False), TOOLS)[1]))
    assert required["minItems"] == required["maxItems"] == 1 and len(required["items"]["anyOf"]) == 2
    assert required["items"]["anyOf"][0]["properties"]["name"] == {"const": "get_weather"}
    named = ToolChoice(Mode.NAMED, "get_weather")
    forced = json.loads(forced_schema(TOOLS, named))
    assert forced.pop("x-guidance") and forced == WEATHER["function"]["parameters"]  # type: ignore[index]


def test_definitions_move_to_the_root_of_the_schema() -> None:
    def tool(name: str, definition: Any) -> Any:
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"$ref": "#/$defs/x", "$defs": {"x": definition}}},
        }

    schema = json.loads(
        forced_schema([tool("f", {"type": "object"}), tool("g", {"type": "object"})], ToolChoice(Mode.REQUIRED))
    )
    assert (
        schema["$defs"] == {"x": {"type": "object"}}
        and "$defs" not in schema["items"]["anyOf"][0]["properties"]["arguments"]
    )
    with pytest.raises(InvalidRequest, match="defines 'x' otherwise") as caught:
        forced_schema([tool("f", {"type": "object"}), tool("g", True)], ToolChoice(Mode.REQUIRED))
    assert caught.value.param == "tools[1]"
    for parameters in (
        {"$defs": 5},
        {"definitions": ["x"]},
        {"$ref": "#"},
        {"properties": {"a": [{"$ref": "#/properties/b"}]}},
        {"$ref": "http://x"},
    ):
        with pytest.raises(InvalidRequest) as caught:
            forced_schema(
                [{"type": "function", "function": {"name": "f", "parameters": parameters}}], ToolChoice(Mode.REQUIRED)
            )
        assert caught.value.param == "tools[0]"


KEYS = st.sampled_from(
    ("type", "function", "name", "parameters", "$defs", "definitions", "$ref", "properties", "anyOf", "x")
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.sampled_from(("function", "f", "#", "#/$defs/x", "", "object")),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
MUTATED_TOOL = st.one_of(
    JSON, st.builds(lambda given: {"type": "function", "function": {"name": "f", "parameters": given}}, JSON)
)


@settings(max_examples=300, deadline=None)
@given(
    tools=st.lists(MUTATED_TOOL, min_size=1, max_size=3),
    choice=st.one_of(JSON, st.sampled_from(("auto", "none", "required"))),
)
def test_whatever_tools_and_choice_hold_is_served_or_refused_by_name(tools: Any, choice: Any) -> None:
    try:
        conversation = chat(tools=tools, tool_choice=choice).conversation
        if conversation.choice.forced and conversation.tools is not None:
            assert isinstance(json.loads(forced_schema(conversation.tools, conversation.choice)), dict)
    except InvalidRequest as error:
        assert (error.param or "").startswith(("tool_choice", "tools"))
