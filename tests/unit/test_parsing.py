"""The parser of answers: what each family's calls become, and that neither cuts nor damage in the text change or break
it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import ServerConfig
from headrace.engine.template import ChatTemplate
from headrace.errors import InvalidRequest
from headrace.server.parsing import AnswerFormat, answer_format
from headrace.server.parsing.choice import choose_formats
from headrace.server.parsing.cursor import MAX_HEAD, MAX_SPACE
from headrace.server.parsing.formats import (
    FORCED_ARGUMENTS,
    FORCED_CALLS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    Formats,
    Style,
)
from headrace.server.parsing.parser import OutputParser, create_call_id
from headrace.server.parsing.segments import Content, Reasoning, Segment, ToolCallArguments, ToolCallStart
from tests.support.outside import shared

FUNCTIONS = {"f": {"city": ("string",), "days": ("array",), "b": ("object",)}, "get_weather": {}}
ARGUMENTS = '{"city": "Besançon \\"x\\" \\u00e9😀", "days": [1, -2.5e3, {"a": null}], "b": {}}'

# ARGUMENTS between tags, and as Python writes them.
_DAYS, _CITY = '[1, -2.5e3, {"a": null}]', 'Besançon "x" é😀'
TAGGED = f"<parameter=city>\n{_CITY}\n</parameter>\n<parameter=days>\n{_DAYS}\n</parameter>\n<parameter=b>\n{{}}\n</parameter>\n"
KEYED = (
    f"\n<arg_key>city</arg_key>\n<arg_value>{_CITY}</arg_value><arg_key>days</arg_key><arg_value>{_DAYS}</arg_value>"
)
KEYED += "<arg_key>b</arg_key>\n<arg_value>{}</arg_value>"
NAMED = "".join(
    f'<parameter name="{name}">{value}</parameter>\n' for name, value in (("city", _CITY), ("days", _DAYS), ("b", "{}"))
)
KEYWORDS = "city='Besançon \"x\" \\u00e9😀', days=[1, -2.5e3, {'a': None,}], b = {}"
QUOTED = "{city:%" + _CITY + "%,days:[1,-2.5e3,{a:None}],b:{}}"
LINED = TAGGED.replace(">\n", ">").replace("\n<", "<").replace("<parameter=", "\n<parameter=")
LIST = '[{"name": "f", "arguments": {a}}, {"name": "get_weather", "arguments": {}}]'


def prefixed(prefix: str) -> str:
    return NAMED.replace("<parameter", f"<{prefix}parameter").replace("</parameter", f"</{prefix}parameter")


def _dsml() -> str:
    values = (("city", "true", _CITY), ("days", "false", _DAYS), ("b", "false", "{}"))
    lines = [f'<p name="{name}" string="{text}">{value}</p>\n' for name, text, value in values]
    written = '<i name="f">\n' + "".join(lines) + '</i>\n<i name="get_weather">\n\n</i>\n'
    for short, name in (("p", "parameter"), ("i", "invoke")):
        written = written.replace(f"<{short} ", f"<｜DSML｜{name} ").replace(f"</{short}>", f"</｜DSML｜{name}>")
    return written


DSML = _dsml()

# One answer of two calls for each format, as the family writes it; {a} is ARGUMENTS.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {a}}\n</tool_call>\n<tool_call>\n{"arguments": {}, "name": "get_weather"}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {a}}; {"type": "function", "name": "get_weather", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {a}, "id": "abcdefghi"}, {"name": "get_weather", "arguments": {}}]',
    "mistral_args": "[TOOL_CALLS]f[ARGS]{a}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{a}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{a}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{a}<|tool_call_end|>"
    "<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "qwen3_coder": f"<tool_call>\n<function=f>\n{TAGGED}</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n</function>\n</tool_call>",
    "glm45": f"<tool_call>f{KEYED}\n</tool_call>\n<tool_call>get_weather\n</tool_call>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="f">\n{NAMED}</invoke>\n<invoke name="get_weather">\n</invoke>\n</minimax:tool_call>',
    "deepseek_v32": f"<｜DSML｜function_calls>\n{DSML}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{DSML}</｜DSML｜tool_calls>",
    "seed_oss": f"<seed:tool_call>\n<function=f>\n{LINED}</function>\n</seed:tool_call><seed:tool_call>\n"
    "<function=get_weather>\n</function></seed:tool_call>",
    "muse_glimmer": f'to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n{prefixed("atem:")}</atem:invoke>\n</atem:function_calls><|eom|>'
    '<|start|>assistant to=get_weather<|message|><atem:function_calls><atem:invoke name="get_weather">\n</atem:invoke></atem:function_calls>',
    "step3": f'<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n{prefixed("steptml:")}</steptml:invoke>'
    '<｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{a}<|call|>"
    "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>",
    "functionary": "f\n{a}>>>get_weather\n{}",
    "functionary_v31": "<function=f>{a}</function><function=get_weather>{}</function>",
    "cohere_command3": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {a}},\n'
    '    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": {}}\n]<|END_ACTION|>',
    "command_r": 'Action: ```json\n[{"tool_name": "f", "parameters": {a}}, {"tool_name": "get_weather", "parameters": {}}]\n```',
    "nemotron_json": f"<TOOLCALL>{LIST}</TOOLCALL>",
    "jamba": f"<tool_calls>{LIST}</tool_calls>",
    "minimax": '<tool_calls>\n{"name": "f", "arguments": {a}}\n{"name": "get_weather", "arguments": {}}\n</tool_calls>',
    "phi4_mini": f"<|tool_call|>{LIST}<|/tool_call|>",
    "granite": f"<|tool_call|>{LIST}",
    "phi4_mini_json": f"functools{LIST}",
    "granite-20b-fc": '<function_call> {"name": "f", "arguments": {a}} <function_call> {"name": "get_weather", "arguments": {}}',
    "internlm": '<|action_start|><|plugin|>\n{"name": "f", "parameters": {a}}<|action_end|>\n'
    '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {}}<|action_end|>',
    "longcat": '<longcat_tool_call>{"name": "f", "arguments": {a}}</longcat_tool_call>\n'
    '<longcat_tool_call>{"name": "get_weather", "arguments": {}}</longcat_tool_call>',
    "gigachat31": '<|function_call|>{"name": "f", "arguments": {a}}<|function_call|>{"name": "get_weather", "arguments": {}}',
    "gigachat3": 'function call<|role_sep|>\n{"name": "f", "arguments": {a}}function call<|role_sep|>\n{"name": "get_weather", "arguments": {}}',
    "apertus": '<|tools_prefix|>[{"f": {a}}, {"get_weather": {}}]<|tools_suffix|>',
    "gemma4": "<|tool_call>call:f"
    + QUOTED.replace("%", '<|"|>')
    + "<tool_call|><|tool_call>call:get_weather{}<tool_call|>",
    "functiongemma": "<start_function_call>call:f" + QUOTED.replace("%", "<escape>") + "<end_function_call>"
    "<start_function_call>call:get_weather{}<end_function_call>",
    "olmo3": f"<function_calls>\nf({KEYWORDS})\nget_weather()\n</function_calls>",
    "xlam": LIST,
    "pythonic": f"[f({KEYWORDS}), get_weather()]",
    "lfm2": f"<|tool_call_start|>[f({KEYWORDS}), get_weather()]<|tool_call_end|>",
}
# ... and what its arguments read as, where they are not written as JSON.
WORDED = [name for name, each in TOOL_FORMATS.items() if each.tags is not None or each.literals.quote]
READ = {name: ARGUMENTS.replace("\\u00e9", "é") for name in WORDED}
# ... and a text before calls, where it cannot simply stand there.
SECOND = {"openai": "<|call|>", "muse_glimmer": "<|eom|>", "functionary": ">>>"}  # from here on a call is whole
SAID = {
    "openai": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant",
    "muse_glimmer": " to=user<|message|>Let me see.<|eom|><|start|>assistant ",
    "functionary": "all\nLet me see.\n>>>",
}
PLAIN = tuple(name for name, each in TOOL_FORMATS.items() if each.style in (Style.OBJECT, Style.JSON))


def written(name: str) -> str:
    return WRITTEN[name].replace("{a}", ARGUMENTS)


def make(tools: str | None, reasoning: str | None = None, *, prompt: str = "", single: bool = False) -> OutputParser:
    formats = Formats(TOOL_FORMATS[tools] if tools else None, REASONING_FORMATS[reasoning] if reasoning else None)
    parser = answer_format(formats, prompt, FUNCTIONS, parallel=not single).create_parser()
    assert parser is not None
    return parser


def parse(parser: OutputParser, pieces: Iterable[str]) -> tuple[list[Segment], str]:
    """All segments, neighbours of one kind joined and ids replaced by their place; and what a stop is reported as."""
    found: list[Segment] = []
    for segment in [*(each for piece in pieces for each in parser.push(piece)), *parser.finish()]:
        last = found[-1] if found else None
        if isinstance(segment, ToolCallStart):
            found.append(replace(segment, id=""))
        elif type(last) is type(segment) and getattr(last, "index", 0) == getattr(segment, "index", 0):
            found[-1] = replace(segment, text=last.text + segment.text)  # type: ignore[union-attr]
        else:
            found.append(segment)
    return found, parser.end_reason("stop")


def whole(text: str, tools: str | None, reasoning: str | None = None, **options: Any) -> tuple[list[Segment], str]:
    return parse(make(tools, reasoning, **options), [text])


def content(found: Iterable[Segment]) -> str:
    return "".join(each.text for each in found if isinstance(each, Content))


def arguments(found: Iterable[Segment]) -> dict[int, str]:
    calls: dict[int, str] = {each.index: "" for each in found if isinstance(each, ToolCallStart)}
    for each in found:
        if isinstance(each, ToolCallArguments):
            calls[each.index] += each.text
    return calls


# --- what families write


@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls(name: str) -> None:
    read = READ.get(name, ARGUMENTS)
    calls = [
        ToolCallStart(0, "", "f"),
        ToolCallArguments(0, read),
        ToolCallStart(1, "", "get_weather"),
        ToolCallArguments(1, "{}"),
    ]
    assert whole(written(name), name) == (calls, "tool_calls")
    assert set(WRITTEN) == set(TOOL_FORMATS)
    if not TOOL_FORMATS[name].bare:
        said = SAID.get(name, "Let me see.\n\n")
        assert whole(said + written(name) + "\n", name) == ([Content("Let me see."), *calls], "tool_calls")


@pytest.mark.parametrize("name", PLAIN)
def test_arguments_come_as_they_are_written(name: str) -> None:
    """After the name, what is pushed comes out: nothing waits for the end of a call, and names are sent before
    arguments."""
    parser, seen = make(name), ""
    begin = written(name).index(ARGUMENTS)
    parser.push(written(name)[:begin])
    for index, character in enumerate(ARGUMENTS):
        seen += "".join(each.text for each in parser.push(character) if isinstance(each, ToolCallArguments))
        assert len(seen) >= index - 12, "an escape or a number may be held, no more"


def test_a_bare_call_is_one_only_at_the_start_and_of_a_known_function() -> None:
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert whole(call, "llama3_json")[0] == [ToolCallStart(0, "", "f"), ToolCallArguments(0, '{"a": 1}')]
    for text in ("See: " + call, call.replace('"f"', '"Bob"'), '{"name": "f", "age": 3}', '{"a": 1}', "{", "", " "):
        found, reason = whole(text, "llama3_json")
        assert (content(found), len(found)) == (text, 1 if text else 0)
        assert reason == ("length" if text == "{" else "stop")


def test_arguments_may_be_missing() -> None:
    assert whole('<tool_call>{"name": "f"}</tool_call>', "hermes") == (
        [ToolCallStart(0, "", "f"), ToolCallArguments(0, "{}")],
        "tool_calls",
    )


def test_single_ends_after_the_first_call() -> None:
    found, reason = parse(make("hermes", single=True), [written("hermes") + " and so on"])
    assert (found, reason) == ([ToolCallStart(0, "", "f"), ToolCallArguments(0, ARGUMENTS)], "tool_calls")


def forced(name: str = "", *, single: bool = False) -> OutputParser:
    format = FORCED_ARGUMENTS if name else FORCED_CALLS
    parser = AnswerFormat(tools=format, functions=FUNCTIONS, fixed_name=name, single=single).create_parser()
    assert parser is not None
    return parser


def test_calls_may_be_plain_json_and_nothing_else() -> None:
    assert parse(forced("f"), ['{"a"', ": 1}"]) == (
        [ToolCallStart(0, "", "f"), ToolCallArguments(0, '{"a": 1}')],
        "tool_calls",
    )
    assert parse(forced("f"), ['{"a": '])[1] == "length"
    calls = '[{"name": "f", "parameters": {}}, {"name": "get_weather", "parameters": {"a": "[1"}}]'
    found, reason = parse(forced(), calls)
    assert arguments(found) == {0: "{}", 1: '{"a": "[1"}'} and reason == "tool_calls" and content(found) == ""
    assert parse(forced(), [calls[:-30]])[1] == "length"
    assert arguments(parse(forced(single=True), calls)[0]) == {0: "{}"}


def test_ids_have_the_length_that_templates_want() -> None:
    (start, *_) = make("mistral").push(written("mistral"))
    assert isinstance(start, ToolCallStart) and len(start.id) == 9 and start.id.isalnum()
    assert create_call_id().startswith("call_") and create_call_id() != create_call_id()


TYPED = {"text": ("string",), "either": ("string", "null"), "number": ("number",), "list": ("array",)}
LONG = "x" * (MAX_HEAD + 50)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("text", "5", '"5"'),
        ("text", '\na\n\n"b"\\\n', json.dumps('a\n\n"b"\\')),
        ("text", "  a \n\n", '"  a \\n"'),
        ("text", "", '""'),
        ("text", "\n", '""'),
        ("text", LONG, f'"{LONG}"'),
        ("either", "null", "null"),
        ("either", "None", "null"),
        ("either", "5", '"5"'),
        ("either", '"5"', '"5"'),
        ("either", LONG, f'"{LONG}"'),
        ("number", " 5\n", "5"),
        ("number", "five", '"five"'),
        ("number", "NaN", '"NaN"'),
        ("list", '[1, "</p"]', '[1, "</p"]'),
        ("list", "none", '"none"'),
        ("unheard", "True", "true"),
        ("unheard", "a</parameter", '"a</parameter"'),
        ("unheard", "{'a': 1}", "\"{'a': 1}\""),
    ],
)
def test_values_between_tags_are_of_the_types_that_the_tool_names(key: str, value: str, read: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter={key}>{value}</parameter>\n</function>\n</tool_call>"
    for pieces in ([text], text):
        parser = answer_format(Formats(TOOL_FORMATS["qwen3_coder"], None), "", {"f": TYPED}).create_parser()
        assert parser is not None
        found, reason = parse(parser, pieces)
        assert (arguments(found), reason, content(found)) == ({0: f'{{"{key}": {read}}}'}, "tool_calls", "")


def test_a_list_that_is_none_leaves_its_call_incomplete() -> None:
    text = "<tool_call><function=f><parameter=list>[1, oops</parameter></function></tool_call>"
    parser = answer_format(Formats(TOOL_FORMATS["qwen3_coder"], None), "", {"f": TYPED}).create_parser()
    assert parser is not None
    found, reason = parse(parser, [text])
    assert not any(map(is_json, arguments(found).values())) and reason == "stop"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x=1, y=-2.5e3,", '{"x": 1, "y": -2.5e3}'),
        ("x='it\\'s \\\\ \\x41\\u00e9\\U0001f600\\q\\n'", '{"x": "it\'s \\\\ A\\u00e9😀\\\\q\\n"}'),
        (
            "x=(1, [2,], {'a': (), \"b\": {}}), y=True, z=null",
            '{"x": [1, [2], {"a": [], "b": {}}], "y": true, "z": null}',
        ),
        ("", "{}"),
    ],
)
def test_python_literals_are_given_out_as_json(written: str, read: str) -> None:
    assert json.loads(read) is not None
    for pieces in ([f"[f({written})]"], f"[f({written})]"):
        assert parse(make("pythonic"), pieces) == (
            [ToolCallStart(0, "", "f"), ToolCallArguments(0, read)],
            "tool_calls",
        )


NO_LITERALS = (
    "1",
    "x",
    "x=",
    "x=y",
    "x=1 y=2",
    "x={1: 2}",
    "x='\\U00110000'",
    "x='\\ud8'",
    "x=[1}",
    "x=" + "[" * 200,
    "x=1__",
    "x=f()",
)


@pytest.mark.parametrize("written", NO_LITERALS)
def test_what_is_no_python_literal_is_no_whole_call(written: str) -> None:
    for pieces in ([f"[f({written})]"], f"[f({written})]"):
        found, reason = parse(make("pythonic"), pieces)
        assert not any(map(is_json, arguments(found).values())) and reason in ("stop", "length")
    assert whole("[f", "pythonic")[1] == "length" and whole("[print(x=1)]", "pythonic")[0] == [Content("[print(x=1)]")]


# --- reasoning


def test_reasoning_then_content_then_calls() -> None:
    text = "<think>\nhm <tool_call> or not\n</think>\n\nYes.\n" + written("hermes")
    found, reason = whole(text, "hermes", "qwen3")
    assert (
        found[:2] == [Reasoning("hm <tool_call> or not"), Content("Yes.")]
        and len(found) == 6
        and reason == "tool_calls"
    )


def test_the_prompt_may_have_begun_or_ended_it() -> None:
    assert whole("hm\n</think>\n\nYes", None, "qwen3", prompt="…<think>\n")[0] == [Reasoning("hm"), Content("Yes")]
    assert (
        answer_format(Formats(None, REASONING_FORMATS["deepseek_r1"]), "…<think>\n\n</think>\n\n", {}).create_parser()
        is None
    )
    assert whole("a </think> b", None, "qwen3")[0] == [Content("a </think> b")]
    assert whole("a </think> b", None, "deepseek_r1")[0] == [Reasoning("a"), Content("b")]
    assert whole("Yes <think>no</think>", None, "qwen3")[0] == [Content("Yes <think>no</think>")]
    assert whole("<think>cut of", None, "qwen3") == ([Reasoning("cut of")], "stop")


def test_nothing_to_take_apart_is_no_parser() -> None:
    assert answer_format(Formats(), "", FUNCTIONS).create_parser() is None
    assert answer_format(Formats(TOOL_FORMATS["hermes"], None), "", {}).create_parser() is None


# --- what is no call


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>junk</tool_call>",
        "<tool_call>",
        "a <tool_cal",
        '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {"a": 01}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"nom": "f", "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\x41", "arguments": {}}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "' + "f" * 300 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": "' + "x" * MAX_HEAD + '"}, "name": "f"}</tool_call>',
        "<tool_call>" + " " * (MAX_HEAD + 5) + '{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": ' + "[" * 200 + "]" * 200 + '}, "name": "f"}</tool_call>',
        '<tool_call>{"arguments": {"a": ' + "1" * 300 + '}, "name": "f"}</tool_call>',
        "   white  space <   ",
    ],
)
def test_what_is_no_call_is_content_to_the_letter(text: str) -> None:
    found, reason = whole(text, "hermes")
    assert (content(found), arguments(found)) == (text, {})
    assert reason == ("length" if text == "<tool_call>" else "stop")
    assert parse(make("hermes"), text) == (found, reason)


def test_a_call_after_one_that_is_none() -> None:
    found, reason = whole("<tool_call>junk</tool_call> " + written("hermes"), "hermes")
    assert content(found) == "<tool_call>junk</tool_call>" and len(arguments(found)) == 2 and reason == "tool_calls"


def test_the_limit_of_what_is_held_back_is_a_place_in_the_text() -> None:
    """However much comes at once: what follows the limit is looked at afresh."""
    text = '<tool_call>{"arguments": {"a": "' + "x" * (MAX_HEAD + 100) + written("hermes")
    found, reason = whole(text, "hermes")
    assert len(arguments(found)) == 2 and reason == "tool_calls"
    assert parse(make("hermes"), text) == (found, reason)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_anywhere_never_looks_whole(name: str) -> None:
    """Up to the character that completes it, its arguments are no JSON and the reason is length; and the engine's own
    reasons stay."""
    text, format = written(name), TOOL_FORMATS[name]
    last = {Style.KEYWORDS: format.literals.close, Style.JSON: ARGUMENTS}.get(format.style, ARGUMENTS + "}")
    last = ARGUMENTS if name == "mistral" else format.tags.end if format.tags is not None else last
    second = text.index(SECOND.get(name, "get_weather"))
    end = text.rindex(last, 0, second) + len(last)
    for cut in range((len(format.marker) if text.startswith(format.marker) else 0) or 1, second):
        parser = make(name)
        found, reason = parse(parser, [text[:cut]])
        calls = arguments(found)
        aside = name == "mistral" and cut < text.index("}, {") + 1  # it says its id after the arguments
        assert READ.get(name, ARGUMENTS).startswith(calls.get(0, "")), text[:cut]
        if cut < end or aside:
            assert reason == "length" and not any(map(is_json, calls.values())), text[:cut]
        else:
            assert calls[0] == READ.get(name, ARGUMENTS) and parser.end_reason("length") == "length"


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_a_call_that_breaks_off_stays_incomplete() -> None:
    found, reason = whole('<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>', "hermes")
    assert found == [ToolCallStart(0, "", "f"), ToolCallArguments(0, '{"a": 1'), Content("oops}</tool_call>")]
    assert reason == "stop"


# --- cuts and damage

SOUP = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<think>",
            "</think>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
        ),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "<｜tool▁sep｜>",
            "```json\n",
            "<｜tool▁call▁end｜>",
        ),
        *(
            '{"name": "f", "arguments": {',
            '{"name": "f", "parameters": {"a": ',
            '"arguments": {}, "name": "f"}',
            '{"',
            '": ',
            '"',
            '"id": 5, ',
        ),
        *(
            "{",
            "}",
            "[",
            "]",
            ",",
            ";",
            ":",
            "\\",
            "\\u12",
            "\\ud83d",
            "\\n",
            "1",
            "-0.5e7",
            "tru",
            "true",
            "null",
            "\x00",
            "\n",
            "  ",
            "\n\n\n\n",
        ),
        *(
            "<function=f>",
            "<parameter=city>",
            "\n</parameter>",
            "</function>",
            "<arg_key>days</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ),
        *(
            '<invoke name="f">',
            '<parameter name="b">',
            "</invoke>",
            "[f(",
            "city=",
            "'",
            "True",
            "None",
            "(",
            ")",
            "='\\x4",
            "<|tool_call_start|>",
        ),
        *(
            "<|channel|>",
            "analysis",
            "commentary",
            "final",
            " to=functions.f",
            "<|message|>",
            "<|end|>",
            "<|start|>assistant",
            "<|call|>",
        ),
        *(
            " to=self",
            " to=f",
            "<|eom|>",
            "<atem:function_calls>",
            '<atem:invoke name="f">',
            ">>>",
            "all\n",
            "f\n",
            ">>>f\n{",
        ),
        *(
            '<｜DSML｜parameter name="city" string="true">',
            "</｜DSML｜parameter>",
            "<|tool_call>call:f{",
            '<|"|>',
            "city:",
            "<tool_call|>",
        ),
        *(
            "<|START_ACTION|>[",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            '{"tool_name": "f", "parameters": {',
            "<function_calls>",
            "f(city=",
        ),
        *("f", "get_weather", "é", "😀", "｜", "<", "<t", " " * (MAX_SPACE + 1), "x" * 50, '{"a": 1}'),
    ]
)
TEXTS = st.one_of(
    st.lists(SOUP, max_size=30).map("".join),
    st.text(alphabet=st.sampled_from('<tool_ca>/think{}[]":,\\ \nfé😀1'), max_size=60),
)


@st.composite
def damaged(draw: Callable[..., Any]) -> str:
    """What a family writes, with a piece cut out, doubled or replaced."""
    text = draw(st.sampled_from(("", "<think>\nhm\n</think>\n\n", "Hm. "))) + written(
        draw(st.sampled_from(sorted(WRITTEN)))
    )
    begin, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    middle = draw(st.sampled_from(("", text[begin:end] * 2))) if draw(st.booleans()) else draw(SOUP)
    return text[:begin] + middle + text[end:]


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


@settings(max_examples=600, deadline=None)
@given(
    text=st.one_of(TEXTS, damaged()),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    tools=st.sampled_from((None, *sorted(WRITTEN))),
    reasoning=st.sampled_from((None, "qwen3", "deepseek_r1", "openai_gptoss", "muse_glimmer", "cohere_command3")),
    prompt=st.sampled_from(("", "<think>\n")),
    single=st.booleans(),
)
def test_cuts_change_nothing(
    text: str, cuts: list[int], tools: str | None, reasoning: str | None, prompt: str, single: bool
) -> None:
    if tools is None and reasoning is None:
        return
    expected = parse(make(tools, reasoning, prompt=prompt, single=single), [text])
    assert parse(make(tools, reasoning, prompt=prompt, single=single), pieces_of(text, cuts)) == expected
    assert parse(make(tools, reasoning, prompt=prompt, single=single), text) == expected  # character by character
    found, reason = expected
    calls = arguments(found)
    complete = [index for index, each in calls.items() if is_json(each)]
    assert list(calls) == list(range(len(calls)))
    assert (reason == "tool_calls") == (bool(calls) and len(complete) == len(calls) and reason != "length")
    plain = tools is None or not (TOOL_FORMATS[tools].channels or TOOL_FORMATS[tools].wrappers)
    if not calls and reasoning is None and plain:
        assert content(found) == text
    assert not (tools is None and calls)


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(TEXTS, damaged()), tools=st.sampled_from(sorted(WRITTEN)))
def test_what_is_held_back_is_bounded(text: str, tools: str) -> None:
    parser = make(tools)
    for _ in range(3):
        parser.push(text)
        cursor = parser._cursor  # type: ignore[attr-defined]
        held = len(cursor.text) - cursor.at + sum(map(len, cursor._head))
        assert held <= MAX_HEAD + 600 + len(text)


HOSTILE = {
    "open markers": "<tool_call>",
    "half markers": "<tool_cal",
    "objects without an end": '<tool_call>{"arguments": {"a": "',
    "brackets": '<tool_call>{"name": "f", "arguments": {"a": [',
    "nested brackets": "[",
    "white space": " \n",
    "quotes": '<tool_call>{"name": "f", "arguments": {"a": "\\"',
    "escapes": "\\",
    "calls": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
}
OF_OTHERS = {  # text that each of these formats reads in ways of its own
    "openai": "<|start|>assistant<|channel|>commentary to=f<|message|>{<|end|>",
    "functionary": ">>>f\n",
    "gemma4": '<|tool_call>call:f{city:<|"|>',
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="city" string="true"></｜DSML｜',
    "cohere_command3": "<|START_RESPONSE|> <|START_ACT",
    "qwen3_coder": "<function=f><parameter=days>[",
}


@pytest.mark.parametrize(
    ("unit", "name"),
    [*((each, "hermes") for each in HOSTILE.values()), *((each, name) for name, each in OF_OTHERS.items())],
    ids=[*HOSTILE, *OF_OTHERS],
)
def test_time_is_linear(unit: str, name: str) -> None:
    """Twice the text takes about twice as long; the least of several times, for a busy core adds to some of them."""

    def seconds(size: int, step: int) -> float:
        head = '<tool_call>{"name": "f", "arguments": {"a": "' if name == "hermes" else ""
        text = head + unit * (size // len(unit))
        parser = make(name, "qwen3" if name == "hermes" else None)
        begin = time.process_time()
        for start in range(0, len(text), step):
            parser.push(text[start : start + step])
        parser.finish()
        return time.process_time() - begin

    for step in (3, 1 << 20):
        size = 1 << 13
        while seconds(size, step) < 0.004 and size < 1 << 18:  # beyond, a text leaves the caches
            size *= 2
        once = twice = float("inf")
        for tries in range(30):
            once, twice = min(once, seconds(size, step)), min(twice, seconds(2 * size, step))
            if tries >= 2 and twice <= 2.3 * max(once, 2e-3):
                break
        else:
            pytest.fail(
                f"{size} characters in pieces of {step} take {1e3 * once:.1f} ms, twice as many {1e3 * twice:.1f}"
            )


def test_nothing_is_evaluated() -> None:
    seen: list[str] = []
    watching = True
    sys.addaudithook(
        lambda event, _: seen.append(event) if watching and event in ("exec", "compile", "import") else None
    )
    for name in WRITTEN:
        whole(written(name), name, "qwen3")
    watching = False
    assert not seen


# --- which description


def test_a_description_is_chosen_from_the_template() -> None:
    formats, decisions = choose_formats('<tool_call> "arguments" {{ tools }} <think> </think>')
    assert formats == Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    assert [(each.name, each.value) for each in decisions] == [
        ("tool_call_parser", "hermes"),
        ("reasoning_parser", "qwen3"),
    ]
    assert choose_formats("{{ messages }}") == (Formats(), ())
    assert choose_formats("<tool_call> arguments <think></think>", "none", "none") == (Formats(), ())
    assert choose_formats("", "mistral", "deepseek_r1")[0] == Formats(
        TOOL_FORMATS["mistral"], REASONING_FORMATS["deepseek_r1"]
    )


def test_flags_know_every_description() -> None:
    for flag, formats in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        (choices,) = (each.metadata["choices"] for each in fields(ServerConfig) if each.name == flag)
        known = dict.fromkeys(name for each in formats.values() for name in (each.name, *each.aliases))
        assert choices == ("auto", "none", *known)


# What a template renders of an answer is what its model was trained to write: it must come back as it went in.
OF_TEMPLATES = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "Cohere2MoE": ("cohere_command3", "cohere_command3"),
    "GLM-4.7-Flash": ("glm45", "qwen3"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "LFM2.5-8B-A1B": ("lfm2", "qwen3"),
    "MiniMax-M2": ("minimax_m2", "qwen3"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron_json", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Reka-Edge": ("hermes", "qwen3"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "qwen3"),
    "google-gemma-4-31B-it": ("gemma4", "gemma4"),
    "inclusionai-ling-3.0-flash": ("glm45", "qwen3"),
    "meetkai-functionary-medium-v3.2": ("functionary", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "muse-glimmer": ("muse_glimmer", "muse_glimmer"),
    "poolside-Laguna-XS-2.1": ("glm45", "qwen3"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral_args", None),
}
GIVEN = {"city": 'Ulm "x" é\n  ', "days": [1, -2.5, {"a": None}], "b": {"c": "d'e"}, "exact": True, "n": 3}
TYPES = {"city": "string", "days": "array", "b": "object", "exact": "boolean", "n": "integer"}
OFFERED = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": properties}},
    }
    for properties in ({name: {"type": kind, "description": "d"} for name, kind in TYPES.items()},)
]
OFFERED.append(
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
)


def templated(name: str) -> Callable[..., str]:
    """Renders what follows the user's message."""
    source = shared("data", "chat_templates", f"{name}.jinja").read_text()
    template = ChatTemplate({"default": source}, {"bos_token": "<BOS>", "eos_token": "<EOS>"})

    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, begins: bool) -> str:
        return template.render(messages, tools, begins, {})

    render.source = source  # type: ignore[attr-defined]
    render.close = template.close  # type: ignore[attr-defined]
    return render


@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_what_real_templates_render_is_read_back(name: str) -> None:
    """One call, two calls, after reasoning; streamed in any pieces as whole. What a template itself refuses or leaves
    out is passed over."""
    render: Any = templated(name)
    try:
        formats, decisions = choose_formats(render.source, render=render)
        assert (formats.tools and formats.tools.name, formats.reasoning and formats.reasoning.name) == OF_TEMPLATES[
            name
        ]
        if formats.tools is None:
            return
        assert (
            "Kimi" in name or "reads back" in decisions[0].reason
        )  # that template calls list.append, which no sandbox lets it
        user = {"role": "user", "content": "Hi, you"}
        begun = render([user], OFFERED, True).rpartition("Hi, you")[2]
        for calls in ((("f", GIVEN),), (("f", GIVEN), ("get_weather", {}))):
            made = [
                {"id": f"abcdefgh{i}", "type": "function", "function": {"name": n, "arguments": a}}
                for i, (n, a) in enumerate(calls)
            ]
            said = {"role": "assistant", "content": "", "reasoning_content": "I muse.", "tool_calls": made}
            try:
                text = render([user, said], OFFERED, False).rpartition("Hi, you")[2]
            except InvalidRequest:
                continue
            check_read_back(formats, begun, text, list(calls))
    finally:
        render.close()


def check_read_back(formats: Formats, begun: str, text: str, calls: list[tuple[str, Any]]) -> None:
    answer = text[
        next((at for at, (one, other) in enumerate(zip(begun, text, strict=False)) if one != other), len(begun)) :
    ]
    reasoned = "I muse." in answer and formats.reasoning is not None
    if reasoned:
        assert formats.reasoning is not None
        answer = answer if formats.reasoning.channels is not None else answer[answer.index("I muse.") :]
        begun = begun if formats.reasoning.channels is not None else formats.reasoning.begin
    elif formats.tools is not None and not (formats.tools.bare or formats.tools.channels):
        answer, begun = text, ""
    functions = {"f": {name: (kind,) for name, kind in TYPES.items()}, "get_weather": {}}

    def parsed(step: int) -> tuple[list[Segment], str]:
        parser = answer_format(formats if reasoned else Formats(formats.tools, None), begun, functions).create_parser()
        assert parser is not None
        return parse(parser, [answer[at : at + step] for at in range(0, len(answer), step)])

    found, _ = parsed(len(answer))
    assert all(parsed(step)[0] == found for step in (1, 3, 7))
    names = [each.name for each in found if isinstance(each, ToolCallStart)]
    assert list(zip(names, map(json.loads, arguments(found).values()), strict=True)) == calls
    assert not reasoned or "".join(each.text for each in found if isinstance(each, Reasoning)) == "I muse."


# --- the trial

TEMPLATE = """{%% for m in messages %%}[{{ m.role }}] {{ m.content }}
{%%- for c in m.tool_calls or [] %%}%s{%% endfor %%}
{%% endfor %%}{%% if add_generation_prompt %%}[assistant] {%% endif %%}"""
RENDERED = {
    "longcat": '<longcat_tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</longcat_tool_call>',
    "olmo3": "<function_calls>{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }},{% endfor %})"
    "</function_calls>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{ c.function.name }}">'
    '{% for k, v in c.function.arguments.items() %}<steptml:parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
    "</steptml:parameter>{% endfor %}</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "internlm": '<|action_start|><|plugin|>{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}<|action_end|>',
    "none": "CALL {{ c.function.name }} WITH {{ c.function.arguments | tojson }}",
}


@pytest.mark.parametrize("name", RENDERED)
def test_the_format_is_the_one_that_reads_a_rendered_call_back(name: str) -> None:
    """However the signs may mislead: this template speaks of another's, too."""
    misleading = "{# <tool_call> arguments #}" if name != "none" else ""
    source = TEMPLATE.replace("%%", "%").replace("%s", RENDERED[name]) + misleading
    template = ChatTemplate({"default": source}, {})
    try:
        formats, decisions = choose_formats(
            source, render=lambda messages, tools, begins: template.render(messages, tools, begins, {})
        )
        named, told = choose_formats(
            source, "hermes", render=lambda messages, tools, begins: template.render(messages, tools, begins, {})
        )
    finally:
        template.close()
    assert (formats.tools.name if formats.tools is not None else "none") == name == decisions[0].value
    assert ("no known format reads" in decisions[0].reason) == (name == "none")
    assert named.tools is TOOL_FORMATS["hermes"] and "does not read back" in told[0].reason, (
        "who names one gets it, and is told"
    )


def test_a_guess_that_does_not_read_back_is_kept_and_told() -> None:
    source = TEMPLATE.replace("%%", "%").replace("%s", RENDERED["none"]) + "{# <tool_call> arguments #}"
    formats, decisions = choose_formats(source, render=lambda *_: "What is 6 times 7? CALL multiply WITH {}")
    assert (
        formats.tools is TOOL_FORMATS["hermes"]
        and "though a call that it renders does not read back" in decisions[0].reason
    )


def test_only_what_was_offered_is_called_where_nothing_else_is_allowed() -> None:
    text = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    for only, calls in ((False, 1), (True, 0)):
        parser = answer_format(Formats(TOOL_FORMATS["hermes"]), "", FUNCTIONS, only=only).create_parser()
        assert parser is not None
        found, _ = parse(parser, text)
        assert (len(arguments(found)), content(found)) == (calls, "" if calls else text)


def test_ids_are_the_models_own_where_it_writes_them_but_no_two_are_the_same() -> None:
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    ids = [each.id for each in make("kimi_k2").push(text) if isinstance(each, ToolCallStart)]
    assert ids == ["functions.f:3", "functions.f:1"]
    starts = [
        each
        for each in make("mistral_args").push("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}")
        if isinstance(each, ToolCallStart)
    ]
    assert starts[0].id == "abcdefghi"


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_that_is_cut_shows_no_half_markup(name: str) -> None:
    """Wherever max_tokens may have ended it: what was no whole call is not content either. Bare calls are told from
    answers by their name."""
    said = SAID.get(name, "" if TOOL_FORMATS[name].bare else "Let me see.\n\n")
    text = said + written(name)
    for cut in range(len(said) + 2, len(text)):
        parser = make(name)
        found = [*parser.push(text[:cut]), *parser.finish("length")]
        shown = content(found)
        assert shown == ("Let me see." if said else shown), (cut, shown)
        assert not said or not shown.removeprefix("Let me see.")


def test_a_name_that_two_formats_go_by_is_the_one_of_the_template() -> None:
    assert choose_formats("[TOOL_CALLS] [ARGS]", "mistral")[0].tools is TOOL_FORMATS["mistral_args"]
    assert choose_formats("[TOOL_CALLS]", "mistral")[0].tools is TOOL_FORMATS["mistral"]
    assert choose_formats("", "glm47", "step3p5")[0] == Formats(TOOL_FORMATS["glm45"], REASONING_FORMATS["qwen3"])
