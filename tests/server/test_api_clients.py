"""The real clients of the two newer APIs (openai's responses, anthropic's messages) against the real server and the
bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.serving import Server

anthropic: Any = pytest.importorskip(
    "anthropic"
)  # its types change from release to release; what counts is what it reads

ASK = "What does a mill do?"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer"}},
    "required": ["size"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def claude(demo: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0, timeout=60) as made:
        yield made


# --- openai: responses


def test_a_response_streamed_and_whole_is_the_chats_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "input": ASK, "max_output_tokens": 12, "temperature": 0, "instructions": "Be brief."}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole.output_text == text == chat.choices[0].message.content and text
    last: Any = events[-1]
    assert last.type in ("response.completed", "response.incomplete") and last.response.output_text == text
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(range(len(events)))
    assert (
        whole.usage is not None and chat.usage is not None and whole.usage.output_tokens == chat.usage.completion_tokens
    )
    assert last.response.usage.input_tokens_details.cached_tokens > 0
    assert whole.status == last.response.status and whole.instructions == "Be brief."


def test_the_stream_helper_adds_up_the_same_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="demo", input=ASK, temperature=0, max_output_tokens=400, extra_body={"stop": [" "]}
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == text and text


def test_a_forced_call_goes_round(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "grind", "description": "Grinds.", "parameters": SCHEMA, "strict": True}
    asked: Any = {
        "model": "demo",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "grind"},
        "max_output_tokens": 40,
        **GREEDY,
    }
    whole: Any = client.responses.create(input=ASK, **asked)
    (call,) = [item for item in whole.output if item.type == "function_call"]
    assert (
        call.name == "grind"
        and call.call_id
        and (whole.status == "incomplete" or isinstance(json.loads(call.arguments)["size"], int))
    )
    events: Any = list(client.responses.create(input=ASK, **asked, stream=True))
    assert (
        "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        == call.arguments
    )
    assert [event.item.name for event in events if event.type == "response.output_item.added"] == ["grind"]
    again: Any = [
        {"role": "user", "content": ASK},
        {"type": "function_call", "call_id": call.call_id, "name": "grind", "arguments": '{"size": 1}'},
        {"type": "function_call_output", "call_id": call.call_id, "output": "flour"},
    ]
    assert client.responses.create(model="demo", input=again, tools=[tool], max_output_tokens=4).usage


def test_text_format_holds_the_answer_to_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "mill", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(model="demo", input=ASK, text=form, max_output_tokens=60, temperature=0)
    assert response.status == "incomplete" or set(json.loads(response.output_text)) == {"size"}
    assert (
        response.output_text.lstrip().startswith("{") and response.text is not None and response.text.format is not None
    )
    assert response.text.format.type == "json_schema"


def test_mistakes_reach_the_openai_client_with_their_place(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input=ASK, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id" and caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input="mill " * 5000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="demo", input="x")
    assert "embedding" in missing.value.message


def test_asynchronously(demo: Server) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as made:
            stream: Any = await made.responses.create(
                model="demo", input=ASK, max_output_tokens=5, temperature=0, stream=True
            )
            return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert asyncio.run(ask())


# --- anthropic: messages


def message(claude: Any, **fields: Any) -> Any:
    """Sampling goes into the extra body: some releases of the client do not know it."""
    return claude.messages.create(
        **{
            "model": "demo",
            "max_tokens": 12,
            "messages": [{"role": "user", "content": ASK}],
            "extra_body": GREEDY,
            **fields,
        }
    )


def test_a_message_streamed_and_whole_is_the_chats_answer(claude: Any, client: openai.OpenAI) -> None:
    whole = message(claude, system="Be brief.")
    asked: Any = {
        "model": "demo",
        "max_tokens": 12,
        "messages": [{"role": "user", "content": ASK}],
        "system": "Be brief.",
        "extra_body": GREEDY,
    }
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=12, temperature=0)
    assert whole.content[0].text == final.content[0].text == text == chat.choices[0].message.content and text
    assert (
        whole.stop_reason
        == final.stop_reason
        == ("max_tokens" if chat.choices[0].finish_reason == "length" else "end_turn")
    )
    assert final.usage.cache_read_input_tokens > 0 and chat.usage is not None
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert final.usage.output_tokens == chat.usage.completion_tokens


def test_stop_sequences(claude: Any) -> None:
    whole = message(claude, max_tokens=100, stop_sequences=["mill"])
    assert (
        whole.stop_reason == "stop_sequence" and whole.stop_sequence == "mill" and "mill" not in whole.content[0].text
    )


def test_a_forced_tool_use_goes_round(claude: Any) -> None:
    tool = {"name": "grind", "description": "Grinds.", "input_schema": SCHEMA}
    forced = {"max_tokens": 40, "tools": [tool], "tool_choice": {"type": "tool", "name": "grind"}}
    whole = message(claude, **forced)
    (use,) = [block for block in whole.content if block.type == "tool_use"]
    assert use.name == "grind" and (
        whole.stop_reason == "max_tokens" or (whole.stop_reason == "tool_use" and isinstance(use.input["size"], int))
    )
    with claude.messages.stream(
        model="demo", messages=[{"role": "user", "content": ASK}], extra_body=GREEDY, **forced
    ) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use" and (
        whole.stop_reason == "max_tokens" or final.content[0].input == use.input
    )
    turns = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": [{"type": "tool_use", "id": use.id, "name": "grind", "input": {"size": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "flour"}]},
    ]
    assert message(claude, messages=turns, tools=[tool]).usage.output_tokens


def test_tokens_are_counted(claude: Any) -> None:
    counted = claude.messages.count_tokens(
        model="demo", messages=[{"role": "user", "content": ASK}], system="Be brief."
    )
    used = message(claude, system="Be brief.").usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_mistakes_reach_the_anthropic_client(claude: Any, demo: Server) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        message(claude, max_tokens=-1)
    assert caught.value.body["error"]["param"] == "max_tokens" and caught.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError):
        message(claude, model="claude")
    assert demo.ask("POST", "/v1/messages", b"{").json["type"] == "error"
