"""How an engine is run on the card changes no answer: random requests in random modes, against each request alone on
the CPU.

``tests.support.modes`` draws both from the seed that a failing case is named by: odd budgets, tiny caches, switches of
cache, scheduler and steps, steps that fail, streams that are left. KV blocks that nobody has written are NaN.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM
from tests.support import modes, tiny
from tests.support.card import STRICT, Judge, params, require_card, runner_of

require_card()

SEEDS = range(8)


@pytest.fixture(scope="module", params=modes.FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def judge(model: str) -> Iterator[Judge]:
    made = Judge(model, max_model_len=modes.LONGEST, num_blocks=64)
    yield made
    made.close()


def draw_mode(rng: random.Random, *, failing: bool = True) -> modes.Mode:
    """A mode of the CPU's tests on the card; batch invariance has tests of its own."""
    mode = modes.draw_mode(rng, failing=failing)
    mode.keywords |= {**STRICT, **mode.keywords, "disabled_kernels": (), "batch_invariant": False}
    mode.keywords |= {"enforce_eager": rng.random() < 0.25, "block_size": rng.choice((8, 16, 128))}
    mode.keywords["num_blocks"] = -(-modes.LONGEST // mode.keywords["block_size"]) + rng.choice((0, 1, 2, 5, 60))
    return mode


@pytest.mark.parametrize("seed", SEEDS)
def test_no_mode_changes_an_answer(model: str, judge: Judge, seed: int) -> None:
    check(model, judge, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_no_mode_changes_an_answer_at_length(model: str, judge: Judge, seed: int) -> None:
    check(model, judge, seed)


def check(model: str, judge: Judge, seed: int) -> None:
    rng = random.Random(seed)
    cases = modes.draw_cases(rng, judge.vocab_size, 10)
    mode = draw_mode(rng)
    answers = modes.run_trial(model, mode, cases, rng)
    for case, found in zip(cases, answers, strict=True):
        if found is not None:
            judge.check(case.prompt, case.params, found, may_fail=mode.failing > 0)


def test_a_block_read_before_it_is_written_is_noticed(tmp_path: Path) -> None:
    """The negative control of the poison: keys that are lost show as an unusable row, from a graph too."""
    with LLM(
        str(tiny.save("llama", tmp_path)), **{**STRICT, "num_blocks": 16, "max_model_len": 120, "overlap": 0}
    ) as llm:
        modes.poison_blocks(llm)
        collector = llm.submit({"prompt_token_ids": [5, 6, 7]}, params(max_tokens=12))
        for _ in range(6):
            llm.turn()
        for cache in runner_of(llm)._kv_caches:
            cache[:, :, :, :, 1] = float("nan")  # the second token's
        while not collector.finished:
            llm.turn()
    answer = collector.output().outputs[0]
    assert answer.finish_reason == "error" and len(answer.token_ids) == 6
