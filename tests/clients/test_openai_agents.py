"""OpenAI's agents SDK, over chat completions and over responses: loops, hand-offs, objects, streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

agents: Any = pytest.importorskip("agents", reason=q.ABSENT)
openai: Any = pytest.importorskip("openai", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)

apis = pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])


class Person(pydantic.BaseModel):  # type: ignore[misc]
    name: str
    age: int


@pytest.fixture(scope="module", autouse=True)
def untraced() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    yield


@agents.function_tool  # type: ignore[untyped-decorator]
def get_weather(city: str) -> str:
    """Get the current weather for a city

    Args:
        city: City name
    """
    return json.dumps(q.report(city))


def agent(server: Server, kind: str, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = getattr(agents, kind)(model="demo", openai_client=client)
    settings = agents.ModelSettings(temperature=0, include_usage=True, **fields.pop("settings", {}))
    return agents.Agent(name="Assistant", model=model, model_settings=settings, **fields)


def calls_of(run: Any) -> list[tuple[str, Any]]:
    return [
        (item.raw_item.name, json.loads(item.raw_item.arguments))
        for item in run.new_items
        if item.type == "tool_call_item"
    ]


@apis
def test_a_tool_is_called_and_its_result_is_used(demo: Server, kind: str) -> None:
    run = agents.Runner.run_sync(agent(demo, kind, tools=[get_weather]), q.WEATHER)
    assert calls_of(run) == [q.WEATHER_CALL] and run.final_output == q.WEATHER_ANSWER
    assert len(run.raw_responses) == 2 and run.context_wrapper.usage.output_tokens > 0


@apis
def test_a_streamed_run_is_the_whole_one(demo: Server, kind: str) -> None:
    async def go() -> tuple[str, Any]:
        run = agents.Runner.run_streamed(agent(demo, kind, tools=[get_weather]), q.WEATHER)
        raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
        return "".join(event.delta for event in raw if event.type == "response.output_text.delta"), run

    text, run = asyncio.run(go())
    assert text == run.final_output == q.WEATHER_ANSWER and calls_of(run) == [q.WEATHER_CALL]
    assert run.context_wrapper.usage.output_tokens > 0


@apis
def test_a_forced_tool_ends_the_loop(demo: Server, kind: str) -> None:
    maker = agent(
        demo, kind, tools=[get_weather], settings={"tool_choice": "required"}, tool_use_behavior="stop_on_first_tool"
    )
    run = agents.Runner.run_sync(maker, q.WEATHER)
    assert calls_of(run) == [q.WEATHER_CALL] and json.loads(run.final_output) == q.REPORTS["Rome"]


@apis
def test_an_object_is_what_the_model_says(demo: Server, kind: str) -> None:
    assert agents.Runner.run_sync(agent(demo, kind, output_type=Person), q.EXTRACT).final_output == Person(**q.PERSON)


@apis
def test_a_conversation_goes_on(demo: Server, kind: str) -> None:
    maker = agent(demo, kind, tools=[get_weather])
    first = agents.Runner.run_sync(maker, q.WEATHER)
    asked = [*first.to_input_list(), {"role": "user", "content": "What is the weather in Tokyo?"}]
    second = agents.Runner.run_sync(maker, asked)
    assert calls_of(second) == [("get_weather", {"city": "Tokyo"})] and "Tokyo" in second.final_output


def test_the_server_keeps_the_conversation(demo: Server) -> None:
    """Only what is new is sent; what was said before is the server's to know."""
    maker = agent(demo, "OpenAIResponsesModel", tools=[get_weather])
    first = agents.Runner.run_sync(maker, q.WEATHER)
    second = agents.Runner.run_sync(maker, "What is the weather in Tokyo?", previous_response_id=first.last_response_id)
    assert calls_of(second) == [("get_weather", {"city": "Tokyo"})] and "Tokyo" in second.final_output
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.input_tokens


def test_a_session_keeps_the_conversation_here(demo: Server) -> None:
    maker, session = agent(demo, "OpenAIChatCompletionsModel", tools=[get_weather]), agents.SQLiteSession("one")
    agents.Runner.run_sync(maker, q.WEATHER, session=session)
    assert "Tokyo" in agents.Runner.run_sync(maker, "What is the weather in Tokyo?", session=session).final_output
