"""bfloat16 on the card is about as near to float32 as bfloat16 on the CPU: scores of the same texts, by models of many
shapes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from tests.support import tiny
from tests.support.card import STRICT, params, require_card

require_card()

PRECISIONS: tuple[dict[str, Any], ...] = (
    {"device": "cpu", "strict_kernels": False},
    {"device": "cpu", "strict_kernels": False, "dtype": "bfloat16"},
    {"dtype": "bfloat16"},
)
FAMILIES = ("llama", "gemma2", "phi3", "gpt2", "starcoder", "qwen3-moe")
LENGTHS = (1, 5, 12, 13, 40, 64, 90, 110)


def scores(model: str | None, prompts: list[list[int]], **keywords: Any) -> list[float]:
    """The log-probability of every token after the first of each prompt."""
    with LLM(model, **{**STRICT, "max_model_len": 120, "num_blocks": 64, **keywords}) as llm:
        found = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            params(max_tokens=6, prompt_logprobs=0),
            use_tqdm=False,
        )
    assert all(len(each.outputs[0].token_ids) == 6 for each in found)
    return [next(iter(entry.values())).logprob for each in found for entry in (each.prompt_logprobs or ())[1:] if entry]


def check(model: str | None, vocab_size: int) -> None:
    draw = random.Random(4)
    prompts = [draw.choices(range(vocab_size), k=length) for length in LENGTHS]
    exact, on_cpu, on_card = (scores(model, prompts, **keywords) for keywords in PRECISIONS)
    assert len(exact) == sum(LENGTHS) - len(LENGTHS)
    near, nearer = (
        sum(abs(a - b) for a, b in zip(exact, other, strict=True)) / len(exact) for other in (on_card, on_cpu)
    )
    assert near <= 1.5 * nearer + 2e-3, (near, nearer)


def written_scores(**keywords: Any) -> list[float]:
    """The log-probability of each token that 40 answers behind one prefix are made to write: raw, so that nothing of
    the force is in it."""
    draw = random.Random(6)
    prefix = draw.choices(range(8000), k=300)
    prompts = [{"prompt_token_ids": [*prefix, *draw.choices(range(8000), k=draw.randint(1, 40))]} for _ in range(40)]
    forced = params(max_tokens=10, allowed_token_ids=(77,), logprobs=0, ignore_eos=True)
    with LLM(
        **{**STRICT, "max_model_len": 400, "num_blocks": 640, "block_size": 16, "max_num_seqs": 64, **keywords}
    ) as llm:
        found = llm.generate(prompts, forced, use_tqdm=False)
    return [next(iter(entry.values())).logprob for each in found for entry in each.outputs[0].logprobs or ()]


@pytest.mark.parametrize("cascade", [False, True], ids=["", "read once"])
def test_answers_behind_a_shared_prefix(cascade: bool) -> None:
    exact, on_cpu, on_card = (
        written_scores(**each)
        for each in (*PRECISIONS[:2], {**PRECISIONS[2], "technique": {"cascade_attention": cascade}})
    )
    assert len(exact) == 400
    near, nearer = (
        sum(abs(a - b) for a, b in zip(exact, other, strict=True)) / len(exact) for other in (on_card, on_cpu)
    )
    assert near <= 1.5 * nearer + 2e-3, (near, nearer)


def test_the_demo_model() -> None:
    check(None, 8000)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, tmp_path: Path) -> None:
    check(str(tiny.save(name, tmp_path, seed=3)), 256)
