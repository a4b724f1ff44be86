"""Grammars of forced calls and of reasoning before a structure: whatever they let a model write, the parser reads back
as it was meant."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Mapping
from typing import Any

import jsonschema
import pytest

from headrace.engine.grammar import (
    GrammarError,
    Vocabulary,
    check_start,
    create_limits,
    create_matcher,
    create_tokenizer,
)
from headrace.errors import InvalidRequest
from headrace.request import StructuredOutputs
from headrace.server.dialects.conversation import Mode, ToolChoice
from headrace.server.forced import constrain
from headrace.server.parsing import AnswerFormat, answer_format
from headrace.server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, Formats
from headrace.server.parsing.segments import Content, Reasoning, Segment, ToolCallArguments, ToolCallStart
from headrace.server.tools import functions_of

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a town ::= a place"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "at": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "maxItems": 2},
        "exact": {"type": "boolean"},
        "near": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_time"}},
    {
        "type": "function",
        "function": {"name": "ping", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}  # type: ignore[attr-defined]
SPECIAL = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|tool_call_start|>", "[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    *(
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "<|constrain|>",
        "<|eom|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
    ),
    *(
        "｜DSML｜",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
)
TOKENS = [
    *(bytes([byte]) for byte in (*range(32, 127), 10, *"｜".encode())),
    "｜".encode(),
    *(name.encode() for name in SPECIAL),
    b"<eos>",
]
EOS = len(TOKENS) - 1
TOKENIZER = create_tokenizer(Vocabulary(TOKENS, range(EOS - len(SPECIAL), EOS + 1), (EOS,)))


# Of texts that only they end.
ENDS = (
    *(
        "</think>",
        "\n</parameter>",
        "</parameter>",
        "</arg_value>",
        "</atem:parameter>",
        "</steptml:parameter>",
        "</｜DSML｜parameter>",
    ),
    *("<|end|>", "<|eom|>", '<|"|>', "<escape>", "[/THINK]", "<|END_THINKING|>"),
)


_PIECES = re.compile("|".join([*map(re.escape, SPECIAL), r"[\s\S]"]))


def ids_of(text: str) -> list[int]:
    return [TOKENS.index(piece.encode()) for piece in _PIECES.findall(text)]


def written(wanted: StructuredOutputs, seed: int, most: int = 4000) -> str:
    """A text drawn from what the grammar allows; strings are ended early, so that it ends at all."""
    draw, matcher = random.Random(seed), create_matcher(TOKENIZER, wanted, create_limits())
    check_start(matcher)
    out: list[int] = []
    while len(out) < most:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(EOS + 1) if mask[token >> 3] >> (token & 7) & 1]
        if EOS in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return b"".join(TOKENS[token] for token in out).decode()
        ends = [
            ids_of(text)
            for text in ENDS
            if len(allowed) > 60 and matcher.validate_tokens(ids_of(text)) == len(ids_of(text))
        ]
        ending = [token for token in allowed if TOKENS[token] in (b'"', b"]", b")", b"}", b"<")]
        free = [token for token in allowed if token != EOS]
        more = (
            draw.choice(ends)
            if ends and draw.random() < 0.4
            else [draw.choice(ending if ending and draw.random() < 0.7 else free)]
        )
        out += more
        assert matcher.consume_tokens(more), matcher.get_error()
    return ""


def read(form: AnswerFormat, text: str, step: int) -> tuple[list[Segment], str]:
    parser = form.create_parser()
    assert parser is not None
    pieces = [text[begin : begin + step] for begin in range(0, len(text), step)]
    return [*(segment for piece in pieces for segment in parser.push(piece)), *parser.finish()], parser.end_reason(
        "stop"
    )


def calls_of(segments: Collection[Segment]) -> list[tuple[str, Any]]:
    texts: dict[int, str] = {}
    for each in segments:
        if isinstance(each, ToolCallArguments):
            texts[each.index] = texts.get(each.index, "") + each.text
    return [(each.name, json.loads(texts[each.index])) for each in segments if isinstance(each, ToolCallStart)]


OWN_REASONING = {
    "openai": "openai_gptoss",
    "muse_glimmer": "muse_glimmer",
    "functionary": None,
    "mistral": "mistral",
    "cohere_command3": "cohere_command3",
}
REQUIRED, NAMED = ToolChoice(Mode.REQUIRED), ToolChoice(Mode.NAMED, "get_weather", parallel=False)


def formed(
    tools: str | None, reasoning: str | None, choice: ToolChoice, *, prompt: str = "", offered: Any = TOOLS
) -> tuple[AnswerFormat, Any]:
    formats = Formats(TOOL_FORMATS[tools] if tools else None, REASONING_FORMATS[reasoning] if reasoning else None)
    form, wanted = constrain(
        answer_format(formats, prompt, functions_of(offered), parallel=choice.parallel), offered, choice, None, SPECIAL
    )
    assert wanted is not None
    return form, wanted


@pytest.mark.parametrize("choice", [REQUIRED, NAMED], ids=["required", "named"])
@pytest.mark.parametrize("name", [*TOOL_FORMATS, None])
def test_what_a_model_is_held_to_is_read_back_as_calls(name: str | None, choice: ToolChoice) -> None:
    form, wanted = formed(name, OWN_REASONING.get(name or "", "qwen3"), choice)
    assert form.tools is TOOL_FORMATS[name] if name else form.tools is not None and form.tools.name == "forced"
    ended = 0
    for seed in range(3):
        text = written(wanted, seed)
        if not text:
            continue
        ended += 1
        segments, reason = read(form, text, 1 + seed % 3)
        calls = calls_of(segments)
        assert reason == "tool_calls" and calls, text
        assert not any(isinstance(each, Content) for each in segments), text
        assert choice is REQUIRED or [call for call, _ in calls] == ["get_weather"]
        for function, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[function])
    assert ended >= 1


def _tagged(*values: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<tool_call>\n<function=get_weather>\n{inner}</function>\n</tool_call>"


CITY, DAYS = ("city", "Ulm"), ("days", "1")


@pytest.mark.parametrize(
    ("name", "text", "fine"),
    [
        ("qwen3_coder", _tagged(CITY, DAYS), True),
        ("qwen3_coder", _tagged(CITY, ("unit", "F"), DAYS, ("exact", "true")), True),
        ("qwen3_coder", _tagged(CITY), False),
        ("qwen3_coder", _tagged(CITY, ("unit", "K"), DAYS), False),
        ("qwen3_coder", _tagged(CITY, ("days", "15")), False),
        ("pythonic", '[get_weather(city="Ulm", days=1)]', True),
        ("pythonic", '[get_weather(city="Ulm", days=1, at=[3], exact=True)]', True),
        ("pythonic", '[get_weather(city="Ulm", days=1 exact=True)]', False),
        ("pythonic", '[get_weather(city="Ulm")]', False),
        ("pythonic", "[ping()]", True),
        ("pythonic", "[ping(n=2)]", True),
        ("pythonic", "[get_time(n=2)]", False),
    ],
)
def test_what_is_required_must_come_and_what_is_not_may(name: str, text: str, fine: bool) -> None:
    for parallel in (True, False):
        matcher = create_matcher(
            TOKENIZER, formed(name, None, ToolChoice(Mode.REQUIRED, parallel=parallel))[1], create_limits()
        )
        assert (matcher.try_consume_tokens(ids_of(text)) == len(text) and matcher.is_accepting()) == fine
        if fine:
            matcher.reset()
            twice = text + text if name == "qwen3_coder" else f"{text[:-1]}, {text[1:]}"
            assert (matcher.try_consume_tokens(ids_of(twice)) == len(twice)) == parallel


def test_reasoning_comes_first_where_the_family_reasons() -> None:
    for reasoning, prompt, must in (("qwen3", "", False), ("qwen3", "<think>\n", True), ("deepseek_r1", "", True)):
        form, wanted = formed("hermes", reasoning, NAMED, prompt=prompt)
        matcher = create_matcher(TOKENIZER, wanted, create_limits())
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "days": 1}}\n</tool_call>'
        thought = 'hm </thin <tool_call>{"\n</think>\n\n'
        for text, fine in ((call, not must), (("" if must else "<think>") + thought + call, True), (thought, False)):
            matcher.reset()
            assert (matcher.try_consume_tokens(ids_of(text)) == len(text) and matcher.is_accepting()) == fine, (
                reasoning,
                prompt,
                text,
            )
        segments, reason = read(form, ("" if must else "<think>") + thought + call, 3)
        assert reason == "tool_calls" and calls_of(segments) == [("get_weather", {"city": "Ulm", "days": 1})]
        assert "".join(each.text for each in segments if isinstance(each, Reasoning)) == 'hm </thin <tool_call>{"'


CALLED = {
    "hermes": '<tool_call>\n{"name": "ping", "arguments": {"n": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=ping>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "mistral_args": '[TOOL_CALLS]ping[ARGS]{"n": 1}',
    "pythonic": "[ping(n=1)]",
    "openai": '<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"n": 1}',
    "cohere_command3": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "ping", "parameters": {"n": 1}}]<|END_ACTION|>',
}
ANSWERED = {
    "openai": ("<|channel|>final<|message|>", ""),
    "cohere_command3": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
}


@pytest.mark.parametrize("name", CALLED)
def test_beside_a_format_there_is_a_call_or_an_answer_in_it(name: str) -> None:
    reasoning = REASONING_FORMATS.get(OWN_REASONING.get(name) or "qwen3")
    assert reasoning is not None
    form = answer_format(Formats(TOOL_FORMATS[name], reasoning), "", functions_of(TOOLS))
    form, wanted = constrain(
        form, TOOLS, ToolChoice(), StructuredOutputs(json='{"type": "object", "maxProperties": 0}'), SPECIAL
    )
    assert wanted is not None
    matcher = create_matcher(TOKENIZER, wanted, create_limits())
    before, after = ANSWERED.get(name, ("", ""))
    thought = f"{reasoning.begin}hm{reasoning.end}{reasoning.next}"
    call, answer = CALLED[name], f"{before}{{}}{after}"
    for text, fine in (
        (call, True),
        (answer, True),
        (thought + call, True),
        (thought + answer, True),
        ("Hello", False),
        (call + answer, False),
    ):
        matcher.reset()
        ids = ids_of(text)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == fine, text
    assert calls_of(read(form, thought + call, 3)[0]) == [("ping", {"n": 1})]
    segments, reason = read(form, thought + answer, 3)
    assert ("".join(each.text for each in segments if isinstance(each, Reasoning)), reason) == ("hm", "stop")
    assert "".join(each.text for each in segments if isinstance(each, Content)) == "{}"


def test_beside_a_format_values_that_cannot_be_held_are_any_text() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [{"type": "object"}]}}}
    form = answer_format(Formats(TOOL_FORMATS["qwen3_coder"]), "", functions_of([tool]))
    form, wanted = constrain(form, [tool], ToolChoice(), StructuredOutputs(json_object=True), ())
    assert wanted is not None and form.tools is TOOL_FORMATS["qwen3_coder"]
    ids = ids_of("<tool_call>\n<function=f>\n<parameter=x>\nanything\n</parameter>\n</function>\n</tool_call>")
    matcher = create_matcher(TOKENIZER, wanted, create_limits())
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_what_cannot_be_called_beside_a_format_is_refused_by_name() -> None:
    for parameters, match in (
        ({"anyOf": [{"type": "object"}]}, "beside this form"),
        ({"type": "array"}, "type object"),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        form = answer_format(Formats(TOOL_FORMATS["pythonic"]), "", functions_of([tool]))
        with pytest.raises(InvalidRequest, match=match) as caught:
            constrain(form, [tool], ToolChoice(), StructuredOutputs(json_object=True), ())
        assert (caught.value.param or "").startswith("tools")


@pytest.mark.parametrize(
    "fields",
    [
        {"json": '{"type":"object"}'},
        {"json_object": True},
        {"regex": "[{]+}"},
        {"choice": ("1", "{}")},
        {"grammar": 'start: "{}"'},
    ],
    ids=str,
)
def test_any_structure_may_follow_reasoning(fields: dict[str, Any]) -> None:
    form, wanted = constrain(
        answer_format(Formats(None, REASONING_FORMATS["qwen3"]), "", {}),
        None,
        ToolChoice(),
        StructuredOutputs(**fields),
        (),
    )
    assert wanted is not None
    matcher = create_matcher(TOKENIZER, wanted, create_limits())
    for text, fine in (
        ("<think>x</think>\n{}", True),
        ("{}", True),
        ("<think>x</think>no", False),
        ("<think>x", False),
        ("x{}", False),
    ):
        matcher.reset()
        assert (matcher.try_consume_tokens(ids_of(text)) == len(text) and matcher.is_accepting()) == fine, text
    assert read(form, "<think>x</think>\n{}", 99)[0] == [Reasoning("x"), Content("{}")]


def test_what_cannot_be_said_between_tags_is_said_in_json() -> None:
    def tool(parameters: Any, name: str = "f") -> Any:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    for parameters in (
        {"anyOf": [{"type": "object"}]},
        {"properties": {"a b": {}, 'c"': {}}},
        {"properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"properties": {"a": {"type": "string", "enum": [" x"]}}},
        {"properties": {"a": {"type": "string", "enum": [1]}}},
        {"properties": {"a": {"type": "string", "enum": []}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "const": 5}}},
        {"properties": {"a": {}}, "required": ["b"]},
    ):
        form, wanted = formed("qwen3_coder", None, REQUIRED, offered=[tool(parameters)])
        assert form.tools is not None and form.tools.name == "forced" and wanted.json is not None, parameters
    form, _ = formed(
        "pythonic", None, REQUIRED, offered=[tool({"properties": {f"p{index}": {} for index in range(60)}})]
    )
    assert form.tools is not None and form.tools.name == "forced"
    form, _ = formed(
        "hermes",
        None,
        NAMED,
        offered=[tool({"$ref": "#/properties/a", "properties": {"a": {"type": "object"}}}, "get_weather")],
    )
    assert form.fixed_name == "get_weather"
    with pytest.raises(InvalidRequest, match="refers to"):
        formed("hermes", None, REQUIRED, offered=[tool({"$ref": "#/properties/a"})])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", None])
@pytest.mark.parametrize("choice", [REQUIRED, NAMED], ids=["required", "named"])
def test_arguments_are_an_object(name: str | None, choice: ToolChoice) -> None:
    def offered(parameters: Any) -> Any:
        return [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]

    for parameters in ({"type": "array"}, {"type": "string"}, {"type": ["object", "null"]}, {"type": {}}):
        with pytest.raises(InvalidRequest, match="type object") as caught:
            formed(name, None, choice, offered=offered(parameters))
        assert caught.value.param == "tools[0]"  # whatever a route calls what is in it
    for parameters in (
        {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {}, "additionalProperties": False}]},
        {"enum": [1, {}]},
    ):
        form, wanted = formed(name, None, choice, offered=offered(parameters))
        assert next(read(form, text, 5)[1] for seed in range(4) if (text := written(wanted, seed))) == "tool_calls"


def test_a_structure_without_reasoning_is_left_alone() -> None:
    wanted = StructuredOutputs(regex="a")
    for formats, prompt in (
        (Formats(), ""),
        (Formats(None, REASONING_FORMATS["qwen3"]), "<think>\n\n</think>\n\n"),
    ):
        form, held = constrain(answer_format(formats, prompt, {}), None, ToolChoice(), wanted, ())
        assert held is wanted and form.create_parser() is None


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", None])
def test_what_no_grammar_can_hold_a_call_to_is_left_to_the_model_unless_strict(name: str | None) -> None:
    """A oneOf whose branches overlap is an anyOf."""
    levels = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 1, "maxItems": 2}
    properties = {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "t": levels}
    for strict in (False, True):
        parameters = {"type": "object", "properties": properties, "required": ["a", "t"], "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "get_weather", "strict": strict, "parameters": parameters}}
        form, wanted = formed(name, None, REQUIRED, offered=[tool])
        if strict:
            with pytest.raises(GrammarError, match="uniqueItems"):
                create_matcher(TOKENIZER, wanted, create_limits())
            continue
        ((_, arguments),) = calls_of(
            read(form, next(text for seed in range(9) if (text := written(wanted, seed))), 5)[0]
        )[:1]
        assert isinstance(arguments["a"], int | float) and {*arguments["t"]} <= {1, 2}
