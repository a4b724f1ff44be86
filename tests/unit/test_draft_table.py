"""Sequences that draft, planned and taken as columns, get what they would have got one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.config import CacheConfig
from headrace.engine.connection import Event, pack_step, unpack_step
from headrace.engine.core import EngineCore
from headrace.processes.messages import Unpacker
from headrace.request import Request, Runs, StepResult, TokenOutputs, column_of, counts_of
from headrace.scheduler import draft_table
from tests.support.hash_engine import VOCAB, Answers, assert_at_rest, engine, request

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few blocks": {"num_blocks": 40},
    "window": {"window": 8},
    "no prefixes": {"cache": CacheConfig(enable_prefix_caching=False)},
    "whole prompts": {"chunked_prefill": False},
    "reserved": {"cache": CacheConfig(paged_allocation=False)},
    "priority": {"scheduling_policy": "priority", "num_blocks": 50},
}


def _asked(draw: random.Random, number: int) -> Request:
    """Most are plain; some have something that needs a thought at some token."""
    shared = list(range(30, 30 + draw.choice([0, 0, 9, 17])))
    fields: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 30, 60, 90]), "ignore_eos": draw.random() < 0.7}
    if draw.random() < 0.1:
        fields |= {"n": 2, "temperature": 1.0}
    if draw.random() < 0.1:
        fields |= {"logprobs": 1} if draw.random() < 0.5 else {"speculative": False}
    if draw.random() < 0.3:
        fields |= {"stop_token_ids": tuple(draw.sample(range(VOCAB), 20)), "min_tokens": draw.choice([0, 1])}
    return request(number, shared + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))], seed=number, **fields)


def _as_runs(core: EngineCore) -> None:
    """Results as a device's step has them that was drawn as a whole."""
    real = core.executor.collect

    def collect(ticket: Any) -> StepResult:
        result = real(ticket)
        column, counts = column_of(result.tokens), counts_of(result.tokens)
        return replace(result, tokens=Runs(np.array(column, dtype=np.int32), np.array(counts, dtype=np.int32)))

    core.executor.collect = collect  # type: ignore[method-assign]


def _story(depth: int, seed: int, *, table: bool, **settings: Any) -> tuple[Answers, int]:
    """Requests that come, leave and are cut short at turns that hang on nothing but ``seed``; how many of them came as
    columns."""
    draw, core = random.Random(seed), engine(depth=depth, max_num_seqs=6, max_drafts=3, **settings)
    _as_runs(core)
    answers, columns, decoder = Answers(), 0, Unpacker(Event)
    if not table:
        core.scheduler.roster.table = None
    for turn in range(4000):
        if turn < 160 and draw.random() < (0.9 if turn < 8 else 0.03):
            core.add(_asked(draw, turn))
        if turn < 160 and draw.random() < 0.01:
            core.abort(draw.randrange(turn + 1))
        if turn < 160 and draw.random() < 0.01:
            core.finish(draw.randrange(turn + 1), 0, draw.randint(0, 3))
        if not core.has_work:
            if turn >= 160:
                break
            continue
        outputs = core.step()
        if isinstance(outputs, TokenOutputs):
            columns += 1
            (frame,) = decoder.feed(pack_step(outputs))
            assert list(unpack_step(frame)) == list(outputs)
        answers.take(outputs)
    assert_at_rest(core)
    return answers, columns


@pytest.mark.parametrize("name", SETTINGS)
def test_the_table_is_never_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_table, "_KEPT", 16)
    columns = 0
    for depth in range(3):
        alone, together = (_story(depth, 7 + depth, table=table, **SETTINGS[name]) for table in (False, True))
        kept = {key: tokens for key, tokens in alone[0].tokens.items() if key in alone[0].finished}
        assert {key: together[0].tokens[key] for key in kept if key in together[0].finished} == {
            key: tokens for key, tokens in kept.items() if key in together[0].finished
        }
        reasons = [{key: each.reason for key, each in found[0].finished.items()} for found in (alone, together)]
        assert reasons[0] == reasons[1] and len(kept) > 5
        columns += together[1]
    assert columns > 20
