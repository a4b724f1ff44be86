"""Answers that a running server's own rules end: a list of words, a function of the user's. (No model: keyed hash.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import SERVE, Server, events_of, post_bytes, read_until_closed, serving, split_response

HOOK = """
import os, time

def judge(text, *, prompt, final):
    if "RAISE" in prompt and text: raise ValueError(text)
    if "HANG" in prompt and text:
        while True: pass
    if "EXIT" in prompt and text: os._exit(3)
    return "BAN" in prompt and prompt.partition("BAN ")[2].partition(" ")[0] in text
"""
TEXT = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("rules")
    (folder / "rules.py").write_text(HOOK)
    (folder / "words").write_text("# bad\nzebra\n")
    flags = (
        "--moderation",
        f"{folder}/rules.py:judge",
        "--moderation-words",
        f"{folder}/words",
        "--moderation-prompt",
        "--moderation-timeout",
        "1",
    )
    with serving(*flags, "--executor", "keyed-hash", command=SERVE) as running:
        yield running


def ask(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.ask("POST", "/v1/completions", body)
    assert answer.status == 200, answer
    return dict(answer.json)


def streamed(server: Server, body: dict[str, Any]) -> tuple[dict[int, str], dict[int, Any]]:
    """Texts and ends by choice."""
    with server.raw(post_bytes("/v1/completions", {**body, "stream": True}, "Connection: close")) as sock:
        *events, done = events_of(split_response(read_until_closed(sock))[1])
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    ends: dict[int, Any] = {}
    for choice in (event["choices"][0] for event in events if event["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
    return texts, ends


def whole(server: Server, body: dict[str, Any]) -> tuple[dict[int, str], dict[int, Any]]:
    choices = ask(server, body)["choices"]
    return {c["index"]: c["text"] for c in choices}, {
        c["index"]: (c["finish_reason"], c["stop_reason"]) for c in choices
    }


@pytest.mark.parametrize("banned", ["q", "z", "x", "ing", "the"])
def test_a_function_ends_a_bad_answer_before_it_is_sent(server: Server, banned: str) -> None:
    body = {**TEXT, "prompt": f"Once upon a BAN {banned} time", "n": 2, "seed": 7, "return_token_ids": True}
    texts, ends = whole(server, body)
    assert streamed(server, body) == (texts, ends)
    assert not any(banned in text for text in texts.values())
    assert {reason for reason, _ in ends.values()} <= {"content_filter", "length"}


def test_a_bad_chat_ends_so_too(server: Server) -> None:
    assert ask(server, {**TEXT, "prompt": "BAN e time"})["choices"][0]["finish_reason"] == "content_filter"
    body = {"messages": [{"role": "user", "content": "BAN e please"}], "max_tokens": 80, "temperature": 0}
    choice = server.ask("POST", "/v1/chat/completions", body).json["choices"][0]
    assert choice["finish_reason"] == "content_filter" and "e" not in choice["message"]["content"]


def test_a_listed_word_in_the_prompt_ends_it_at_once(server: Server) -> None:
    answer = ask(server, {**TEXT, "prompt": "A zebra crossed", "n": 2})
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("", "content_filter")] * 2
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("word", "said"), [("RAISE", "failed (ValueError)"), ("HANG", "within 1 s"), ("EXIT", "ended its process")]
)
def test_a_function_that_fails_fails_its_own_request_alone(server: Server, word: str, said: str) -> None:
    bad = {**TEXT, "prompt": f"{word} once"}
    answer = server.ask("POST", "/v1/completions", bad)
    assert answer.status == 500 and said in answer.error["message"] and answer.error["type"] == "moderation_error"
    with server.raw(post_bytes("/v1/completions", {**bad, "stream": True}, "Connection: close")) as sock:
        received = read_until_closed(sock)
    assert b"moderation_error" in received and b"[DONE]" not in received
    assert ask(server, TEXT)["choices"][0]["finish_reason"] == "length"
    server.wait_idle()
    assert server.ask("GET", "/health").status == 200
