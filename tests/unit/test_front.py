"""Turns of a simulated front end."""

from __future__ import annotations

import math

import pytest

from headrace.cost.prices import FrontPrices, FrontWork
from headrace.planner.drive import READ, FrontEnd
from headrace.request import Finished, FinishReason, SequenceOutput, TokenOutputs

WORK = FrontWork(request=1.0, prompt_token=0.1, output_token=0.01, message=0.2, step=0.5)


def front(request: float = 1.0, token: float = 0.1) -> FrontEnd:
    return FrontEnd(FrontPrices(request, token, WORK))


def output(request: int, *tokens: int) -> SequenceOutput:
    return SequenceOutput(request, 0, tokens)


def test_nothing_is_due_where_nothing_has_come() -> None:
    assert front().due == math.inf


def test_a_lone_request_is_in_the_core_once_it_is_computed_and_has_waited() -> None:
    end = front(request=3.0)
    end.take(10.0, 7, 20)
    assert end.due == 10.0
    messages, taken = end.turn()
    assert not messages and [index for _, index in taken] == [7]
    assert taken[0][0] == pytest.approx(10 + 3 + 2)
    assert end.due == math.inf


def test_all_of_a_burst_are_read_before_the_first_is_handed_on() -> None:
    end = front()
    for index in range(4):
        end.take(0.0, index, 0)
    _, taken = end.turn()
    assert [at for at, _ in taken] == pytest.approx([4 * READ + (index + 1) * (1 - READ) for index in range(4)])


def test_what_comes_during_a_turn_waits_for_the_next() -> None:
    end = front()
    end.take(0.0, 0, 0)
    end.turn()
    end.take(0.3, 1, 0)
    end.bring(0.6, [output(0, 5)])
    end.bring(1.1, [output(0, 6)])
    assert end.due == 1.0
    messages, taken = end.turn()
    assert [[each.token_ids for each in outputs] for _, outputs in messages] == [[(5,)]]
    assert messages[0][0] == pytest.approx(1 + 0.5 + 0.2 + 0.01)
    assert [index for _, index in taken] == [1] and taken[0][0] == pytest.approx(1.71 + 1)
    assert end.due == pytest.approx(2.71)


def test_tokens_of_several_steps_are_one_message_a_request() -> None:
    end = front()
    end.bring(0.0, TokenOutputs([1, 2], [0, 0], [(5,), (6,)]))
    end.turn()
    end.bring(0.1, TokenOutputs([1, 2], [0, 0], [(7,), (8,)]))
    end.bring(0.2, [output(2, 9)])
    begun = end.due
    messages, _ = end.turn()
    assert [[each.token_ids for each in outputs] for _, outputs in messages] == [[(7,)], [(8,), (9,)]]
    assert [at - begun for at, _ in messages] == pytest.approx([0.5 + 0.21, 0.5 + 0.21 + 0.22])


def test_what_a_front_end_does_for_an_answer_that_has_ended_comes_behind_its_last_token() -> None:
    end = FrontEnd(FrontPrices(1.0, 0.0, FrontWork(message=0.2, ended=0.7)))
    end.bring(0.0, [SequenceOutput(0, 0, (5,), finished=Finished(FinishReason.LENGTH)), output(1, 6)])
    messages, _ = end.turn()
    assert [at for at, _ in messages] == pytest.approx([0.2, 0.2 + 0.7 + 0.2])


def test_prices_that_say_nothing_of_work_take_a_request_wholly_and_tokens_not_at_all() -> None:
    end = FrontEnd(FrontPrices(2.0, 0.0))
    end.bring(0.0, [output(1, 5)])
    end.take(0.0, 2, 9)
    messages, taken = end.turn()
    assert messages[0][0] == 0.0 and taken == [(2.0, 2)]
