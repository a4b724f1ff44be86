"""Fields of conversations that change how a prompt ends or what an answer tells besides: against the real server and
scripts."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import openai
import pytest

from headrace.errors import InvalidRequest
from headrace.server.app import AccessLog
from headrace.server.dialects.chat import parse_chat
from headrace.server.dialects.messages import parse_count_tokens, parse_messages
from headrace.server.exchange import Exchange
from tests.server.fake_engine import SCRIPTED
from tests.support.serving import Server, events_of, wait_for

USER = {"role": "user", "content": "What does a mill do?"}
BEGUN = {"role": "assistant", "content": "A mill "}
CHAT = "/v1/chat/completions"


def text_of(server: Server, **fields: Any) -> str:
    """A conversation as its prompt reads."""
    ids = server.ask("POST", "/tokenize", fields).json["tokens"]
    return str(server.ask("POST", "/detokenize", {"tokens": ids, "skip_special_tokens": False}).json["prompt"])


# --- continuing a message


def test_a_prompt_ends_where_the_message_does(demo: Server) -> None:
    closed = text_of(demo, messages=[USER, BEGUN], add_generation_prompt=False)
    opened = text_of(demo, messages=[USER, BEGUN], continue_final_message=True)
    assert opened.endswith("A mill ") and closed.startswith(opened) and len(closed) > len(opened)
    assert text_of(demo, messages=[USER, BEGUN], continue_final_message=True, add_generation_prompt=False) == opened
    assert text_of(demo, messages=[USER, BEGUN]).startswith(closed)  # and opens another turn


def test_the_answer_goes_on_with_the_message(demo: Server) -> None:
    asked = {"messages": [USER, BEGUN], "continue_final_message": True, "max_tokens": 8, "temperature": 0}
    prompt = text_of(demo, messages=[USER, BEGUN], continue_final_message=True)
    text = demo.ask(
        "POST", "/v1/completions", {"prompt": prompt, "add_special_tokens": False, "max_tokens": 8, "temperature": 0}
    ).json
    whole = demo.ask("POST", CHAT, asked).json["choices"][0]["message"]["content"]
    assert whole == text["choices"][0]["text"]
    echoed = demo.ask("POST", CHAT, {**asked, "echo": True}).json["choices"][0]["message"]["content"]
    events = events_of(demo.ask("POST", CHAT, {**asked, "echo": True, "stream": True}).body)
    assert (
        echoed == "A mill " + whole == "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    )
    claude = demo.ask("POST", "/v1/messages", {"messages": [USER, BEGUN], "max_tokens": 8, "temperature": 0}).json
    assert claude["content"][0]["text"] == whole
    count = demo.ask("POST", "/v1/messages/count_tokens", {"messages": [USER, BEGUN]}).json
    assert count["input_tokens"] == claude["usage"]["input_tokens"] + claude["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize(
    ("begun", "reasoning", "content"),
    [("So:", None, "hm</think>yes"), ("<think>\nI", "hm", "yes"), ("<think>a</think>b", None, "hm</think>yes")],
)
def test_reasoning_that_was_begun_goes_on(scripted: Server, begun: str, reasoning: str | None, content: str) -> None:
    messages = [{"role": "user", "content": "⟦hm</think>yes⟧"}, {"role": "assistant", "content": begun}]
    said = scripted.ask(
        "POST", CHAT, {"messages": messages, "continue_final_message": True, "seed": SCRIPTED, "max_tokens": 50}
    ).json
    message = said["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "a", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
                ]
            },
            "messages",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"continue_final_message": False, "echo": True}, "echo"),
    ],
)
def test_what_cannot_be_continued_is_refused(demo: Server, fields: dict[str, Any], param: str) -> None:
    answer = demo.ask(
        "POST", CHAT, {"messages": [USER, BEGUN], "continue_final_message": True, "max_tokens": 2, **fields}
    )
    assert (answer.status, answer.error["param"]) == (400, param), answer


# --- content


def test_parts_are_lines_of_one_text_on_every_route(demo: Server) -> None:
    parts = [{"type": "text", "text": "capital"}, {"type": "text", "text": "of France"}]
    whole = text_of(demo, messages=[{"role": "user", "content": "capital\nof France"}])
    assert text_of(demo, messages=[{"role": "user", "content": parts}]) == whole
    asked = [{"messages": [{"role": "user", "content": each}]} for each in (parts, "capital\nof France")]
    assert len({demo.ask("POST", "/v1/messages/count_tokens", each).body for each in asked}) == 1


# --- usage in a stream


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("further", [{}, {"logprobs": 1, "return_token_ids": True}])
def test_usage_is_told_in_every_chunk(demo: Server, path: str, further: dict[str, Any]) -> None:
    """Of all tokens that have come; the last chunk that tells a number has sent their text. How many come at once
    depends on the machine."""
    asked = {"messages": [USER]} if path == CHAT else {"prompt": 'a","usage":null}'}
    asked |= {"max_tokens": 16, "temperature": 0, "n": 2, "ignore_eos": True, "skip_special_tokens": False}
    whole = demo.ask("POST", path, {**asked, "logprobs": True if path == CHAT else 1}).json["choices"][0]["logprobs"]
    tokens = [entry["token"] for entry in whole["content"]] if path == CHAT else whole["tokens"]
    ends = {len("".join(tokens[:count])): count for count in range(17)}  # greedy: both choices say the same
    asked |= {"stream": True, **({"logprobs": True, "return_token_ids": True} if further and path == CHAT else further)}
    for options in ({"include_usage": True, "continuous_usage_stats": True}, {"continuous_usage_stats": True}):
        events = events_of(demo.ask("POST", path, {**asked, "stream_options": options}).body)[:-1]
        told, sent = [event["usage"]["completion_tokens"] for event in events], [0, 0]
        for event, now, then in zip(events, told, [*told[1:], 0], strict=True):
            for choice in event["choices"]:
                sent[choice["index"]] += len(choice["delta"].get("content") or "" if path == CHAT else choice["text"])
            so_far = sum(ends[length] for length in sent)
            assert so_far == now if then != now else so_far <= now
        assert told[-1] == 32 and events[-1]["choices"] == []
        assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    plain = events_of(demo.ask("POST", path, {**asked, "stream_options": {"include_usage": True}}).body)[:-1]
    assert [event["usage"] is None for event in plain] == [True] * (len(plain) - 1) + [False]
    contradictory = {**asked, "stream_options": {"include_usage": False, "continuous_usage_stats": True}}
    assert demo.ask("POST", path, contradictory).error["param"] == "stream_options"


# --- the wrong route


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"prompt": "hi"}, "/v1/completions"),
        (CHAT, {"input": "hi"}, "/v1/responses"),
        ("/v1/completions", {"messages": [USER]}, "/v1/chat/completions"),
        ("/v1/responses", {"messages": [USER]}, "/v1/chat/completions"),
        ("/v1/messages", {"prompt": "hi", "max_tokens": 1}, "/v1/completions"),
        ("/chat/completions", {}, "/v1/chat/completions here, so let the client's base URL end in /v1"),
        ("/v1/v1/messages", {}, "set its base URL without it"),
        ("/v1/nothing", {}, "see the list"),
        ("/nothing", {}, "see the list"),
    ],
)
def test_a_request_in_the_wrong_place_is_told_the_right_one(
    scripted: Server, path: str, body: dict[str, Any], words: str
) -> None:
    answer = scripted.ask("POST", path, body)
    assert answer.status in (400, 404) and words in answer.error["message"]


def test_the_reason_of_a_refusal_is_logged_and_nothing_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    mine = "my-secret-field"
    bodies = (
        {"messages": []},
        {mine: 1},
        {"messages": [{"role": mine}]},
        {mine + "\n": 1},
        {"messages": [USER], "temperature": mine},
    )

    async def record() -> None:
        log = AccessLog()
        for body in bodies:
            exchange = Exchange(None, "POST", "/x", b"", [])  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest) as caught:
                parse_chat(body, {})
            exchange.error = caught.value
            log.record(exchange, 400)

    with caplog.at_level(logging.INFO, "headrace.access"):
        asyncio.run(record())
    facts = [entry.__dict__["facts"] for entry in caplog.records]
    assert [(each["error"], each.get("param")) for each in facts] == [
        ("invalid_request_error", "messages"), ("unknown_parameter", None), ("invalid_request_error", "messages"), ("unknown_parameter", None),
        ("invalid_type", "temperature"),
    ]  # fmt: skip
    assert mine not in str(facts)


def test_a_refusal_is_logged_by_the_server(demo: Server) -> None:
    def logged() -> bool:
        demo.ask("POST", CHAT, {"messages": []}, {"X-Request-Id": "refused-one"})  # again: twenty a second have a line
        return any("id=refused-one error=invalid_request_error param=messages" in line for line in demo.lines)

    wait_for(logged)


# --- the tokenizer, and threads


def test_the_tokenizer_is_described(demo: Server) -> None:
    told = demo.ask("GET", "/tokenizer_info").json
    assert isinstance(told["chat_template"], str) and told["tokenizer_class"]
    assert (
        all(isinstance(told[name], str) for name in ("bos_token", "eos_token") if told.get(name) is not None)
        and told["eos_token"]
    )


def test_a_thread_is_refused_as_clients_know_it(demo: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.post(
                "/v1/messages", body={"max_tokens": 4, "messages": [USER], "thread": {"type": "create"}}, cast_to=object
            )
        assert caught.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}
        if not hasattr(client.beta.messages, "tool_runner"):
            pytest.skip("this release has no tool runner")

        @anthropic.beta_tool  # type: ignore[untyped-decorator]
        def grind(size: int) -> str:
            """Grinds. Args: size: how fine."""
            return f"ground {size}"

        runner = client.beta.messages.tool_runner(model="demo", max_tokens=8, messages=[USER], tools=[grind])
        assert runner.until_done().content


def test_openai_takes_the_message_further(client: openai.OpenAI) -> None:
    messages: Any = [USER, BEGUN]
    said = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=4, extra_body={"continue_final_message": True, "echo": True}
    )
    assert str(said.choices[0].message.content).startswith("A mill ")


def test_effort_is_the_same_on_all_routes() -> None:
    chat = parse_chat({"messages": [USER], "reasoning_effort": "max"}, {}).conversation.variables
    body: dict[str, Any] = {"messages": [USER], "max_tokens": 4, "output_config": {"effort": "max"}}
    assert chat == parse_messages(body, {}).conversation.variables == {"reasoning_effort": "max"}
    assert parse_count_tokens({"messages": [USER], "output_config": {"effort": "max"}})[1].variables == chat
    with pytest.raises(InvalidRequest) as caught:
        parse_messages({**body, "output_config": {"effort": "some"}}, {})
    assert caught.value.param == "output_config.effort" and json.dumps(caught.value.message)
