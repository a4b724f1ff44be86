"""LlamaIndex: chats, agents that call functions or reason in text, objects, streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

openai_like: Any = pytest.importorskip("llama_index.llms.openai_like", reason=q.ABSENT)
workflow: Any = pytest.importorskip("llama_index.core.agent.workflow", reason=q.ABSENT)
core_llms: Any = pytest.importorskip("llama_index.core.llms", reason=q.ABSENT)
core_tools: Any = pytest.importorskip("llama_index.core.tools", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)


class Person(pydantic.BaseModel):  # type: ignore[misc]
    """A person"""

    name: str
    age: int


def get_weather(city: str) -> str:
    """Get the current weather for a city"""
    return json.dumps(q.report(city))


def model(server: Server, **fields: Any) -> Any:
    options = {
        "temperature": 0,
        "context_window": 4096,
        "is_chat_model": True,
        "is_function_calling_model": True,
        "max_retries": 0,
        **fields,
    }
    return openai_like.OpenAILike(model="demo", api_base=f"{server.url}/v1", api_key="none", **options)


def said(text: str) -> list[Any]:
    return [core_llms.ChatMessage(role="user", content=text)]


def test_a_chat_whole_and_streamed_is_one_answer(demo: Server) -> None:
    llm = model(demo)
    pieces = list(llm.stream_chat(said(q.CAPITAL)))
    assert llm.chat(said(q.CAPITAL)).message.content == pieces[-1].message.content == q.PARIS and len(pieces) > 4
    assert "".join(piece.delta or "" for piece in pieces) == q.PARIS


def test_a_completion_whole_and_streamed(demo: Server) -> None:
    llm = model(demo, is_chat_model=False, is_function_calling_model=False, max_tokens=12)
    assert llm.complete("Once upon a time").text == list(llm.stream_complete("Once upon a time"))[-1].text != ""


@pytest.mark.parametrize("streaming", [True, False])
def test_an_agent_calls_a_tool_uses_its_result_and_ends(demo: Server, streaming: bool) -> None:
    async def go() -> Any:
        return await workflow.FunctionAgent(tools=[get_weather], llm=model(demo), streaming=streaming).run(q.WEATHER)

    answer = asyncio.run(go())
    assert [(call.tool_name, call.tool_kwargs) for call in answer.tool_calls] == [q.WEATHER_CALL]
    assert answer.response.content == q.WEATHER_ANSWER


@pytest.mark.parametrize("structured", [True, False])
def test_an_object_is_what_the_model_says(demo: Server, structured: bool) -> None:
    """By a schema for the answer, and by a call."""
    llm = model(demo, should_use_structured_outputs=structured).as_structured_llm(Person)
    assert llm.chat(said(q.EXTRACT)).raw == Person(**q.PERSON)


def test_a_required_call_is_the_models_own(demo: Server) -> None:
    tool = core_tools.FunctionTool.from_defaults(get_weather)
    for required in (False, True):
        llm = model(demo)
        answer = llm.chat_with_tools([tool], q.WEATHER, tool_required=required)
        (call,) = llm.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == q.WEATHER_CALL
