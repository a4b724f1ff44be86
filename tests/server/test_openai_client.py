"""The real OpenAI client against the real server and the bundled model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from tests.support.serving import Server

IGNORE_EOS = {"ignore_eos": True}
ASK: Any = [{"role": "user", "content": "What does a mill do?"}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "org/demo"]
    assert client.models.retrieve("org/demo").id == "org/demo"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_chat_streamed_and_whole_are_the_same_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text and text
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason in ("stop", "length")
    assert whole.system_fingerprint and whole.system_fingerprint == chunks[0].system_fingerprint
    assert whole.model == "demo" and whole.id.startswith("chatcmpl-")


def test_usage_counts_tokens_and_says_what_was_cached(client: openai.OpenAI) -> None:
    words = "the river turns the wheel and the wheel turns the stone " * 5
    asked: Any = {
        "model": "demo",
        "prompt": words,
        "max_tokens": 5,
        "temperature": 0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    ids = first.choices[0].model_extra or {}
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (
        (first.usage.prompt_tokens, first.usage.completion_tokens)
        == (len(ids["prompt_token_ids"]), len(ids["token_ids"]))
        == (len(ids["prompt_token_ids"]), 5)
    )
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 32
    assert second.choices[0].text == first.choices[0].text


def test_logprobs_agree_between_the_apis(client: openai.OpenAI, demo: Server) -> None:
    chat = client.chat.completions.create(
        model="demo", messages=ASK, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content and all(entry.top_logprobs[0].token == entry.token and entry.logprob <= 0 for entry in content)
    assert "".join(entry.token for entry in content).startswith((chat.choices[0].message.content or "")[:3])
    prompt = demo.ask("POST", "/tokenize", {"messages": ASK}).json["tokens"]
    text = client.completions.create(model="demo", prompt=prompt, max_tokens=4, temperature=0, logprobs=2, echo=True)
    scores = text.choices[0].logprobs
    assert scores is not None and scores.tokens is not None and scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None and len(scores.tokens) == len(prompt) + len(content)
    for ours, theirs in zip(scores.token_logprobs[len(prompt) :], content, strict=True):
        assert ours == pytest.approx(theirs.logprob, abs=0.05)


def test_n_answers_and_seeds(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": ASK, "max_tokens": 8, "temperature": 1.0, "n": 3, "seed": 7}
    first, second = client.chat.completions.create(**asked), client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert texts == [choice.message.content for choice in second.choices]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_stop_strings_cut_the_answer_and_are_named(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    cut = client.completions.create(**asked, stop=[stop, "never to be seen"]).choices[0]
    assert (
        cut.text == whole[: whole.index(stop)]
        and cut.finish_reason == "stop"
        and (cut.model_extra or {})["stop_reason"] == stop
    )
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stop=stop, stream=True))
    assert streamed == cut.text
    kept = (
        client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0].text
    )
    assert kept == cut.text + stop


def test_prompts_in_every_form(client: openai.OpenAI, demo: Server) -> None:
    ids = demo.ask("POST", "/tokenize", {"prompt": "Once upon"}).json["tokens"]
    asked: Any = {"model": "demo", "max_tokens": 4, "temperature": 0}
    alone = client.completions.create(**asked, prompt="Once upon").choices[0].text
    assert client.completions.create(**asked, prompt=ids).choices[0].text == alone
    both = client.completions.create(**asked, prompt=[ids, ids]).choices
    assert [choice.text for choice in both] == [alone, alone]
    assert demo.ask("POST", "/detokenize", {"tokens": ids, "skip_special_tokens": True}).json == {"prompt": "Once upon"}


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"temperature": 1000}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens"),
        ({"logit_bias": {"1000000": 1}}, openai.BadRequestError, "logit_bias"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, openai.BadRequestError, "structured_outputs"),
        ({"extra_body": {"stop_token_ids": [1 << 30]}}, openai.BadRequestError, "stop_token_ids"),
        ({"extra_body": {"priority": 5}}, openai.BadRequestError, "priority"),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, openai.BadRequestError, "messages"),
        (
            {"messages": [{"role": "user", "content": "long " * 2000}], "stream": True},
            openai.BadRequestError,
            "messages",
        ),
    ],
)
def test_errors_are_those_of_the_client(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "demo", "messages": ASK, **fields})
    assert caught.value.param == param
    if param == "messages":
        assert (
            caught.value.code == "context_length_exceeded"
            and "maximum context length is 1200 tokens" in caught.value.message
        )


def test_request_ids_are_seen_by_the_client(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=ASK, max_tokens=1, extra_headers={"X-Request-Id": "abc-1"}
    )
    assert raw.headers["x-request-id"] == "abc-1" == raw.parse()._request_id


def test_leaving_a_stream_frees_its_blocks(client: openai.OpenAI, demo: Server) -> None:
    for _ in range(2):
        stream = client.chat.completions.create(
            model="demo", messages=ASK, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        demo.wait_idle()
    usage = [
        line
        for line in demo.ask("GET", "/metrics").body.decode().splitlines()
        if line.startswith("vllm:kv_cache_usage_perc")
    ]
    assert float(usage[0].split()[-1]) == 0.0


def test_many_at_once_answer_as_alone(demo: Server) -> None:
    prompts = [f"{word} and then" for word in ("Ox", "Oak", "Wind", "Water", "Stones", "The wheel")]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:

            async def ask(prompt: str) -> str:
                options: Any = {"seed": len(prompt), "stream": True, "extra_body": IGNORE_EOS}
                stream = await client.completions.create(model="demo", prompt=prompt, max_tokens=8, **options)
                return "".join([chunk.choices[0].text async for chunk in stream])

            together = await asyncio.gather(*map(ask, prompts))
            alone = [await ask(prompt) for prompt in prompts]
            assert (
                sum(a == b for a, b in zip(together, alone, strict=True)) >= len(prompts) - 1
            )  # bf16: a batch may round one near tie otherwise
            return alone

    assert len(set(asyncio.run(ask_all()))) > 2


def test_tools_reach_the_template(demo: Server) -> None:
    tool = {
        "type": "function",
        "function": {"name": "grind", "description": "grinds", "parameters": {"type": "object", "properties": {}}},
    }
    plain = demo.ask("POST", "/tokenize", {"messages": ASK}).json["count"]
    assert demo.ask("POST", "/tokenize", {"messages": ASK, "tools": [tool]}).json["count"] >= plain
    answer = demo.ask(
        "POST",
        "/v1/chat/completions",
        {"messages": ASK, "tools": [tool], "max_tokens": 2, "parallel_tool_calls": False},
    )
    assert answer.status == 200 and answer.json["choices"][0]["finish_reason"] in ("stop", "length")


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


@pytest.mark.parametrize(
    "choice",
    ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}],
    ids=["auto", "required", "named"],
)
def test_the_bundled_model_calls_a_tool(client: openai.OpenAI, choice: Any) -> None:
    """``auto`` in its own words, which it was taught; the others under a grammar."""
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "max_tokens": 80,
        "temperature": 0,
    }
    given: Any = {**asked, "tools": [WEATHER], "tool_choice": choice}
    whole = client.chat.completions.create(**given).choices[0]
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather" and whole.message.content is None
    assert isinstance(json.loads(call.function.arguments)["city"], str) and whole.finish_reason == "tool_calls"
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    pieces = [
        each.function.arguments or ""
        for chunk in chunks
        for each in chunk.delta.tool_calls or []
        if each.function is not None
    ]
    assert "".join(pieces) == call.function.arguments and len(pieces) > 2 and chunks[-1].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    told = client.chat.completions.create(
        **{**asked, "messages": [*asked["messages"], whole.message.model_dump(), result], "tools": [WEATHER]}
    )
    assert told.usage is not None and told.usage.prompt_tokens > 0


def test_a_schema_that_cannot_force_a_call_is_refused_by_name(demo: Server) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}}},
    }
    answer = demo.ask(
        "POST", "/v1/chat/completions", {"messages": ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 2}
    )
    assert answer.status == 400 and answer.error["param"] == "tools[0].function.parameters"
    given = {
        "messages": ASK,
        "tools": [WEATHER],
        "tool_choice": "required",
        "structured_outputs": {"json_object": True},
    }
    answer = demo.ask("POST", "/v1/chat/completions", given)
    assert answer.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather", (
        "a call is no answer in a form"
    )


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [("lark", 'start: "SELECT " ("a" | "b")', "SELECT [ab]"), ("regex", "[0-9]{3}", "[0-9]{3}"), ("", "", None)],
)
def test_a_custom_tool_that_is_chosen_is_held_to_its_grammar(
    demo: Server, syntax: str, definition: str, pattern: str | None
) -> None:
    format = (
        {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}} if syntax else {"type": "text"}
    )
    tools = [{"type": "custom", "custom": {"name": "query", "format": format}}, WEATHER]
    chosen = {"type": "custom", "custom": {"name": "query"}}
    body = {"messages": ASK, "tools": tools, "tool_choice": chosen, "max_tokens": 60, "temperature": 0}
    choice = demo.ask("POST", "/v1/chat/completions", body).json["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["custom"]["name"] == "query" and (pattern is None or re.fullmatch(pattern, call["custom"]["input"]))
    assert pattern is None or (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    if syntax == "regex":
        bad = {
            **tools[0],
            "custom": {
                "name": "query",
                "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}},
            },
        }
        answer = demo.ask("POST", "/v1/chat/completions", {**body, "tools": [WEATHER, bad]})
        assert (answer.status, answer.error["param"]) == (400, "tools[1].custom.format")
    answer = demo.ask("POST", "/v1/chat/completions", {**body, "tool_choice": "required", "max_tokens": 2})
    assert answer.status == (400 if syntax == "lark" else 200) and (
        answer.status == 200 or answer.error["param"] == "tool_choice"
    )


def test_tools_beside_a_format_of_the_answer(client: openai.OpenAI) -> None:
    """A call where the model wants one, and an answer in the format where it does not."""
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "maxLength": 12}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    format: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: Any = {"model": "demo", "max_tokens": 80, "temperature": 0, "tools": [WEATHER], "response_format": format}
    asking: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = client.chat.completions.create(**asked, messages=asking).choices[0]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and "city" in json.loads(call.function.arguments) and choice.message.content is None
    telling: Any = [{"role": "user", "content": "Tell me a story."}]
    choice = client.chat.completions.create(**asked, messages=telling).choices[0]
    assert choice.message.tool_calls or set(json.loads(choice.message.content or "")) == {"answer"}


def test_every_response_is_json_for_strict_readers(demo: Server) -> None:
    answer = demo.ask(
        "POST", "/v1/completions", {"prompt": "x", "max_tokens": 2, "logprobs": 20, "prompt_logprobs": 20}
    )
    json.loads(answer.body, parse_constant=lambda name: pytest.fail(name))
    assert len(answer.json["choices"][0]["prompt_logprobs"][1]) >= 20


def test_every_score_of_a_long_prompt_arrives(demo: Server) -> None:
    """More in one step than a reader may fall behind: a long prompt is no slow reader."""
    answer = demo.ask(
        "POST", "/v1/completions", {"prompt": [5000] * 1100, "max_tokens": 1, "prompt_logprobs": 20}, timeout=60
    )
    assert answer.status == 200 and len(answer.json["choices"][0]["prompt_logprobs"]) == 1100
