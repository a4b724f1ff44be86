"""The whole engine on the card against the same engine on the CPU: float32, so tokens must be equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * j) % 8000 for j in range(5 + 11 * i % 97)]} for i in range(37)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=3, max_tokens=30, ignore_eos=True, detokenize=False, logprobs=2)

Answers = tuple[list[list[int]], list[list[int]]]


def answers(**keywords: Any) -> Answers:
    with LLM(dtype="float32", kv_cache_memory=None if "num_blocks" in keywords else 2**30, **keywords) as llm:
        return tuple([answer.outputs[0].token_ids for answer in llm.generate(PROMPTS, params, use_tqdm=False)] for params in (GREEDY, SAMPLED))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def on_cpu() -> Answers:
    return answers(device="cpu")


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "keywords",
    [
        {"enforce_eager": True, "overlap": 0},
        {"overlap": 0},
        {"overlap": 1},
        {"overlap": 2},
        {"max_num_batched_tokens": 33},
        {"max_num_seqs": 3},
        {"block_size": 16},
        {"enable_prefix_caching": False},
        {"num_blocks": 24, "block_size": 16},  # a tiny cache: sequences are preempted
    ],
    ids=str,
)
def test_tokens_are_those_of_the_cpu(on_cpu: Answers, keywords: dict[str, Any]) -> None:
    """Graph = eager, depth 0 = 1 = 2, chunked = whole, batched = few, cached = recomputed, preempted = not."""
    assert answers(device="cuda", **keywords) == on_cpu


def test_memory_comes_back_when_an_engine_is_closed() -> None:
    answers(device="cuda")
    before = torch.cuda.mem_get_info()[0]
    answers(device="cuda")
    assert torch.cuda.mem_get_info()[0] >= before - 2**26
