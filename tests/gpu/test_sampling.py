"""Everything a request can ask of sampling, on the card and on the CPU: the same seeds give the same tokens in
float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from tests.support.card import STRICT, Judge, params, require_card

require_card()

PROMPTS = [[(13 * i + 5 * j) % 8000 for j in range(3 + 17 * i % 61)] for i in range(7)]
WARM: dict[str, Any] = {"temperature": 1.0}

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7, "seed": 1},
    "hot": {"temperature": 3.0, "seed": 2},
    "no seed of its own": {"temperature": 1.0},
    "negative seed": {**WARM, "seed": -(2**63)},
    "largest seed": {**WARM, "seed": 2**64 - 1},
    "top_k": {**WARM, "top_k": 7, "seed": 3},
    "top_k 1": {**WARM, "top_k": 1, "seed": 3},
    "top_p": {**WARM, "top_p": 0.7, "seed": 4},
    "top_p tiny": {**WARM, "top_p": 1e-6, "seed": 4},
    "min_p": {**WARM, "min_p": 0.08, "seed": 5},
    "all filters": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition": {"repetition_penalty": 1.4},
    "penalties, sampled": {
        **WARM,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "seed": 7,
    },
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 0.8},
    "logit_bias": {"logit_bias": {11: 4.0, 300: -100.0, 7000: 2.5}},
    "logit_bias, sampled": {**WARM, "logit_bias": {index: 3.0 for index in range(0, 900, 7)}, "seed": 8},
    "allowed ids": {"allowed_token_ids": tuple(range(100, 200, 3))},
    "allowed ids, sampled": {**WARM, "allowed_token_ids": (5, 6, 7, 4000), "seed": 9},
    "bad words": {"bad_words": ("the", "a", "e", " said", "Once upon")},
    "bad words, sampled": {**WARM, "bad_words": ("the", " in", " of", "s"), "seed": 10},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False},
    "min_tokens and stop ids": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 1000, 2)), "ignore_eos": False},
    "stop ids": {**WARM, "stop_token_ids": tuple(range(0, 600)), "seed": 11},
    "stop strings": {**WARM, "stop": ("e", " t"), "seed": 12, "include_stop_str_in_output": True},
    "logprobs": {"logprobs": 5},
    "logprobs of none": {**WARM, "logprobs": 0, "seed": 13},
    "prompt_logprobs": {"prompt_logprobs": 3},
    "every score": {**WARM, "logprobs": 20, "prompt_logprobs": 20, "seed": 14},
    "n": {**WARM, "n": 3, "seed": 15},
    "n, scored and penalised": {
        **WARM,
        "n": 4,
        "seed": 16,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "frequency_penalty": 0.5,
        "top_p": 0.8,
    },
    "everything": {
        "n": 2,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 60,
        "min_p": 0.005,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {17: 2.0, 18: -3.0},
        "bad_words": ("and", "er"),
        "min_tokens": 5,
        "seed": 17,
        "logprobs": 3,
        "prompt_logprobs": 2,
    },
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge(max_model_len=512)
    yield made
    made.close()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**STRICT, max_model_len=512) as made:
        yield made


def asked_for(feature: str) -> SamplingParams:
    return params(**FEATURES[feature])


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_gives_the_tokens_of_the_cpu(llm: LLM, judge: Judge, feature: str) -> None:
    """In the company of greedy rows, which must not notice; a seed of its own, because an engine's own seeds follow the
    request's number."""
    asked, plain = asked_for(feature), params()
    if asked.seed is None:
        asked = params(**FEATURES[feature], seed=1234)
    both = [asked if index % 2 else plain for index in range(2 * len(PROMPTS))]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], both, use_tqdm=False)
    for prompt, one, each in zip(prompts, both, found, strict=True):
        judge.check(prompt, one, each)


def test_all_features_in_one_batch(llm: LLM, judge: Judge) -> None:
    asked = [params(**{"seed": 99, **fields}) for fields in FEATURES.values()]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(asked))]
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    for prompt, one, each in zip(prompts, asked, found, strict=True):
        judge.check(prompt, one, each)


@pytest.mark.parametrize("feature", FEATURES)
def test_nothing_between_submit_and_collect_waits_for_the_device(llm: LLM, feature: str) -> None:
    """torch raises where the host would wait for the device; results are read outside of that."""
    executor = llm.engine.core.executor
    submit = executor.submit

    def watched(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.submit = watched  # type: ignore[method-assign]
    try:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked_for(feature), use_tqdm=False)
    finally:
        executor.submit = submit  # type: ignore[method-assign]
    assert [each.outputs[0].stop_reason for each in found if each.outputs[0].finish_reason == "error"] == []


def test_one_unusable_row_leaves_the_others_alone(llm: LLM, judge: Judge) -> None:
    """Every token of one request is ruled out: its own error, not the step's."""
    ruled_out = params(allowed_token_ids=(40, 41), stop_token_ids=(40, 41), min_tokens=3, ignore_eos=False)
    both = [ruled_out if index == 3 else params() for index in range(len(PROMPTS))]
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], both, use_tqdm=False)
    assert found[3].outputs[0].finish_reason == "error" and "unusable" in str(found[3].outputs[0].stop_reason)
    for index, (prompt, each) in enumerate(zip(PROMPTS, found, strict=True)):
        if index != 3:
            judge.check(prompt, params(), each)
