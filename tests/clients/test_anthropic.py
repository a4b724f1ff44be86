"""anthropic for Python as applications use it: loops of tools by hand and by its runner, objects, streams, counted
tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

anthropic: Any = pytest.importorskip("anthropic", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)

TOOL: Any = {
    "name": "get_weather",
    "description": q.WEATHER_TOOL["function"]["description"],
    "input_schema": q.WEATHER_SCHEMA,
}
SURE: Any = {"model": "demo", "max_tokens": 200, "extra_body": {"temperature": 0}}


class Person(pydantic.BaseModel):  # type: ignore[misc]
    name: str
    age: int


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def whole(client: Any, **fields: Any) -> Any:
    return client.messages.create(**SURE, **fields)


def streamed(client: Any, **fields: Any) -> Any:
    with client.messages.stream(**SURE, **fields) as stream:
        return stream.get_final_message()


ways = pytest.mark.parametrize("ask", [whole, streamed])
Ask = Callable[..., Any]


def said(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


@ways
def test_a_question_is_answered(client: Any, ask: Ask) -> None:
    answer = ask(client, messages=said(q.CAPITAL))
    assert [block.text for block in answer.content] == [q.PARIS] and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == whole(client, messages=said(q.CAPITAL)).usage.output_tokens
    counted = client.messages.count_tokens(model="demo", messages=said(q.CAPITAL)).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


@ways
def test_a_tool_is_called_and_its_result_is_used(client: Any, ask: Ask) -> None:
    messages = said(q.WEATHER)
    first = ask(client, messages=messages, tools=[TOOL])
    assert first.stop_reason == "tool_use" and calls_of(first) == [q.WEATHER_CALL]
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": json.dumps(q.report("Rome"))}
    turns = [*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = ask(client, messages=turns, tools=[TOOL])
    assert [block.text for block in last.content] == [q.WEATHER_ANSWER] and last.stop_reason == "end_turn"


@ways
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_forced_call_is_the_models_own(client: Any, ask: Ask, choice: Any) -> None:
    forced = ask(client, messages=said(q.WEATHER), tools=[TOOL], tool_choice=choice)
    own = ask(client, messages=said(q.WEATHER), tools=[TOOL])
    assert (
        calls_of(forced) == calls_of(own) == [q.WEATHER_CALL] and forced.usage.output_tokens == own.usage.output_tokens
    )


@ways
def test_calls_side_by_side(client: Any, ask: Ask) -> None:
    assert calls_of(ask(client, messages=said(q.TWO_CITIES), tools=[TOOL])) == [
        ("get_weather", {"city": city}) for city in q.REPORTS
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_runner_of_tools_ends_with_the_answer(client: Any, streaming: bool) -> None:
    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the current weather for a city

        Args:
            city: City name
        """
        return json.dumps(q.report(city))

    runner = client.beta.messages.tool_runner(**SURE, messages=said(q.WEATHER), tools=[get_weather], stream=streaming)
    messages = [turn.get_final_message() if streaming else turn for turn in runner]
    assert [calls_of(message) for message in messages] == [[q.WEATHER_CALL], []]
    assert messages[-1].content[0].text == q.WEATHER_ANSWER


def test_parse_gives_an_object(client: Any) -> None:
    answer = client.messages.parse(**SURE, messages=said(q.EXTRACT), output_format=Person)
    assert answer.parsed_output == Person(**q.PERSON)
    with client.messages.stream(**SURE, messages=said(q.EXTRACT), output_format=Person) as stream:
        assert stream.get_final_message().parsed_output == Person(**q.PERSON)
