"""LiteLLM against the real server, as a provider of OpenAI's API and of Anthropic's: gateways put it before servers
like this one."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from tests.clients.questions import ABSENT, SCRIPTED
from tests.support.serving import Server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices when it is imported
litellm: Any = pytest.importorskip("litellm", reason=ABSENT)
pytest.importorskip("mcp", reason=ABSENT)

ASK = [{"role": "user", "content": "What does a mill do?"}]
CALL = '<tool_call>\n{"name": "grind", "arguments": {"size": 3}}\n</tool_call>'
SIZE = {
    "type": "object",
    "properties": {"size": {"type": "integer"}},
    "required": ["size"],
    "additionalProperties": False,
}
GRIND = {"type": "function", "function": {"name": "grind", "description": "Grinds.", "parameters": SIZE}}
FORCED = {"tools": [GRIND], "tool_choice": {"type": "function", "function": {"name": "grind"}}, "max_tokens": 60}


def options(server: Server, provider: str = "openai", **fields: Any) -> dict[str, Any]:
    base = server.url if provider == "anthropic" else f"{server.url}/v1"
    asked = {
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 12,
        "num_retries": 0,
        "max_retries": 0,
        "timeout": 30,
        **fields,
    }
    return {"model": f"{provider}/{asked.pop('model', 'demo')}", "api_base": base, "api_key": "unused", **asked}


def ask(server: Server, provider: str = "openai", **fields: Any) -> Any:
    return litellm.completion(**options(server, provider, **fields))


def streamed(server: Server, provider: str = "openai", **fields: Any) -> Any:
    """What its own builder makes of the chunks."""
    chunks = list(ask(server, provider, stream=True, stream_options={"include_usage": True}, **fields))
    return litellm.stream_chunk_builder(chunks, messages=ASK)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_chat_whole_and_streamed_is_one_answer(demo: Server, provider: str) -> None:
    whole, built = ask(demo, provider), streamed(demo, provider)
    assert whole.choices[0].message.content == built.choices[0].message.content == ask(demo).choices[0].message.content
    assert whole.choices[0].finish_reason == built.choices[0].finish_reason == "length"
    assert (
        whole.usage.completion_tokens == built.usage.completion_tokens == 12
        and whole.usage.prompt_tokens == built.usage.prompt_tokens
    )


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_forced_tool_is_called_whole_and_streamed(demo: Server, provider: str) -> None:
    calls = [
        answer.choices[0].message.tool_calls[0].function
        for answer in (ask(demo, provider, **FORCED), streamed(demo, provider, **FORCED))
    ]
    assert {call.name for call in calls} == {"grind"} and len({call.arguments for call in calls}) == 1
    assert isinstance(json.loads(calls[0].arguments)["size"], int)


def test_a_call_and_reasoning_of_the_models_own(scripted: Server) -> None:
    asked = [{"role": "user", "content": f"⟦<think>hm</think>Let me see. {CALL}⟧"}]
    fields = {"messages": asked, "tools": [GRIND], "max_tokens": 200, "seed": SCRIPTED}
    for answer in (ask(scripted, **fields), streamed(scripted, **fields)):
        choice = answer.choices[0]
        assert (
            choice.message.content == "Let me see."
            and choice.message.reasoning_content == "hm"
            and choice.finish_reason == "tool_calls"
        )
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"size": 3}


def test_structured_output_stop_and_logprobs(demo: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "mill", "schema": SIZE, "strict": True}}
    assert isinstance(
        json.loads(ask(demo, response_format=form, max_tokens=60).choices[0].message.content)["size"], int
    )
    text = ask(demo, max_tokens=24).choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    assert ask(demo, max_tokens=24, stop=[stop]).choices[0].message.content == text[: text.index(stop)]
    scored = ask(demo, logprobs=True, top_logprobs=2, max_tokens=3).choices[0].logprobs.content
    assert len(scored) == 3 and all(len(entry["top_logprobs"]) == 2 for entry in scored)


def test_text_completions_and_responses(demo: Server) -> None:
    fields = {
        "model": "text-completion-openai/demo",
        "api_base": f"{demo.url}/v1",
        "api_key": "unused",
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = litellm.text_completion(prompt="Once upon a time", **fields).choices[0].text
    chunks = litellm.text_completion(prompt="Once upon a time", stream=True, **fields)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices) == whole and whole
    asked = {"model": "openai/demo", "api_base": f"{demo.url}/v1", "api_key": "unused"}
    response = litellm.responses(input=ASK[0]["content"], max_output_tokens=20, temperature=0, **asked)
    assert response.output[0].content[0].text == ask(demo, max_tokens=20).choices[0].message.content


def test_asynchronously(demo: Server) -> None:
    async def go() -> str:
        stream = await litellm.acompletion(**options(demo, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(go()) == ask(demo).choices[0].message.content


def test_errors_are_what_gateways_route_by(demo: Server) -> None:
    long = [{"role": "user", "content": "mill " * 5000}]
    for provider in ("openai", "anthropic"):
        for stream in (False, True):
            with pytest.raises(litellm.ContextWindowExceededError):
                list(ask(demo, provider, messages=long, stream=stream))
        with pytest.raises(litellm.NotFoundError):
            ask(demo, provider, model="gpt-4")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(demo, temperature=1000)
    with pytest.raises(litellm.NotFoundError, match="embeddings"):
        litellm.embedding(model="openai/demo", input=["x"], api_base=f"{demo.url}/v1", api_key="unused", max_retries=0)


def test_a_stream_that_is_left_frees_the_engine(demo: Server) -> None:
    stream = ask(demo, stream=True, max_tokens=1000, extra_body={"ignore_eos": True})
    assert next(iter(stream)) is not None
    stream.completion_stream.response.close()
    demo.wait_idle()
