"""Long contexts on the card: a prompt of 16,000 tokens in chunks, windows of hundreds of tokens, many blocks of the
largest size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from tests.support import tiny
from tests.support.card import STRICT, Judge, params, require_card

require_card()

POSITIONS = 32768
LENGTH = 16000


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def scores(found: Any) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in found.prompt_logprobs[1:]]


def transformers_scores(model: Any, prompt: list[int]) -> tuple[list[float], list[float]]:
    """The log-probability of each next token, and of the best one, by transformers on the CPU."""
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        scores = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), scores.amax(-1).tolist()


@pytest.mark.parametrize("budget", [2048, 8192, 16384])
def test_a_long_prompt_scores_as_with_transformers(budget: int, tmp_path: Path) -> None:
    """16,000 positions in chunks, every one of them scored, then decoded on; other requests decode meanwhile."""
    folder = tmp_path / "model"
    fields: dict[str, Any] = {"max_position_embeddings": POSITIONS, "num_hidden_layers": 2}
    tiny.save("llama", folder, **fields)
    prompt, short = prompt_of(LENGTH), [prompt_of(30, seed) for seed in range(2, 8)]
    sizes = {"max_model_len": POSITIONS, "num_blocks": 300, "max_num_batched_tokens": budget, "block_size": 128}
    with LLM(str(folder), **{**STRICT, **sizes}) as llm:
        asked = [params(max_tokens=8, prompt_logprobs=0), *[params(max_tokens=40)] * len(short)]
        found = llm.generate([{"prompt_token_ids": each} for each in (prompt, *short)], asked, use_tqdm=False)
        again = llm.generate({"prompt_token_ids": prompt}, params(max_tokens=8), use_tqdm=False)[0]
    wanted, best = transformers_scores(tiny.create("llama", **fields), prompt + found[0].outputs[0].token_ids)
    assert scores(found[0]) == pytest.approx(wanted[: LENGTH - 1], abs=2e-3)
    assert wanted[LENGTH - 1 :] == pytest.approx(best[LENGTH - 1 :], abs=1e-3)  # greedy
    assert (
        again.num_cached_tokens == (LENGTH - 1) // 128 * 128
        and again.outputs[0].token_ids == found[0].outputs[0].token_ids
    )
    judge = Judge(str(folder), max_model_len=256)
    for each, one, said in zip(short, asked[1:], found[1:], strict=True):
        judge.check(each, one, said)
    judge.close()


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_long_windows_scored_and_decoded_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    """A window that begins inside a block; blocks behind it are given back and used again."""
    folder = str(tiny.save(name, tmp_path, max_position_embeddings=4096, sliding_window=300))
    judge, asked = Judge(folder, max_model_len=4096), params(max_tokens=30, prompt_logprobs=0)
    prompts = [prompt_of(length, length) for length in (40, 299, 300, 301, 900, 2500)]
    with LLM(
        folder, **{**STRICT, "max_model_len": 4096, "num_blocks": 80, "block_size": 64, "max_num_batched_tokens": 700}
    ) as llm:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    for prompt, found in zip(prompts, answers, strict=True):
        judge.check(prompt, asked, found)
    judge.close()
