"""Steps planned and taken as arrays are the steps that sequences would have had one by one: the same plans, outputs and
books."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.config import CacheConfig
from headrace.engine.connection import Event, pack_step, unpack_step
from headrace.engine.core import EngineCore
from headrace.engine.keyed_hash import KeyedHashExecutor
from headrace.processes.messages import Unpacker
from headrace.request import Request, SequenceOutput, Singles, TokenOutputs, column_of
from headrace.scheduler import plan_builder, scheduler
from tests.support.hash_engine import EOS, VOCAB, Answers, assert_at_rest, engine, expected, plans_of, request, run

NEVER = 10**9


class Told:
    """Everything an engine said: plans, outputs in order, what the scheduler decided, blocks in use after each turn."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.plans = plans_of(core)
        self.outputs: list[list[SequenceOutput]] = []
        self.books: list[Any] = []
        self.columns = 0

    def turn(self) -> None:
        outputs = self.core.step()
        self.columns += isinstance(outputs, TokenOutputs)
        self.outputs.append(list(outputs))
        cache = self.core.scheduler.cache
        self.books.append(
            (cache.num_used_blocks, sum(pool.num_cached for pool in cache.pools), self.core.scheduler.num_running)
        )


def _asked(draw: random.Random, number: int) -> Request:
    """Most are plain; some have something that needs a thought at some token, from the first on."""
    shared = list(range(30, 30 + draw.choice([0, 0, 9, 17])))
    prompt = shared + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
    fields: dict[str, Any] = {
        "max_tokens": draw.choice([1, 2, 30, 60, 90]),
        "seed": number,
        "ignore_eos": draw.random() < 0.7,
    }
    if draw.random() < 0.15:
        fields |= {"n": 2, "temperature": 1.0}
    if draw.random() < 0.1:
        fields |= {"logprobs": 1}
    if draw.random() < 0.3:
        fields |= {"stop_token_ids": tuple(draw.sample(range(VOCAB), 20)), "min_tokens": draw.choice([0, 1])}
    return request(number, prompt, **fields)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few blocks": {"num_blocks": 40},
    "window": {"window": 8},
    "no prefixes": {"cache": CacheConfig(enable_prefix_caching=False)},
    "whole prompts": {"chunked_prefill": False},
    "static batches": {"continuous_batching": False, "chunked_prefill": False},
    "priority": {"scheduling_policy": "priority", "num_blocks": 50},
    "reserved": {"cache": CacheConfig(paged_allocation=False)},
    "small budget": {"budget": 5},
    "steps fail": {"num_blocks": 50},
}


def _story(
    depth: int, seed: int, alike: int, monkeypatch: pytest.MonkeyPatch, *, fails: bool = False, **settings: Any
) -> Told:
    """Requests that come, leave and are cut short at turns that hang on nothing but ``seed``."""
    monkeypatch.setattr(scheduler, "STEPS_ALIKE", alike)
    draw, core = random.Random(seed), engine(depth=depth, max_num_seqs=6, **settings)
    told = Told(core)
    if fails:
        assert isinstance(core.executor, KeyedHashExecutor)
        core.executor._fault = lambda plan: random.Random(plan.step_id + 1000 * seed).random() < 0.03
    for turn in range(160):
        if draw.random() < (0.9 if turn < 8 else 0.02):
            core.add(_asked(draw, turn))
        if draw.random() < 0.008:
            core.abort(draw.randrange(turn + 1))
        if draw.random() < 0.008:
            core.finish(draw.randrange(turn + 1), 0, draw.randint(0, 3))
        if core.has_work:
            told.turn()
    while core.has_work:
        told.turn()
    assert_at_rest(core)
    return told


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_cohort_is_never_seen(depth: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    for seed in range(2):
        alone, together = (
            _story(depth, seed, alike, monkeypatch, fails=name == "steps fail", **SETTINGS[name])
            for alike in (NEVER, 0)
        )
        assert together.plans == alone.plans
        assert together.outputs == alone.outputs
        assert together.books == alone.books
        assert alone.columns == 0
        taken += together.columns
    assert taken > 20 or name == "small budget", "many steps are alike"


@pytest.mark.parametrize("most", [1, 3, 64])
def test_records_are_right_whenever_they_are_settled(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builder, "MOST_PENDING", most)
    draw, core, answers = random.Random(1), engine(depth=1), Answers()
    asked = [request(number, range(20, 25 + number), max_tokens=60) for number in range(5)]
    for each in asked:
        core.add(each)
    while core.has_work:
        answers.take(core.step())
        if draw.random() < 0.3:
            in_flight = len(core.scheduler.in_flight)
            core.scheduler.settle()
            for sequence in core.scheduler.roster:
                outputs = answers.tokens.get((sequence.request_id, 0), [])
                assert list(sequence.token_ids)[sequence.num_prompt_tokens :] == outputs
                assert sequence.num_tokens - len(sequence.token_ids) <= in_flight
                state = core.explain(sequence.request_id)
                assert state is not None and state.num_outputs == (len(outputs),)
    assert {number: answers.tokens[number, 0] for number in range(5)} == {
        number: expected(each) for number, each in enumerate(asked)
    }


def test_a_failed_step_leaves_no_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "STEPS_ALIKE", 0)
    core = engine(depth=1)
    for number in range(4):
        core.add(request(number, range(20, 30), max_tokens=40, stop_token_ids=(EOS,)))
    for _ in range(12):
        core.step()
    step = core.scheduler.in_flight[0].plan
    ended = core.scheduler.fail("the device is gone", 1.0)
    assert {end.request_id for end in ended} == {0, 1, 2, 3} and len(step.rows) == 4
    assert not core.scheduler.requests


def test_columns_are_outputs() -> None:
    columns = TokenOutputs([4, 5], [0, 1], [(7,), (8,)])
    assert list(columns) == [SequenceOutput(4, 0, (7,)), SequenceOutput(5, 1, (8,))] == columns[:]
    assert (columns[1], len(columns), bool(columns), bool(TokenOutputs([], [], []))) == (
        SequenceOutput(5, 1, (8,)),
        2,
        True,
        False,
    )


def sent(outputs: Sequence[SequenceOutput]) -> list[SequenceOutput]:
    (frame,) = Unpacker(Event).feed(pack_step(outputs))
    return list(unpack_step(frame))


def test_columns_are_sent_as_their_outputs_would_be() -> None:
    for indices in ([0, 0, 0], [0, 2, 1]):
        columns = TokenOutputs([2**40, 5, 6], indices, [(7,), (8,), (2**30,)])
        assert sent(columns) == sent(list(columns)) == list(columns)


def test_steady_decoding_is_a_cohort() -> None:
    core = engine(depth=1)
    for number in range(6):
        core.add(request(number, range(20, 25), max_tokens=100))
    told = Told(core)
    while core.has_work:
        told.turn()
    assert told.columns > 30, "every fourth step needs blocks, and every fourth fills some"
    assert run(core).tokens == {}


def test_a_column_of_single_tokens_is_the_sequence_of_tuples_it_stands_for() -> None:
    column, plain = Singles([7, 8, 9]), [(7,), (8,), (9,)]
    assert (
        column == plain
        and list(column) == plain
        and column == Singles([7, 8, 9])
        and column != [(7,), (8, 9)]
        and column != 5
    )
    assert (column[0], column[-1], column[1:], len(column), bool(Singles([]))) == ((7,), (9,), plain[1:], 3, False)
    assert column_of(column) == column_of(plain) == [7, 8, 9] and column_of([(1, 2), (), (3,)]) == [1, 2, 3]
    with pytest.raises(IndexError):
        column[3]
