"""A thousand damaged bodies for each POST route: never a 5xx, never a hang, always an error in the one shape that names
its field.

HEADRACE_MUTATIONS=10000 sends so many.
"""

from __future__ import annotations

import copy
import http.client
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.server.wire import MAX_DEPTH
from tests.support.serving import Server, send, serving

COUNT = int(os.environ.get("HEADRACE_MUTATIONS", "1000"))
ODD_NUMBERS: tuple[Any, ...] = (None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 + 1, 10**400, 1e-30, 1e308, -0.5)
ODD_TEXTS: tuple[Any, ...] = ("", "x", "1", "\x00", "\u2028", "é" * 2000, "auto", "none", "user")
ODD_LISTS: tuple[Any, ...] = (
    [],
    [[]],
    [None],
    [1, "a"],
    [True],
    ["x"] * 70,
    list(range(50)),
    [2**40],
    [-1],
    [{"role": "user"}],
)
ODD_OBJECTS: tuple[Any, ...] = ({}, {"type": "text"}, {"a": {"b": {"c": []}}}, {"5": 1})
ODD_VALUES = ODD_NUMBERS + ODD_TEXTS + ODD_LISTS + ODD_OBJECTS
RAW_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e400")
RAW_TEXTS = (b"\xff", b"\xed\xa0\x80", b'"\\ud800"', b"\x00", b"\xef\xbb\xbf", b"[" * 2000, b"}", b",,", b"'", b"//")

SAMPLING = {
    "n": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1007,
    "stop": ["zz"],
    "logit_bias": {"5": 1},
    "max_tokens": 2,
    "stream": False,
}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
CHAT = {
    **SAMPLING, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "tools": [FUNCTION], "tool_choice": "auto",
    "stream_options": None, "user": "u", "chat_template_kwargs": {"a": 1},
}  # fmt: skip
COMPLETION = {
    **SAMPLING,
    "prompt": "hello",
    "echo": False,
    "logprobs": 2,
    "prompt_logprobs": None,
    "stop_token_ids": [1],
    "bad_words": ["x"],
}
MESSAGES = {
    "model": "demo", "max_tokens": 2, "temperature": 0.5, "top_k": 5, "seed": 1007, "stop_sequences": ["zz"], "stream": False,
    "system": [{"type": "text", "text": "be"}], "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "metadata": {"user_id": "u"},
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]}]},
    ],
}  # fmt: skip
RESPONSES = {
    "model": "demo", "max_output_tokens": 2, "temperature": 0.5, "seed": 1007, "stop": ["zz"], "stream": False, "instructions": "be", "store": False,
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "tool_choice": "auto", "metadata": {"a": "b"},
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}],
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ],
}  # fmt: skip
COUNTED = ("messages", "system", "thinking", "tool_choice", "tools", "model")
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {name: MESSAGES[name] for name in COUNTED},
    "/v1/responses": RESPONSES,
    "/tokenize": {"prompt": "hello", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "skip_special_tokens": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--token-seconds", "0", "--max-model-len", "256") as running:
        yield running


def mutate(rng: random.Random, base: dict[str, Any]) -> bytes:
    """One to three changes to the value, or to its bytes."""
    value = copy.deepcopy(base)
    for _ in range(rng.randint(1, 3)):
        change_value(rng, value)
    body = json.dumps(value).encode()
    return change_bytes(rng, body) if rng.random() < 0.4 else body


def change_value(rng: random.Random, value: Any) -> None:
    """Somewhere inside: another value, one field less, or one more."""
    node = value
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.5:
            node = node[key]
            continue
        break
    if rng.random() < 0.75:
        node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif isinstance(node, dict):
        node.pop(key)
        if rng.random() < 0.5:
            node[rng.choice(("best_of", "response_format", "priority", "min_tokens", "xyz", "", "a" * 300))] = (
                copy.deepcopy(rng.choice(ODD_VALUES))
            )


def change_bytes(rng: random.Random, body: bytes) -> bytes:
    place = rng.randrange(len(body))
    kind = rng.randrange(5)
    if kind == 0:
        return body[:place]
    if kind == 1:
        return body[:place] + rng.choice(RAW_NUMBERS + RAW_TEXTS) + body[place:]
    if kind == 2:
        return body[:place] + bytes([rng.randrange(256)]) + body[place + 1 :]
    if kind == 3:
        return body[:-1] + b"," + body[1:]  # duplicate keys
    return body + rng.choice((b"x", b"{}", b"\n\n", b"\x00"))


@pytest.mark.timeout(60 + COUNT // 50)
@pytest.mark.parametrize("path", BASES)
def test_mutated_bodies(server: Server, path: str) -> None:
    rng = random.Random(path)
    connection = server.connect(timeout=5.0)
    statuses: dict[int, int] = {}
    for number in range(COUNT):
        body = mutate(rng, BASES[path])
        try:
            answer = send(connection, "POST", path, body)
        except (http.client.HTTPException, OSError) as error:
            raise AssertionError(f"no answer to body {number}: {body[:500]!r}") from error
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        if answer.status == 200:
            continue
        assert 400 <= answer.status < 500, (answer, body[:500])
        error_object = answer.error
        if answer.status == 400 and error_object["code"] != "invalid_json":
            assert isinstance(error_object["param"], str), (error_object, body[:500])
    for depth in (MAX_DEPTH, 10 * MAX_DEPTH):
        deep = json.dumps(BASES[path]).encode()[:-1] + b',"deep":' + b"[" * depth + b"]" * depth + b"}"
        assert "nests deeper" in send(connection, "POST", path, deep).error["message"]
    connection.close()
    assert statuses[400] > COUNT // 3 and statuses[200] > 20, statuses
    server.wait_idle()
    assert server.process.poll() is None and not any("Traceback" in line for line in server.lines)
