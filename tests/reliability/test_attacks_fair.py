"""Attacks by many requests of one client, in sizes for CI; at full size: ``python -m tests.reliability.attacks``."""

from __future__ import annotations

import pytest

from tests.reliability import attacks_fair as fair
from tests.reliability.attacks import HASHED, MASKED, held
from tests.support.serving import SERVE, serving

BUSY = 4.0  # times the figure: two cores that do other things too


@pytest.mark.parametrize("fronts", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_a_key_that_fills_the_queue_locks_nobody_out(fronts: str) -> None:
    flags = (*HASHED, *fair.TWO_KEYS, "--api-server-count", fronts)
    attack = fair.crowd(fair.CHAT, fair.long_answer, 80, 1.5, fair.HOG)
    told = held(attack, flags, slack=BUSY, quiet=0.3, headers=fair.POLITE, asks=fair.TALK)
    assert "× 429" in told, told


def test_conversations_of_many_messages_leave_others_alone() -> None:
    """Too many for the context are refused before they are rendered; those that might fit are large work, whatever they
    say."""
    with serving(*HASHED, command=SERVE) as server:
        for path, param in ((fair.CHAT, "messages"), ("/v1/responses", "input")):
            messages = [{"role": "user", "content": "a"}] * 10_000
            answer = server.ask("POST", path, {"input" if param == "input" else "messages": messages})
            assert (
                answer.status == 400 and "its 10000 messages take at least 10000 tokens" in answer.error["message"]
            ), answer
            assert answer.error["param"] == param and answer.error["code"] == "context_length_exceeded"
    told = held(fair.crowd(fair.CHAT, fair.talk(10_000), 16, 2.0), HASHED, slack=BUSY, quiet=0.3, asks=fair.TALK)
    assert "× 400" in told, told


def test_grammars_of_one_client_leave_others_alone() -> None:
    """An answer of 128 rows, each of which follows a schema; then schemas that take a second to try out and are
    refused."""
    rows, bombs = (
        fair.crowd(fair.COMPLETIONS, fair.many_rows(128, 20), 1, 1.0),
        fair.crowd(fair.COMPLETIONS, fair.bomb, 3, 0.5),
    )
    told = held(lambda server: f"{rows(server)}; {bombs(server)}", MASKED, slack=BUSY, quiet=0.5, asks=fair.NEW_SCHEMA)
    assert "× 200" in told and "× 400" in told, told
