"""Haystack: its generator for chats, and its agent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

generators: Any = pytest.importorskip("haystack.components.generators.chat", reason=q.ABSENT)
haystack_agents: Any = pytest.importorskip("haystack.components.agents", reason=q.ABSENT)
dataclasses: Any = pytest.importorskip("haystack.dataclasses", reason=q.ABSENT)
secrets: Any = pytest.importorskip("haystack.utils", reason=q.ABSENT)
haystack_tools: Any = pytest.importorskip("haystack.tools", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)

KINDS = pytest.mark.parametrize("kind", ["OpenAIChatGenerator", "OpenAIResponsesChatGenerator"])


class Person(pydantic.BaseModel):  # type: ignore[misc]
    name: str
    age: int


def generator(server: Server, kind: str, **fields: Any) -> Any:
    made = {"temperature": 0, **fields.pop("generation_kwargs", {})}
    key = secrets.Secret.from_token("none")
    return getattr(generators, kind)(
        api_key=key, model="demo", api_base_url=f"{server.url}/v1", generation_kwargs=made, max_retries=0, **fields
    )


def said(text: str) -> list[Any]:
    return [dataclasses.ChatMessage.from_user(text)]


@KINDS
def test_a_chat_whole_and_streamed_is_one_answer(demo: Server, kind: str) -> None:
    pieces: list[str] = []
    whole = generator(demo, kind).run(said(q.CAPITAL))["replies"][0]
    streamed = generator(demo, kind, streaming_callback=lambda chunk: pieces.append(chunk.content)).run(
        said(q.CAPITAL)
    )["replies"][0]
    assert whole.text == streamed.text == "".join(pieces) == q.PARIS


@KINDS
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_a_tool_uses_its_result_and_ends(demo: Server, kind: str, streamed: bool) -> None:
    name, description = "get_weather", "Get the current weather for a city"
    tool = haystack_tools.Tool(name=name, description=description, parameters=q.WEATHER_SCHEMA, function=q.report)
    callback = (lambda chunk: None) if streamed else None
    agent = haystack_agents.Agent(chat_generator=generator(demo, kind), tools=[tool], streaming_callback=callback)
    messages = agent.run(messages=said(q.WEATHER))["messages"]
    assert [(call.tool_name, call.arguments) for message in messages for call in message.tool_calls] == [q.WEATHER_CALL]
    assert messages[-1].text == q.WEATHER_ANSWER


def test_an_object_is_what_the_model_says(demo: Server) -> None:
    made = generator(demo, "OpenAIChatGenerator", generation_kwargs={"response_format": Person}).run(said(q.EXTRACT))[
        "replies"
    ][0]
    assert Person.model_validate_json(made.text) == Person(**q.PERSON)
