"""openai for Python as applications use it: a loop of calls, parsed answers, both APIs. The wire itself:
tests/server/test_openai_client.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import Server

openai: Any = pytest.importorskip("openai", reason=q.ABSENT)
pydantic: Any = pytest.importorskip("pydantic", reason=q.ABSENT)


class Person(pydantic.BaseModel):  # type: ignore[misc]
    name: str
    age: int


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def whole(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", temperature=0, **fields)


def streamed(client: Any, **fields: Any) -> Any:
    with client.chat.completions.stream(
        model="demo", temperature=0, stream_options={"include_usage": True}, **fields
    ) as stream:
        return stream.get_final_completion()


ways = pytest.mark.parametrize("ask", [whole, streamed])
Ask = Callable[..., Any]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


@ways
def test_a_question_is_answered(client: Any, ask: Ask) -> None:
    answer = ask(client, messages=said(q.CAPITAL))
    assert answer.choices[0].message.content == q.PARIS and answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == whole(client, messages=said(q.CAPITAL)).usage.completion_tokens


@ways
def test_a_tool_is_called_and_its_result_is_used(client: Any, ask: Ask) -> None:
    messages: list[Any] = said(q.WEATHER)
    first = ask(client, messages=messages, tools=[q.WEATHER_TOOL]).choices[0]
    assert first.finish_reason == "tool_calls" and calls_of(first.message) == [q.WEATHER_CALL]
    call = first.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps(q.report("Rome"))}
    last = ask(client, messages=[*messages, first.message, result], tools=[q.WEATHER_TOOL]).choices[0]
    assert last.message.content == q.WEATHER_ANSWER and last.finish_reason == "stop" and not last.message.tool_calls


@ways
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_the_models_own(client: Any, ask: Ask, choice: Any) -> None:
    own = ask(client, messages=said(q.WEATHER), tools=[q.WEATHER_TOOL])
    forced = ask(client, messages=said(q.WEATHER), tools=[q.WEATHER_TOOL], tool_choice=choice)
    assert calls_of(forced.choices[0].message) == calls_of(own.choices[0].message) == [q.WEATHER_CALL]
    assert forced.usage.completion_tokens == own.usage.completion_tokens


@ways
def test_calls_side_by_side(client: Any, ask: Ask) -> None:
    message = ask(client, messages=said(q.TWO_CITIES), tools=[q.WEATHER_TOOL]).choices[0].message
    assert calls_of(message) == [("get_weather", {"city": city}) for city in q.REPORTS]
    assert len({call.id for call in message.tool_calls}) == 2
    one = ask(client, messages=said(q.TWO_CITIES), tools=[q.WEATHER_TOOL], parallel_tool_calls=False).choices[0].message
    assert calls_of(one) == [q.WEATHER_CALL]


@ways
def test_no_tool_where_none_may_be_called(client: Any, ask: Ask) -> None:
    answer = ask(client, messages=said(q.WEATHER), tools=[q.WEATHER_TOOL], tool_choice="none").choices[0]
    assert answer.finish_reason == "stop" and not answer.message.tool_calls and answer.message.content


def test_an_answer_under_a_schema_is_what_the_model_says_without(client: Any) -> None:
    free = whole(client, messages=said(q.EXTRACT))
    assert json.loads(free.choices[0].message.content) == q.PERSON
    forms = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": q.PERSON_SCHEMA, "strict": True}},
    ]
    for form in forms:
        held = whole(client, messages=said(q.EXTRACT), response_format=form)
        assert held.choices[0].message.content == free.choices[0].message.content
        assert held.usage.completion_tokens == free.usage.completion_tokens


def test_parse_gives_an_object(client: Any) -> None:
    asked: Any = {"model": "demo", "temperature": 0, "messages": said(q.EXTRACT), "response_format": Person}
    assert client.chat.completions.parse(**asked).choices[0].message.parsed == Person(**q.PERSON)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Person(**q.PERSON)


def test_parsed_tools(client: Any) -> None:
    tool = openai.pydantic_function_tool(Person, name="person", description="A person")
    asked: Any = {
        "model": "demo",
        "temperature": 0,
        "messages": said("Henry is 64 years old."),
        "tools": [tool],
        "tool_choice": "required",
    }
    called = client.chat.completions.parse(**asked).choices[0].message.tool_calls[0]
    assert called.function.parsed_arguments == Person(**q.PERSON)


# --- the Responses API

RESPONSES_TOOL = {"type": "function", **q.WEATHER_TOOL["function"], "strict": True}


def response(client: Any, **fields: Any) -> Any:
    return client.responses.create(model="demo", temperature=0, **fields)


def streamed_response(client: Any, **fields: Any) -> Any:
    with client.responses.stream(model="demo", temperature=0, **fields) as stream:
        return stream.get_final_response()


responses = pytest.mark.parametrize("ask", [response, streamed_response])


@responses
def test_a_response_calls_a_tool_and_uses_its_result(client: Any, ask: Ask) -> None:
    items: list[Any] = said(q.WEATHER)
    first = ask(client, input=items, tools=[RESPONSES_TOOL])
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == q.WEATHER_CALL
    result = {"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(q.report("Rome"))}
    last = ask(client, input=[*items, call, result], tools=[RESPONSES_TOOL])
    assert last.output_text == q.WEATHER_ANSWER
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens


@responses
def test_a_forced_call_of_a_response(client: Any, ask: Ask) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        made = ask(client, input=q.WEATHER, tools=[RESPONSES_TOOL], tool_choice=choice)
        assert [(item.name, json.loads(item.arguments)) for item in made.output] == [q.WEATHER_CALL]


def test_a_parsed_response(client: Any) -> None:
    assert client.responses.parse(
        model="demo", temperature=0, input=q.EXTRACT, text_format=Person
    ).output_parsed == Person(**q.PERSON)
