"""The engine without a model that other tests lean on: it notices what it must, and real grammars are followed in it
whatever happens.

Whole lives of the control plane, with everything that can happen to it, are in tests/reliability/test_simulation.py.
"""

from __future__ import annotations

import random

import pytest

from headrace.engine.keyed_hash import keyed_hash_info
from headrace.request import FinishReason, Request
from tests.support.grammars import CONSTRAINTS, create_masks, expected_under_grammar
from tests.support.hash_engine import Answers, CheckedExecutor, assert_at_rest, check_books, engine, expected, request


def test_a_planted_reference_leak_is_found() -> None:
    core = engine()
    core.add(request(0, range(10, 30)))
    for _ in range(4):
        core.step()
    core.scheduler.cache.pools[0].acquire(
        next(b for b in core.scheduler.roster.running[0].kv.tables[0] if b is not None)
    )
    with pytest.raises(AssertionError, match="references"):
        check_books(core)


def test_a_planted_wrong_table_is_found() -> None:
    core = engine()
    core.add(request(0, range(10, 30)))
    core.step()
    row = core.executor._rows[core.scheduler.roster.running[0].row]  # type: ignore[attr-defined]
    row.tables[0][0] = row.tables[0][1]
    with pytest.raises(AssertionError, match="does not hold"):
        core.step()


def _asked(draw: random.Random, number: int) -> Request:
    """Half of them follow a grammar."""
    wanted = draw.choice((None, *CONSTRAINTS)) if draw.random() < 0.6 else None
    count = draw.randint(1, 16)
    least = draw.choice((0, 0, 4)) if wanted is not None else 0  # elsewhere it is the sampler that holds back ends
    return request(
        number, range(20, 21 + draw.randint(0, 12)), max_tokens=count, n=draw.choice((1, 1, 2)), seed=number, structured_outputs=wanted,
        ignore_eos=draw.random() < 0.5, min_tokens=min(least, count), stop_token_ids=draw.sample(range(512), 8),
    )  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_real_grammars_are_followed_through_failures_preemptions_and_aborts(depth: int) -> None:
    for seed in range(4):
        draw = random.Random(seed)
        info = keyed_hash_info(vocab_size=512, max_model_len=60, max_num_seqs=4, num_blocks=12, block_size=4)
        executor = CheckedExecutor(info, check=True, fault=lambda plan, seed=seed: plan.step_id % 31 == 7 + seed)  # type: ignore[misc]
        core, answers, gone = (
            engine(depth=depth, executor=executor, info=info, max_num_seqs=4, budget=8, masks=create_masks()),
            Answers(),
            set(),
        )
        asked = [_asked(draw, number) for number in range(16)]
        for each in asked:
            core.add(each)
            answers.take(output for output in core.step() if output.request_id not in gone)
            if draw.random() < 0.1:
                gone.add(each.request_id)
                core.abort(each.request_id)
        while core.has_work:
            answers.take(output for output in core.step() if output.request_id not in gone)
            check_books(core)
        assert_at_rest(core)
        for each in asked:
            if each.request_id not in gone:
                _check(each, answers, core.scheduler.max_sequence_tokens)


def _check(asked: Request, answers: Answers, limit: int) -> None:
    oracle = expected if asked.params.structured_outputs is None else expected_under_grammar
    for index in range(asked.params.n):
        found, wanted = answers.tokens[asked.request_id, index], oracle(asked, index=index, max_model_len=limit)
        failed = answers.finished[asked.request_id, index].reason is FinishReason.ERROR
        assert found == (wanted[: len(found)] if failed else wanted)
