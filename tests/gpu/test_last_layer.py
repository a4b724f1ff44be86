"""The last layer attends for what is read alone: on the card, too, tokens and logprobs are those of a last layer that
computes everything."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.worker.rows import LEAST_QUERIES
from tests.support import tiny
from tests.support.card import STRICT, params, require_card

require_card()

FAMILIES = ("gemma2", "qwen3-moe-mixed", "gpt2")
MODES: dict[str, dict[str, Any]] = {
    "batch invariant": {"dtype": "bfloat16", "batch_invariant": True},
    "chunks of 70": {"max_num_batched_tokens": 70},
    "padded": {"technique": {"token_concatenation": False}},
}


def answers(model: str | None, *, prunes: bool, **keywords: Any) -> list[Any]:
    """Of prompts alone, then together, so that ends of prompts, middles and single tokens meet."""
    draw, found = random.Random(0), []
    prompts = [{"prompt_token_ids": draw.choices(range(256), k=length)} for length in (1, 5, 64, 90, 33, 100)]
    technique = {**keywords.pop("technique", {}), "last_layer_pruning": prunes}
    with LLM(model, **{**STRICT, **keywords}, technique=technique) as llm:
        for asked in (*([prompt] for prompt in prompts), prompts):
            found += [each.outputs[0] for each in llm.generate(asked, params(max_tokens=5, logprobs=3), use_tqdm=False)]
    return found


def compare(monkeypatch: pytest.MonkeyPatch, model: str | None, tolerance: float, **keywords: Any) -> None:
    monkeypatch.setitem(LEAST_QUERIES, "cuda", 2)
    for one, other in zip(
        answers(model, prunes=True, **keywords), answers(model, prunes=False, **keywords), strict=True
    ):
        assert one.token_ids == other.token_ids
        for mine, its in zip(one.logprobs, other.logprobs, strict=True):
            assert [mine[token].logprob for token in its] == pytest.approx(
                [each.logprob for each in its.values()], rel=0, abs=tolerance
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_the_family_tokens_are_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, str(tiny.save(name, tmp_path, seed=3)), 1e-4, max_model_len=120, num_blocks=64)


@pytest.mark.parametrize("mode", MODES)
def test_whatever_the_mode_tokens_are_the_same(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, None, 0.0 if "batch_invariant" in MODES[mode] else 1e-4, **MODES[mode])
