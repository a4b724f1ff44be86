"""Structured output over HTTP: the real client against a real server with the demo model."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.outside import shared
from tests.support.serving import SERVE, Answer, Server, serving

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
ASK = [{"role": "user", "content": "Who?"}]
WHOLE = bool(os.environ.get("HEADRACE_ALL_SCHEMAS"))  # every schema of the benchmark, at length: minutes


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": client.models.list().data[0].id, "messages": ASK, "max_tokens": 120, "seed": 3, **fields}
    )


def test_a_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = chat(client, response_format=FORMAT).choices[0]
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    chunks = list(chat(client, response_format=FORMAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.message.content
    assert (whole.finish_reason, chunks[-1].choices[0].finish_reason) == ("stop", "stop")


def test_every_kind_on_both_routes(client: openai.OpenAI) -> None:
    assert isinstance(
        json.loads(chat(client, response_format={"type": "json_object"}, max_tokens=300).choices[0].message.content),
        dict,
    )
    for wanted, pattern in (
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" | "y"'}, "x|y"),
    ):
        fields = {"structured_outputs": wanted}
        answer = client.completions.create(
            model=client.models.list().data[0].id, prompt="Say", n=2, extra_body=fields, logprobs=1
        )
        for text in (
            chat(client, extra_body=fields).choices[0].message.content,
            *(choice.text for choice in answer.choices),
        ):
            assert re.fullmatch(pattern, text)


GOOD = {"type": "object", "properties": {"a": {"type": "string"}}}
BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}


@pytest.mark.parametrize(
    ("path", "place", "tool"),
    [
        (
            "/v1/chat/completions",
            "function.parameters",
            lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
        ),
        ("/v1/responses", "parameters", lambda name, schema: {"type": "function", "name": name, "parameters": schema}),
        ("/v1/messages", "input_schema", lambda name, schema: {"name": name, "input_schema": schema}),
    ],
)
def test_a_tool_whose_schema_cannot_be_followed_is_named(demo: Server, path: str, place: str, tool: Any) -> None:
    """By what its route calls the schema, and in words about the schema: the client has not written any grammar."""
    choice: Any = {"type": "any"} if "messages" in path else "required"
    body = {"tools": [tool("f", GOOD), tool("g", GOOD), tool("h", BAD)], "tool_choice": choice}
    body |= {"input" if "responses" in path else "messages": ASK} | ({"max_tokens": 9} if "messages" in path else {})
    answer = demo.ask("POST", path, body)
    where = f"tools[2].{place}"
    assert answer.status == 400 and answer.json["error"]["message"].startswith(f"{where} cannot be followed: "), (
        answer.json
    )
    assert "grammar" not in answer.json["error"]["message"] and "look-around" in answer.json["error"]["message"]
    assert "messages" in path or answer.error["param"] == where


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"response_format": {"type": 5}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"rejex": "a"}}, "structured_outputs.rejex"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_a_400_that_names_its_field(
    demo: Server, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = demo.ask("POST", "/v1/chat/completions", {"messages": ASK, "stream": stream, **fields})
    assert answer.status == 400 and answer.error["param"] == param, answer


def test_bombs_hold_up_nobody(demo: Server, client: openai.OpenAI) -> None:
    bomb = {
        "structured_outputs": {"choice": [f"v{index}" for index in range(40_000)]},
        "messages": ASK,
        "max_tokens": 4,
    }
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(demo.ask("POST", "/v1/chat/completions", bomb).status))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert chat(client, max_tokens=5).choices[0].finish_reason in ("stop", "length")
    for thread in threads:
        thread.join()
    assert set(answers) <= {200, 400}
    text = demo.ask("GET", "/metrics").body.decode()
    masks, seconds = (_metric(text, name) for name in ("masks_total", "mask_seconds_total"))
    assert masks > 10 and 0 < seconds / masks < 0.05


def _metric(text: str, name: str) -> float:
    found = re.search(rf"headrace_structured_output_{name}{{[^}}]*}} (\S+)", text)
    assert found is not None
    return float(found[1])


# --- tokens that do not write everything


def _ascii_tokenizer(folder: Path) -> str:
    """The demo model's tokenizer without the tokens of any byte above 127."""
    source = files("headrace").joinpath("data/demo")
    found = json.loads(source.joinpath("tokenizer.json").read_text(encoding="utf-8"))
    plain = {
        token: number
        for token, number in found["model"]["vocab"].items()
        if all(ord(c) < 128 or 256 <= ord(c) <= 289 for c in token)
    }
    found["model"]["merges"] = [pair for pair in found["model"]["merges"] if {*pair, "".join(pair)} <= plain.keys()]
    found["model"]["vocab"] = plain
    folder.joinpath("tokenizer.json").write_text(json.dumps(found), encoding="utf-8")
    folder.joinpath("tokenizer_config.json").write_text(source.joinpath("tokenizer_config.json").read_text())
    return str(folder)


def test_what_the_models_tokens_cannot_write_is_a_400_and_hurts_nobody(tmp_path: Path) -> None:
    flags = (
        "--executor",
        "keyed-hash",
        "--device-time",
        "0.005",
        "--max-model-len",
        "600",
        "--tokenizer",
        _ascii_tokenizer(tmp_path),
    )
    with serving(*flags, command=SERVE) as server, ThreadPoolExecutor(2) as threads:
        longer = threads.submit(
            server.ask, "POST", "/v1/completions", {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
        )
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["abc\u2603"]}}}
        regexes = [{"structured_outputs": {"regex": pattern}} for pattern in ("[\u2603\u00e9]", "ab\u2603")]
        for wanted in (*regexes, {"response_format": schema}):
            answer = server.ask("POST", "/v1/chat/completions", {"messages": ASK, **wanted})
            assert (answer.status, [answer.error["param"]], answer.error["type"]) == (
                400,
                [*wanted],
                "invalid_request_error",
            ), answer
            assert "cannot be followed with this model's tokens" in answer.error["message"]
        streamed = server.ask(
            "POST", "/v1/completions", {"prompt": "Once", "stream": True, "structured_outputs": {"regex": "ab\u2603"}}
        )
        assert (streamed.status, streamed.error["type"]) == (400, "invalid_request_error")  # before any of it is sent
        assert (
            server.ask("POST", "/v1/completions", {"prompt": "Say", "structured_outputs": {"regex": "a|b"}}).status
            == 200
        )
        assert longer.result().status == 200
        assert b'finished_reason="refused"' in server.ask("GET", "/metrics").body


# --- a benchmark's schemas


@pytest.mark.timeout(3600 if WHOLE else 60)
def test_what_is_written_under_a_benchmarks_schemas_validates(demo: Server) -> None:
    """A schema is refused with its reason or kept to: an answer that ends by itself is an instance."""
    with gzip.open(shared("data", "json_schemas", "maskbench_sample.jsonl.gz"), "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines][:: 1 if WHOLE else 64]

    def ask(case: Any) -> Answer:
        body = {
            "prompt": "Write JSON:",
            "max_tokens": 400 if WHOLE else 80,
            "seed": 7,
            "structured_outputs": {"json": case["schema"]},
        }
        return demo.ask("POST", "/v1/completions", body, timeout=600)

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(ask, cases))
    refused = [answer for answer in answers if answer.status != 200]
    assert (
        all(answer.status == 400 and answer.error["param"] == "structured_outputs" for answer in refused)
        and len(refused) < len(cases) // 4
    )
    ended = invalid = 0
    for case, answer in zip(cases, answers, strict=True):
        choice = answer.json["choices"][0] if answer.status == 200 else {"finish_reason": None}
        if choice["finish_reason"] == "stop":
            ended += 1
            if not _is_instance(choice["text"], case["schema"]):
                invalid += 1
                print(f"{case['id']}: {choice['text'][:300]!r}")
    print(f"{len(cases)} schemas: {len(refused)} refused, {ended} answers ended, {invalid} of them are no instances")
    assert not invalid and ended > len(cases) // 4


def _is_instance(text: str, schema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(error)
        return False
    return True
