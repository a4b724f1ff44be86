"""How an engine is run changes no answer: random requests in random modes, against each request by itself.

``tests.support.modes`` draws both from the seed that a failing case is named by. KV blocks that nobody has written are
NaN.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from tests.support import modes, tiny
from tests.support.kernel_cases import native

SEEDS, LONG_SEEDS = range(6), range(100, 150)


@pytest.fixture(scope="module", params=modes.FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_mode_changes_an_answer(model: str, oracle: modes.Oracle, seed: int) -> None:
    check(model, oracle, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_no_mode_changes_an_answer_at_length(model: str, oracle: modes.Oracle, seed: int) -> None:
    check(model, oracle, seed)


def check(model: str | None, oracle: modes.Oracle, seed: int) -> None:
    rng = random.Random(seed)
    cases = modes.draw_cases(rng, oracle.vocab_size, 4)
    mode = modes.draw_mode(rng)
    answers = modes.run_trial(model, mode, cases, rng)
    for case, found in zip(cases, answers, strict=True):
        if found is not None:
            modes.compare(found, oracle.answer(case), may_fail=mode.failing > 0)


def test_the_drawn_modes_meet_in_pairs() -> None:
    def drawn(seed: int) -> list[dict[str, bool]]:
        rng = random.Random(seed)
        cases = modes.draw_cases(rng, 300, 4)
        mode = modes.draw_mode(rng)
        return [modes.features(mode, case.params) for case in cases]

    assert modes.pair_coverage(trial for seed in (*SEEDS, *LONG_SEEDS) for trial in drawn(seed)) >= 0.95
    assert modes.pair_coverage(drawn(0)) < 0.7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_answers_are_the_same_to_the_bit(tmp_path: Path, dtype: str) -> None:
    native(
        "linear", batch_invariant=True, dtype=torch.float32, in_features=64, out_features=64
    )  # skips where it cannot be built
    rng, folder = random.Random(3), str(tiny.save("gemma2", tmp_path))
    invariant = {"dtype": dtype, "batch_invariant": True}
    with LLM(folder, **{**modes.PLAIN, **invariant}, max_num_seqs=4, num_blocks=64) as alone:
        for _ in range(2):
            drawn = modes.draw_cases(rng, alone.info.vocab_size, 6)
            cases = [
                replace(case, leaves=None, params=replace(case.params, logprobs=2, prompt_logprobs=1)) for case in drawn
            ]
            mode = modes.draw_mode(rng, failing=False)
            mode.keywords |= {**invariant, "disabled_kernels": ()}
            for case, found in zip(cases, modes.run_trial(folder, mode, cases, rng), strict=True):
                wanted = alone.generate(case.prompt, case.params, use_tqdm=False)[0]
                assert (
                    found is not None
                    and found.outputs == wanted.outputs
                    and found.prompt_logprobs == wanted.prompt_logprobs
                )


def test_padding_reads_nothing_that_was_given_back(model: str, oracle: modes.Oracle) -> None:
    """Dummy tokens stand before the real ones of a chunk, so their windows begin earlier."""
    params = modes.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    cases = [modes.Case([7, *range(20, 79)], params), modes.Case([9, *range(20, 59)], params)]
    sizes = {"block_size": 8, "num_blocks": 64, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    mode = modes.Mode({**sizes, "token_concatenation": False, "disabled_kernels": modes.NATIVE})
    for case, found in zip(cases, modes.run_trial(model, mode, cases, random.Random(0)), strict=True):
        assert found is not None
        modes.compare(found, oracle.answer(case), may_fail=False)


def test_a_block_read_before_it_is_written_is_noticed(tmp_path: Path) -> None:
    """The negative control of the poison: keys that are lost show as an unusable row."""
    with LLM(str(tiny.save("llama", tmp_path)), **modes.PLAIN, num_blocks=16) as llm:
        modes.poison_blocks(llm)
        collector = llm.submit([5, 6, 7], modes.SamplingParams(max_tokens=4, ignore_eos=True, temperature=0))
        llm.turn()
        for cache in caches(llm):
            cache[:, :, :, :, 1] = float("nan")  # the second token's
        while not collector.finished:
            llm.turn()
    answer = collector.output().outputs[0]
    assert answer.finish_reason == "error" and len(answer.token_ids) == 1


def caches(llm: LLM) -> tuple[torch.Tensor, ...]:
    runner: Any = llm.engine.core.executor._runner  # type: ignore[attr-defined]
    return tuple(runner._kv_caches)
