"""Attacks by what one request multiplies, in sizes for CI (limits lowered by flags); at full size: ``python -m
tests.reliability.attacks``."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.reliability.attacks import COMPLETIONS, QUICK, Work, held, one
from tests.support.planted import planted
from tests.support.serving import SERVE, Server, post_bytes, serving, wait_for

BUSY = 4.0  # times the figure: two cores that do other things too
SMALL = (*QUICK, "--max-answer-bytes", "1MiB", "--max-answers-bytes", "2MiB")

SCORES = {"prompt": list(range(400)), "prompt_logprobs": 20, "max_tokens": 1}
ECHO = {"prompt": [[2598] * 400] * 4, "echo": True, "max_tokens": 1}
LARGE = {"prompt": "a" * 4000, "echo": True, "n": 128, "max_tokens": 1}  # 512 KB: a quarter of what all may take


def in_turn(*attacks: Work) -> Work:
    return lambda server: "; ".join(attack(server) for attack in attacks)


REFUSED = (one(COMPLETIONS, {**SCORES, "n": 64}, (400,), times=1), one(COMPLETIONS, {**ECHO, "n": 64}, (400,), times=1))
TAKEN = (
    one(COMPLETIONS, SCORES, (200,), times=1),
    one(COMPLETIONS, ECHO, (200,), times=1),
    one(COMPLETIONS, {"prompt": "word " * 1_000_000, "max_tokens": 1, "truncate_prompt_tokens": 10}, (200,), times=1),
    one(COMPLETIONS, {"prompt": "a", "n": 128, "logprobs": 4, "max_tokens": 16, "ignore_eos": True}, (200,), times=1),
)


def test_what_one_request_multiplies_holds_up_nobody() -> None:
    held(in_turn(*REFUSED, *TAKEN), SMALL, slack=BUSY, quiet=0.3, more_bytes=150 << 20)


def test_answers_that_nobody_prices_are_noticed() -> None:
    with pytest.raises(AssertionError, match="200"), serving(*SMALL, command=planted("""
        from headrace.server.limits import Budget
        Budget.check = lambda self, cost: None
    """)) as careless:  # fmt: skip
        REFUSED[1](careless)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*SMALL, command=SERVE) as running:
        yield running
        assert not any("Traceback" in line for line in running.lines), running.lines


def test_unread_answers_count_until_they_are_gone(server: Server) -> None:
    asked = post_bytes(COMPLETIONS, LARGE)
    socks = [server.raw(asked, receive_buffer=4096) for _ in range(4)]
    try:
        wait_for(lambda: server.ask("POST", COMPLETIONS, LARGE).status == 503, what="the budget is full")
        refused = server.ask("POST", COMPLETIONS, LARGE)
        assert (
            refused.status == 503
            and 1 <= int(refused.headers["retry-after"]) <= 30
            and "--max-answers-bytes" in refused.error["message"]
        )
        assert server.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 4}).status == 200
        assert (
            server.ask(
                "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
            ).status
            == 200
        )
    finally:
        for sock in socks:
            sock.close()
    wait_for(lambda: server.ask("POST", COMPLETIONS, LARGE).status == 200, what="what they held is given back")


def test_a_large_answer_comes_whole(server: Server) -> None:
    answer = server.ask("POST", COMPLETIONS, {**LARGE, "logprobs": None, "return_token_ids": False})
    assert int(answer.headers["content-length"]) == len(answer.body) > 500_000
    assert [choice["text"][:4000] for choice in json.loads(answer.body)["choices"]] == ["a" * 4000] * 128
