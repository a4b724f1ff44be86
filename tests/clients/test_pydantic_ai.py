"""pydantic-ai over three APIs: loops of calls, and output by tool, by schema and by prompt, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

ai: Any = pytest.importorskip("pydantic_ai", reason=q.ABSENT)
ai_openai: Any = pytest.importorskip("pydantic_ai.models.openai", reason=q.ABSENT)
ai_anthropic: Any = pytest.importorskip("pydantic_ai.models.anthropic", reason=q.ABSENT)
openai_provider: Any = pytest.importorskip("pydantic_ai.providers.openai", reason=q.ABSENT)
anthropic_provider: Any = pytest.importorskip("pydantic_ai.providers.anthropic", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)

MODELS = ("chat", "responses", "messages")
apis = pytest.mark.parametrize("kind", MODELS)


class Person(pydantic.BaseModel):  # type: ignore[misc]
    """A person"""

    name: str
    age: int


def agent(server: Server, kind: str, **fields: Any) -> Any:
    if kind == "messages":
        provider = anthropic_provider.AnthropicProvider(base_url=server.url, api_key="none")
        knows = {"supports_json_schema_output": True}  # it knows so of Anthropic's own models only
        model = ai_anthropic.AnthropicModel("demo", provider=provider, profile=knows)
    else:
        provider = openai_provider.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
        model = {"chat": ai_openai.OpenAIChatModel, "responses": ai_openai.OpenAIResponsesModel}[kind](
            "demo", provider=provider
        )
    return ai.Agent(model, model_settings={"temperature": 0, "max_tokens": 200}, **{"retries": 0, **fields})


def get_weather(city: str) -> dict[str, Any]:
    """Get the current weather for a city

    Args:
        city: City name
    """
    return q.report(city)


async def streamed(maker: Any, question: str) -> tuple[list[Any], Any]:
    """What was seen on the way, and the whole run."""
    async with maker.run_stream(question) as run:
        return [piece async for piece in run.stream_output(debounce_by=None)], run


@apis
def test_a_tool_is_called_and_its_result_is_used(demo: Server, kind: str) -> None:
    run = agent(demo, kind, tools=[get_weather]).run_sync(q.WEATHER)
    parts = [part for message in run.all_messages() for part in message.parts]
    assert [(part.tool_name, part.args_as_dict()) for part in parts if part.part_kind == "tool-call"] == [
        q.WEATHER_CALL
    ]
    assert run.output == q.WEATHER_ANSWER and run.usage.requests == 2 and run.usage.output_tokens > 0


@apis
def test_a_streamed_run_is_the_whole_one(demo: Server, kind: str) -> None:
    maker = agent(demo, kind, tools=[get_weather])
    pieces, run = asyncio.run(streamed(maker, q.WEATHER))
    assert pieces[-1] == q.WEATHER_ANSWER and len(pieces) > 4
    assert run.usage.output_tokens == agent(demo, kind, tools=[get_weather]).run_sync(q.WEATHER).usage.output_tokens


@apis
@pytest.mark.parametrize("way", ["ToolOutput", "NativeOutput", "PromptedOutput"])
def test_output_is_what_the_model_says(demo: Server, way: str, kind: str) -> None:
    form = getattr(ai, way)(Person)
    assert agent(demo, kind, output_type=form).run_sync(q.EXTRACT).output == Person(**q.PERSON)
    pieces, _ = asyncio.run(streamed(agent(demo, kind, output_type=form), q.EXTRACT))
    assert pieces[-1] == Person(**q.PERSON)


@apis
def test_a_tool_beside_an_object(demo: Server, kind: str) -> None:
    """The loop ends with the object that the output tool was called with."""

    class Report(pydantic.BaseModel):  # type: ignore[misc]
        """The weather in a city"""

        city: str
        temperature: int

    found = agent(demo, kind, tools=[get_weather], output_type=ai.ToolOutput(Report)).run_sync(q.WEATHER)
    assert found.output.city == "Rome"


@apis
def test_what_was_wrong_is_sent_back(demo: Server, kind: str) -> None:
    maker, seen = agent(demo, kind, output_type=ai.ToolOutput(Person), retries=1), []

    @maker.output_validator  # type: ignore[untyped-decorator]
    def once(person: Any) -> Any:
        seen.append(person)
        if len(seen) == 1:
            raise ai.ModelRetry("Say it again.")
        return person

    assert isinstance(maker.run_sync(q.EXTRACT).output, Person) and len(seen) == 2
