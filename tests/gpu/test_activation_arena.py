"""Steps in the arena on the card: the tokens and logprobs of torch's allocator, with everything dead overwritten, and
nothing more asked for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from headrace.kernels.candidate import plainly_empty
from headrace.kernels.linear.reference import LinearInto
from headrace.worker import worker
from headrace.worker.arena import Arena, sees_lifetimes
from tests.support import tiny
from tests.support.card import STRICT, params, require_card, runner_of
from tests.support.poisoned import PoisonedArena

require_card()

FAMILIES = ("llama", "gemma2", "qwen3", "qwen3-moe-mixed", "gpt2")
DEMO: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "eager": {"enforce_eager": True},
    "eager, overlap 0": {"enforce_eager": True, "overlap": 0},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, eager": {"dtype": "bfloat16", "enforce_eager": True},
    "batch invariant": {"batch_invariant": True},
    "chunks of 70": {"max_num_batched_tokens": 70},
    "whole last layer": {"technique": {"last_layer_pruning": False}},
    "padded": {"technique": {"token_concatenation": False}},
}
ASKED = params(max_tokens=6, logprobs=3)


def arena_of(llm: LLM) -> Arena:
    arena: Arena = runner_of(llm).passes.arena
    return arena


def answers(llm: LLM, seed: int = 0) -> list[Any]:
    """Alone, then together."""
    draw, found = random.Random(seed), []
    prompts = [
        {"prompt_token_ids": draw.choices(range(256), k=length)}
        for length in (1, 5, 64, 70, 33, 17, 90, 100, 64, 41, 3)
    ]
    for asked in (*([prompt] for prompt in prompts), prompts):
        found += [
            (each.outputs[0].token_ids, each.outputs[0].logprobs) for each in llm.generate(asked, ASKED, use_tqdm=False)
        ]
    return found


def compare(monkeypatch: pytest.MonkeyPatch, model: str | None, **keywords: Any) -> None:
    technique = {"prompt_graphs": False, **keywords.pop("technique", {})}  # graphs need no arena
    with LLM(model, **{**STRICT, **keywords}, technique={**technique, "activation_arena": False}) as llm:
        expected = answers(llm)
    monkeypatch.setattr(worker, "create_arena", PoisonedArena)
    with LLM(model, **{**STRICT, **keywords}, technique=technique) as llm:
        assert answers(llm) == expected
        served = arena_of(llm).served
        assert served.planned > 8 and served.results > 8 * served.planned, served


def test_this_torch_says_when_memory_is_let_go() -> None:
    assert sees_lifetimes()


@pytest.mark.parametrize("mode", DEMO)
def test_whatever_the_mode_tokens_are_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, None, **DEMO[mode])


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_the_family_tokens_are_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, str(tiny.save(name, tmp_path, seed=3)), max_model_len=120, num_blocks=64)


@pytest.mark.parametrize("biased", [False, True])
def test_torchs_product_has_the_same_bits_wherever_it_lies(biased: bool) -> None:
    with torch.inference_mode():
        for outs, ins in ((3072, 2048), (2048, 8192), (6144, 4096)):
            weight = torch.randn(outs, ins, device="cuda").bfloat16()
            bias = torch.randn(outs, device="cuda").bfloat16() if biased else None
            for rows in (1, 7, 65, 128, 200, 513, 1024, 2047):
                x = torch.randn(rows, ins, device="cuda").bfloat16()
                assert torch.equal(
                    LinearInto(weight.t(), bias, plainly_empty)(x), torch.nn.functional.linear(x, weight, bias)
                ), (outs, ins, rows)


def test_a_prompt_is_one_request_for_memory_and_the_buffer_is_given_back() -> None:
    with LLM(**STRICT, technique={"prompt_graphs": False}) as llm:
        prompt = {"prompt_token_ids": [5] * 77}
        for _ in range(4):
            llm.generate([prompt], params(max_tokens=1), use_tqdm=False)
        arena = arena_of(llm)
        before, served = torch.cuda.memory_allocated(), arena.served.results
        llm.generate([{"prompt_token_ids": [6] * 77}], params(max_tokens=1), use_tqdm=False)
        assert torch.cuda.memory_allocated() == before and arena.served.results > served
        assert arena.buffer._storage is not None and arena.buffer._storage.nbytes() == 0 < arena.buffer.size
