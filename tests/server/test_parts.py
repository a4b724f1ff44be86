"""Answers made of parts, from a real parser: streamed as whole for every cut of the text, with calls that a client can
read."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server.dialects.messages import MessageAnswer
from headrace.server.dialects.responses import ResponseAnswer
from headrace.server.parsing import answer_format
from headrace.server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, Formats
from headrace.server.parsing.parser import OutputParser
from headrace.server.wire import PromptState
from tests.support.segments import SHAPE, answered

TEXT = (
    '<think>first\u2028this</think>So: <tool_call>{"name": "f", "arguments": {"a": [1, "é😀"]}}</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


def parser() -> OutputParser | None:
    return answer_format(
        Formats(TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"]), "", {"f": {}, "g": {}}
    ).create_parser()


def message() -> MessageAnswer:
    return MessageAnswer(SHAPE, PromptState([1, 2]), parser(), ())


def response() -> ResponseAnswer:
    return ResponseAnswer(SHAPE, PromptState([1, 2]), parser(), {})


def content(parts: list[dict[str, Any]]) -> list[Any]:
    """What parts hold, whatever they are named."""
    names = ("type", "text", "thinking", "name", "input", "arguments", "content", "status")
    return [{name: part[name] for name in names if name in part} for part in parts]


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client of messages adds up."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for name, value in event["delta"].items():
                if name != "type":
                    key = {"partial_json": "json"}.get(name, name)
                    blocks[event["index"]][key] += value
        elif event["type"] == "content_block_stop" and blocks[event["index"]]["type"] == "tool_use":
            block = blocks[event["index"]]
            block["input"] = read(block["json"])
    return blocks


def read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, len(TEXT)), max_size=12), st.integers(0, len(TEXT)), st.sampled_from(["stop", "length"]))
def test_cuts_change_nothing(cuts: list[int], end: int, reason: str) -> None:
    """Wherever the text is cut into pieces, and wherever it ends."""
    text = TEXT[:end]
    edges = [0, *sorted(min(cut, end) for cut in cuts), end]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    whole = answered(message(), text, streamed=False, reason=reason)
    events = answered(message(), *pieces, streamed=True, reason=reason)
    assert (
        content(folded(events)) == content(whole["content"])
        and events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    )
    whole = answered(response(), text, streamed=False, reason=reason)
    events = answered(response(), *pieces, streamed=True, reason=reason)
    last = events[-1]["response"]
    assert content(last["output"]) == content(whole["output"]) and last["status"] == whole["status"]
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    shown = [
        item.get("arguments") or "".join(part["text"] for part in item.get("content", ())) for item in last["output"]
    ]
    assert [deltas.get(index, "") for index in range(len(shown))] == shown


@pytest.mark.parametrize("make", [message, response])
def test_the_whole_text_is_taken_apart(make: Any) -> None:
    whole = answered(make(), TEXT, streamed=False, reason="stop")
    parts = whole.get("content") or whole["output"]
    assert [part["type"] for part in parts] in (
        ["thinking", "text", "tool_use", "tool_use"],
        ["reasoning", "message", "function_call", "function_call"],
    )
    first, second = parts[2], parts[3]
    assert read(first["arguments"]) if "arguments" in first else first["input"] == {"a": [1, "é😀"]}
    assert (first["name"], second["name"]) == ("f", "g") and first["id"] != second["id"]
    assert whole.get("stop_reason") == "tool_use" or whole["status"] == "completed"
