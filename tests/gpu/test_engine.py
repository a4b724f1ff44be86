"""The whole engine on the card, however it is run, against the same requests one by one on the CPU: float32, so tokens
are equal.

Graph = eager, batched = alone, chunked = whole, cached = recomputed, overlap 0 = 1 = 2, preempted = not.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.request import RequestOutput
from tests.support.card import STRICT, Judge, params, require_card, runner_of

require_card()

PROMPTS = [[(7 * i + 3 * j) % 8000 for j in range(5 + 11 * i % 97)] for i in range(23)]
ASKED = (
    params(max_tokens=30, logprobs=1),
    params(max_tokens=30, temperature=0.8, top_p=0.9, top_k=50, seed=3, logprobs=2, prompt_logprobs=1),
)

MODES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "eager": {"enforce_eager": True},
    "eager, overlap 0": {"enforce_eager": True, "overlap": 0},
    "overlap 0": {"overlap": 0},
    "overlap 1": {"overlap": 1},
    "overlap 2": {"overlap": 2},
    "chunks of 33": {"max_num_batched_tokens": 33},
    "chunks of 1": {"max_num_batched_tokens": 1},
    "alone": {"max_num_seqs": 1},
    "three at once": {"max_num_seqs": 3, "overlap": 2},
    "all at once": {"max_num_seqs": 64},
    "blocks of 16": {"block_size": 16},
    "nothing cached": {"enable_prefix_caching": False},
    "everything recomputed": {"technique": {"kv_caching": False}},
    "padded": {"technique": {"token_concatenation": False}},
    "few logits at once": {"max_logits_rows": 3},
    "torch twins": {"disabled_kernels": ("triton",)},
    "preempted": {"num_blocks": 24, "block_size": 16, "max_num_seqs": 64},
    "preempted, overlap 2": {"num_blocks": 24, "block_size": 16, "overlap": 2},
}


def ask(llm: LLM, asked: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_cpu(judge: Judge, mode: str) -> None:
    with LLM(**{**STRICT, **MODES[mode]}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)
        preempted = llm.engine.core.stats().counters.preemptions
    assert (preempted > 0) == mode.startswith("preempted")


def test_what_was_cached_gives_the_same_tokens(judge: Judge) -> None:
    with LLM(**{**STRICT, "block_size": 16}) as llm:
        first, again = ask(llm, ASKED[0]), ask(llm, ASKED[0])
    for prompt, found in zip(PROMPTS, again, strict=True):
        judge.check(prompt, ASKED[0], found)
    assert sum(each.num_cached_tokens for each in again) > sum(each.num_cached_tokens for each in first) + 200


def test_equal_prompts_are_computed_once_and_answered_alike(judge: Judge) -> None:
    prompt = [(5 * j) % 8000 for j in range(300)]
    with LLM(**STRICT) as llm:
        found = llm.generate([{"prompt_token_ids": prompt}] * 40, ASKED[0], use_tqdm=False)
    for each in found:
        judge.check(prompt, ASKED[0], each)
    assert sum(each.num_cached_tokens > 0 for each in found) >= 24


def test_decode_steps_are_graphs_unless_asked_not_to_be() -> None:
    with LLM(**STRICT) as graphed, LLM(**{**STRICT, "enforce_eager": True}) as eager:
        for llm in (graphed, eager):
            ask(llm, params(max_tokens=8))
        assert runner_of(graphed).passes.graphs.captured == (1, 2, 4, 8, 16) and runner_of(eager).passes.graphs is None
