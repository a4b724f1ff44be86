"""Masks of structured output on the card: they come while the forward pass runs, and rows without one must not notice.

The judge is the CPU with the same ids as a list. Graphs = eager = few logits at once = synchronous.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from tests.support.card import STRICT, Judge, params, require_card
from tests.support.residue_masks import follow_residues, listed, masked

require_card()

PROMPTS = [[(11 * i + 3 * j) % 8000 for j in range(4 + 13 * i % 31)] for i in range(7)]
SHORT: dict[str, Any] = {"max_tokens": 10}
ASKED: dict[str, SamplingParams] = {
    "greedy": params(**SHORT),
    "filtered": params(**SHORT, temperature=0.9, top_p=0.9, top_k=40, seed=2),
    "penalised": params(**SHORT, repetition_penalty=1.3, presence_penalty=0.4),
    "scored": params(**SHORT, temperature=1.0, logprobs=4, seed=3),
    "n": params(**SHORT, temperature=1.0, n=3, seed=4, logit_bias={index: 2.0 for index in range(0, 500, 3)}),
}
MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "few logits at once": {"max_logits_rows": 3},
    "overlap 0": {"overlap": 0},
    "chunks of 9": {"max_num_batched_tokens": 16},
    "torch twins": {"disabled_kernels": ("triton",)},
}


@pytest.mark.parametrize("mode", MODES)
def test_masked_rows_take_allowed_tokens_and_others_do_not_notice(judge: Judge, mode: str) -> None:
    with LLM(**{**STRICT, **MODES[mode]}) as llm:
        masks = follow_residues(llm)
        for name, asked in ASKED.items():
            remainders = [(index % 5, 3 + index) if index % 3 else None for index in range(len(PROMPTS))]
            both = [asked if each is None else masked(asked, *each) for each in remainders]
            found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], both, use_tqdm=False)
            for prompt, each, answer in zip(PROMPTS, remainders, found, strict=True):
                judge.check(prompt, asked if each is None else listed(asked, *each), answer)
            assert masks.given > 0, name


def test_all_rows_masked_and_nothing_waits_for_the_device(judge: Judge) -> None:
    with LLM(**STRICT) as llm:
        follow_residues(llm)
        executor = llm.engine.core.executor
        for name in ("submit", "sample"):
            setattr(executor, name, _watched(getattr(executor, name)))
        asked = [masked(params(**SHORT), index % 4, 5) for index in range(len(PROMPTS))]
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
        for index, (prompt, answer) in enumerate(zip(PROMPTS, found, strict=True)):
            judge.check(prompt, listed(params(**SHORT), index % 4, 5), answer)


def _watched(call: Any) -> Any:
    """torch raises where the host would wait for the device."""

    def watched(*arguments: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def test_a_mask_that_allows_nothing_ends_its_own_request_alone(judge: Judge) -> None:
    with LLM(**STRICT) as llm:
        follow_residues(llm)
        asked = [
            masked(params(**SHORT), 10**6, 10**6 + 1) if index == 2 else params(**SHORT)
            for index in range(len(PROMPTS))
        ]
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
        assert found[2].outputs[0].finish_reason == "error" and "unusable" in str(found[2].outputs[0].stop_reason)
        for index, (prompt, answer) in enumerate(zip(PROMPTS, found, strict=True)):
            if index != 2:
                judge.check(prompt, params(**SHORT), answer)
