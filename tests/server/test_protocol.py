"""Bodies to requests: which fields a route takes, and that an error names the field that caused it. No server runs
here."""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.server import wire
from headrace.server.dialects.chat import ChatBody, parse_chat
from headrace.server.dialects.completions import CompletionBody, parse_completion
from headrace.server.dialects.tokens import parse_detokenize, parse_tokenize
from headrace.server.wire import decode_object

USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": USER, **fields}, {})


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "x", **fields}, {})


BOTH = (chat, completion)


def error_of(parse: Callable[..., Any], **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    return caught.value


NUMBERS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "seed",
    "min_tokens",
    "max_tokens",
    "priority",
    "expected_ttft",
    "expected_tpot",
    "reading_speed",
    "truncate_prompt_tokens",
    "prompt_logprobs",
]


@pytest.mark.parametrize("parse", BOTH)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, [], {}, 10**300, -(10**300)])
def test_wrong_values_are_named(parse: Callable[..., Any], name: str, value: Any) -> None:
    assert error_of(parse, **{name: value}).param == name


def test_effort_is_the_templates_to_say() -> None:
    assert chat(reasoning_effort="low").conversation.variables == {"reasoning_effort": "low"}
    assert chat(reasoning_effort="none", chat_template_kwargs={"a": 1}).conversation.variables == {
        "enable_thinking": False,
        "a": 1,
    }
    assert chat(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}).conversation.variables == {
        "reasoning_effort": "high"
    }
    for value in ("much", "", 5, ["low"]):
        assert error_of(chat, reasoning_effort=value).param == "reasoning_effort"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'."),
        ({"temperature": 200}, "temperature is 200.0; give a number from 0.0 to 100.0."),
        ({"temperature": 10**400}, "temperature is out of range; give a smaller number."),
        ({"priority": 2**40}, f"priority is {2**40}; give an integer of at most 2147483647."),
        ({"cache_salt": "x" * 1025}, "cache_salt has 1025 characters; give at most 1024."),
        ({"stop": ["x"] * 65}, "stop has 65 entries; give at most 64."),
        ({"logit_bias": {"a": 1}}, "a key of logit_bias must be an integer, not a string."),
        ({"logit_bias": {"5": 101}}, "a value of logit_bias must be a number of at most 100.0."),
        ({"structured_outputs": {"regexp": "a"}},
         "structured_outputs.regexp is not supported; leave it out or use json, json_object, regex, choice, grammar."),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml'; give text or json_object or json_schema."),
        ({"response_format": {}}, "response_format.type is missing; it is required."),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation is True; give false."),
        ({"temprature": 1}, "'temprature' is not a field of this route; leave it out or check its spelling."),
        ({"best_of": 2}, "best_of is not supported: ask for n answers and choose among them."),
    ],
)  # fmt: skip
def test_errors_tell_place_figures_and_remedy(fields: dict[str, Any], message: str) -> None:
    assert {error_of(parse, **fields).message for parse in BOTH} == {message}


def test_null_members_of_objects_ask_for_nothing() -> None:
    given = {"stream_options": {"include_usage": True, "x": None}, "structured_outputs": {"regex": "a", "json": None}}
    assert chat(stream=True, **given).params.structured_outputs.regex == "a"


LISTS = (
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [-1]),
    ("bad_words", "x"),
    ("bad_words", [1]),
)
LONG = (("bad_words", ["x" * 1000] * 9),)
FLAGS = (
    ("ignore_eos", 1),
    ("include_stop_str_in_output", "yes"),
    ("skip_special_tokens", 0),
    ("stream", "true"),
    ("return_token_ids", 1),
)
OTHERS = (
    ("logit_bias", {"x": 1}), ("logit_bias", {"5": "1"}), ("logit_bias", {"-5": 1}), ("logit_bias", {"9" * 5000: 1}), ("logit_bias", {"5": 10**400}),
    ("allowed_token_ids", []), ("cache_salt", 5), ("cache_salt", "x" * 1025), ("user", 5), ("metadata", "x"), ("model", 5), ("min_tokens", 10**9),
)  # fmt: skip


@pytest.mark.parametrize("parse", BOTH)
@pytest.mark.parametrize(("name", "value"), LISTS + LONG + FLAGS + OTHERS)
def test_wrong_lists_flags_and_maps_are_named(parse: Callable[..., Any], name: str, value: Any) -> None:
    assert re.split(r"\[", error_of(parse, max_tokens=5, **{name: value}).param or "")[0] == name


@pytest.mark.parametrize(("parse", "kind"), [(chat, ChatBody), (completion, CompletionBody)])
def test_known_but_unsupported_fields_are_refused_by_name_unless_they_ask_for_nothing(
    parse: Callable[..., Any], kind: Any
) -> None:
    for name, refused in kind.refused.items():
        error = error_of(parse, **{name: "surely not neutral"})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        for neutral in (None, *refused.unless):
            parse(**{name: neutral})


@pytest.mark.parametrize("parse", BOTH)
def test_unknown_fields_are_refused_even_as_null(parse: Callable[..., Any]) -> None:
    assert error_of(parse, temprature=None).param == "temprature"


def test_stream_options_need_a_stream_and_known_names() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).options.include_usage
    assert not chat(
        stream=True, stream_options={"include_usage": False, "include_obfuscation": False}
    ).options.include_usage
    for fields in (
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"usage": True}},
        {"stream": True, "stream_options": {"include_usage": 1}},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
    ):
        assert (error_of(chat, **fields).param or "").partition(".")[0] == "stream_options"


def test_logprobs_of_the_two_apis() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat().params.logprobs is None and chat(logprobs=False).params.logprobs is None
    assert error_of(chat, top_logprobs=4).param == "top_logprobs"
    too_many = error_of(chat, logprobs=True, top_logprobs=21)
    assert too_many.param == "top_logprobs" and "top_logprobs is 21" in too_many.message
    assert completion(logprobs=3, echo=True).params.prompt_logprobs == 3
    assert error_of(completion, logprobs=True).param == "logprobs"
    assert error_of(completion, stream=True, prompt_logprobs=1).param == "prompt_logprobs"


def test_max_tokens_by_both_names() -> None:
    assert chat(max_tokens=5).params.max_tokens == chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat().params.max_tokens is None and completion().params.max_tokens == 16
    assert error_of(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    assert error_of(chat, max_completion_tokens=0).param == "max_completion_tokens"


def test_model_defaults_apply_unless_given() -> None:
    defaults = {
        "temperature": 0.5,
        "top_k": 7,
        "repetition_penalty": 1.1,
        "max_new_tokens": 9,
        "transformers_version": "4",
        "top_p": None,
    }
    params = parse_chat({"messages": USER, "temperature": 0.0}, defaults).params
    assert (params.temperature, params.top_k, params.repetition_penalty, params.max_tokens, params.top_p) == (
        0.0,
        7,
        1.1,
        9,
        1.0,
    )
    assert parse_completion({"prompt": "x"}, defaults).params.max_tokens == 9


@pytest.mark.parametrize(
    "prompt", [None, [], 5, {}, [None], ["a", 1], [1, "a"], [[1], "a"], [True], [1.5], [[1.5]], ["a"] * 1025]
)
def test_prompts_of_no_form_are_refused(prompt: Any) -> None:
    assert error_of(completion, prompt=prompt).param == "prompt"


def test_prompts_of_every_form_are_taken() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [array("i", [1, 2])]
    assert completion(prompt=[[1], [2, 3]]).prompts == [array("i", [1]), array("i", [2, 3])]
    assert error_of(completion, prompt=["a"] * 1000, n=100).param == "n"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (USER * 10_001, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([*USER, {"role": "robot", "content": "hi"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_are_refused_by_place(messages: Any, param: str) -> None:
    assert error_of(chat, messages=messages).param == param


def test_messages_reach_the_template_in_its_shape() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        *USER,
    ]
    read = chat(messages=messages).conversation.messages
    assert read[0] == {"role": "system", "content": parts}  # whoever renders knows whether they are joined
    assert chat(messages=[{"role": "user", "content": parts[:1]}]).conversation.messages == [
        {"role": "user", "content": "a"}
    ]
    assert read[1]["content"] is None and read[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_tools_go_to_the_template_unless_none_shall_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert (
        chat(tools=tools).conversation.tools == tools
        and chat(tools=tools, tool_choice="auto").conversation.tools == tools
    )
    assert (
        chat(tools=tools, tool_choice="none").conversation.tools is None and chat(tools=[]).conversation.tools is None
    )
    assert error_of(chat, tools=[{"type": "web"}]).param == "tools[0]"
    assert error_of(chat, tools=[{"type": "function"}]).param == "tools[0].function"
    assert error_of(chat, tools=tools * 129).param == "tools"


def test_template_variables_may_not_replace_ours() -> None:
    assert chat(chat_template_kwargs={"thinking": False}).conversation.variables == {"thinking": False}
    for name in ("messages", "chat_template", "tokenize", "_x"):
        assert error_of(chat, chat_template_kwargs={name: 1}).param == "chat_template_kwargs"


def test_tokenize_takes_text_or_messages() -> None:
    assert (
        parse_tokenize({"prompt": ""})[0].add_special_tokens
        and not parse_tokenize({"messages": USER})[0].add_special_tokens
    )
    for body in ({}, {"prompt": "x", "messages": USER}):
        with pytest.raises(InvalidRequest) as caught:
            parse_tokenize(body)
        assert caught.value.param == "prompt"
    for tokens in (None, "x", [1.5], [True], {"0": 1}):
        with pytest.raises(InvalidRequest) as caught:
            parse_detokenize({"tokens": tokens})
        assert caught.value.param == "tokens"


def test_what_every_prompt_carries_is_bounded_by_their_number() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion({"prompt": ["x"] * 1000, "allowed_token_ids": list(range(2000))}, {})
    assert caught.value.param == "allowed_token_ids"


BREAKS = (b",", b"[", b"]", b" ", b"-", b"0", b"e", b'"', b"{", b"}", b"", b"\xff", b"NaN", b"1.5", b"\n")


def decoded(body: bytes, pack: bool = False) -> Any:
    try:
        return {
            name: list(value) if isinstance(value, array) else value
            for name, value in decode_object(body, pack=pack).items()
        }
    except InvalidRequest as error:
        return error.message.partition(":")[0]


def test_in_parts_a_body_is_what_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(6)
    for _ in range(1500):
        value = {
            "prompt": [rng.randrange(999) for _ in range(rng.randrange(60))],
            "x": rng.choice(([1.5, None, True], [[1], [2]], "a,b", [], [1])),
        }
        body = bytearray(json.dumps(value, indent=rng.choice((None, 1))).encode())
        for _ in range(rng.choice((0, 0, 1, 2))):
            place = rng.randrange(len(body))
            body[place : place + rng.randrange(2)] = rng.choice(BREAKS)
        monkeypatch.setattr(wire, "_PART_BYTES", 1 << 20)
        whole = decoded(body)
        monkeypatch.setattr(wire, "_PART_BYTES", rng.choice((1, 3, 10, 40)))
        assert decoded(body) == decoded(body, pack=True) == whole, bytes(body)


@pytest.mark.parametrize("changed", [None, 1.5, 1.0, -0.0, True, 2**31, -(2**31) - 1, 2**70, "a", []])
def test_long_lists_of_ids_are_packed_and_what_is_no_id_is_refused_as_in_short_ones(changed: Any) -> None:
    ids: list[Any] = [*range(50_000)]
    raw = decode_object(json.dumps({"prompt": ids, "stop_token_ids": ids}).encode(), pack=True)
    assert isinstance(raw["prompt"], array) and parse_completion({"prompt": raw["prompt"]}, {}).prompts == [
        array("i", ids)
    ]
    assert (
        error_of(completion, stop_token_ids=raw["stop_token_ids"]).message
        == error_of(completion, stop_token_ids=ids).message
    )
    bad = decode_object(json.dumps({"prompt": [*ids, changed]}).encode(), pack=True)["prompt"]
    assert error_of(completion, prompt=bad).message == error_of(completion, prompt=[1, changed]).message
