"""LangChain against the real server: its OpenAI and its Anthropic side. What it makes of the wire is what an
application sees."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.questions import ABSENT, SCRIPTED
from tests.support.serving import Server

lc_openai: Any = pytest.importorskip("langchain_openai", reason=ABSENT)
lc_anthropic: Any = pytest.importorskip("langchain_anthropic", reason=ABSENT)
openai: Any = pytest.importorskip("openai")

ASK = "What does a mill do?"
CALL = '<tool_call>\n{"name": "grind", "arguments": {"size": 3}}\n</tool_call>'
SIZE = {
    "title": "Mill",
    "type": "object",
    "properties": {"size": {"type": "integer"}},
    "required": ["size"],
    "additionalProperties": False,
}
GRIND = {
    "type": "function",
    "function": {"name": "grind", "description": "Grinds.", "parameters": {**SIZE, "title": "grind"}},
}


def chat(server: Server, **fields: Any) -> Any:
    options = {"model": "demo", "temperature": 0, "max_tokens": 12, "max_retries": 0, "timeout": 30, **fields}
    return lc_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="unused", **options)


def claude(server: Server, **fields: Any) -> Any:
    options = {"model": "demo", "max_tokens": 12, "max_retries": 0, "timeout": 30, **fields}
    return lc_anthropic.ChatAnthropic(base_url=server.url, api_key="unused", **options)


def test_a_chat_whole_and_streamed_is_one_answer(demo: Server) -> None:
    model = chat(demo, stream_usage=True)
    asked = "The river turns the wheel and the wheel turns the stone. " + ASK
    whole, chunks = model.invoke(asked), list(model.stream(asked))
    added = sum(chunks[1:], chunks[0])
    assert whole.content == added.content and whole.content
    assert whole.usage_metadata["output_tokens"] == added.usage_metadata["output_tokens"] == 12
    assert added.usage_metadata["input_token_details"]["cache_read"] > 0
    assert whole.response_metadata["finish_reason"] == added.response_metadata["finish_reason"] == "length"
    assert len(chunks) > 4 and "model_name" in whole.response_metadata


def test_asynchronously_and_many_at_once(demo: Server) -> None:
    async def ask() -> list[str]:
        model = chat(demo)
        one = "".join([chunk.content async for chunk in model.astream(ASK)])
        return [one, *(message.content for message in await model.abatch([ASK] * 4))]

    assert len(set(asyncio.run(ask()))) == 1


def test_stop_logprobs_and_extra_fields(demo: Server) -> None:
    text = chat(demo, max_tokens=24).invoke(ASK).content
    stop = text[len(text) // 2 :][:4]
    cut = chat(demo, max_tokens=24, stop=[stop]).invoke(ASK)
    assert cut.content == text[: text.index(stop)] and cut.response_metadata["finish_reason"] == "stop"
    scored = chat(demo, logprobs=True, top_logprobs=2, max_tokens=3).invoke(ASK)
    content = scored.response_metadata["logprobs"]["content"]
    assert len(content) == 3 and all(len(entry["top_logprobs"]) == 2 for entry in content)
    longer = chat(demo, extra_body={"min_tokens": 12, "ignore_eos": True, "top_k": 1}).invoke(ASK)
    assert longer.usage_metadata["output_tokens"] == 12


def test_a_forced_tool_is_called_whole_and_streamed(demo: Server) -> None:
    model = chat(demo, max_tokens=60).bind_tools([GRIND], tool_choice="grind")
    whole = model.invoke(ASK)
    chunks = list(model.stream(ASK))
    added = sum(chunks[1:], chunks[0])
    assert [call["name"] for call in whole.tool_calls] == ["grind"] and isinstance(
        whole.tool_calls[0]["args"]["size"], int
    )
    assert [(call["name"], call["args"]) for call in added.tool_calls] == [
        (call["name"], call["args"]) for call in whole.tool_calls
    ]


def test_a_call_of_the_models_own_goes_round(scripted: Server) -> None:
    model = chat(scripted, seed=SCRIPTED, max_tokens=200).bind_tools([GRIND])
    asked = f"⟦Let me see. {CALL}⟧"
    chunks = list(model.stream(asked))
    for message in (model.invoke(asked), sum(chunks[1:], chunks[0])):
        assert message.content == "Let me see." and message.tool_calls[0]["args"] == {"size": 3}
        assert message.response_metadata["finish_reason"] == "tool_calls"
    from langchain_core.messages import HumanMessage, ToolMessage

    called = model.invoke(f"⟦{CALL}⟧")
    result = ToolMessage("flour", tool_call_id=called.tool_calls[0]["id"])
    assert model.invoke([HumanMessage("Grind."), called, result, HumanMessage("⟦Done.⟧")]).content == "Done."


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(demo: Server, method: str) -> None:
    made = chat(demo, max_tokens=60).with_structured_output(SIZE, method=method, strict=True).invoke(ASK)
    assert isinstance(made["size"], int)


def test_the_responses_api(demo: Server) -> None:
    model = chat(demo, use_responses_api=True, store=False)
    chunks = list(model.stream(ASK))
    whole = model.invoke(ASK)
    assert whole.text == sum(chunks[1:], chunks[0]).text == chat(demo).invoke(ASK).content
    assert whole.usage_metadata["output_tokens"] == 12


def test_errors_are_what_clients_know_them_by(demo: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(demo, temperature=1000).invoke(ASK)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        list(chat(demo).stream("mill " * 5000))
    assert caught.value.code == "context_length_exceeded" and "maximum context length is" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        chat(demo, model="gpt-4").invoke(ASK)
    with pytest.raises(openai.NotFoundError, match="embeddings"):
        lc_openai.OpenAIEmbeddings(
            model="demo", base_url=f"{demo.url}/v1", api_key="unused", max_retries=0, check_embedding_ctx_length=False
        ).embed_query("x")


def test_a_stream_that_is_left_frees_the_engine(demo: Server) -> None:
    stream = chat(demo, max_tokens=1000, extra_body={"ignore_eos": True}).stream(ASK)
    assert next(iter(stream)) is not None
    stream.close()
    demo.wait_idle()


# --- Anthropic's side


def test_a_message_whole_and_streamed_is_the_chats_answer(demo: Server) -> None:
    model = claude(demo, model_kwargs={"extra_body": {"temperature": 0}})
    whole, chunks = model.invoke(ASK), list(model.stream(ASK))
    added = sum(chunks[1:], chunks[0])
    assert whole.text == added.text == chat(demo).invoke(ASK).content
    assert whole.usage_metadata["output_tokens"] == added.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["stop_reason"] == added.response_metadata["stop_reason"] == "max_tokens"


def test_a_forced_tool_use(demo: Server) -> None:
    model = claude(demo, max_tokens=60, model_kwargs={"extra_body": {"temperature": 0}}).bind_tools(
        [GRIND], tool_choice="grind"
    )
    whole, chunks = model.invoke(ASK), list(model.stream(ASK))
    added = sum(chunks[1:], chunks[0])
    assert whole.tool_calls[0]["name"] == "grind" and whole.tool_calls[0]["args"] == added.tool_calls[0]["args"]
    assert isinstance(whole.tool_calls[0]["args"]["size"], int)


def test_errors_of_messages(demo: Server) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is"):
        claude(demo).invoke("mill " * 5000)
    with pytest.raises(anthropic.NotFoundError):
        claude(demo, model="claude-4").invoke(ASK)
