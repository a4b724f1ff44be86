"""Ranks that share one card, whose sums go through memory that both processes map: float32, against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace import LLM
from tests.support.card import STRICT, Judge, params, require_card

require_card()
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("sums in one shot need compute capability 9", allow_module_level=True)

PROMPTS = [[(7 * i + 3 * j) % 8000 for j in range(5 + 11 * i % 97)] for i in range(23)]
MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager, chunks of 33": {"enforce_eager": True, "max_num_batched_tokens": 33},
    "preempted, overlap 2": {"num_blocks": 24, "block_size": 16, "overlap": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_cpu(judge: Judge, mode: str) -> None:
    shared = {"tensor_parallel_size": 2, "ranks_per_device": 2, "kv_cache_memory": 2**28}
    with LLM(**{**STRICT, **shared, **MODES[mode]}) as llm:
        said = {each.name: each.reason for each in llm.info.decisions}
        assert "on one device; over gloo, and sums of up to" in said["ranks"]
        for asked in (params(max_tokens=20, logprobs=1), params(max_tokens=20, temperature=0.8, top_k=50, seed=3)):
            answers = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], asked, use_tqdm=False)
            for prompt, found in zip(PROMPTS, answers, strict=True):
                judge.check(prompt, asked, found)
