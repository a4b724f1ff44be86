"""Trees of drafts on the card, and drafts over keys in codes: tokens are those without drafts."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import LLM
from tests.support.card import STRICT, Judge, params, require_card
from tests.support.card_drafts import OWN, TREE, ask, check_mode, right

require_card()

MODES: dict[str, dict[str, Any]] = {
    "tree": {"speculative_config": TREE},
    "tree, overlap 2": {"speculative_config": TREE, "overlap": 2},
    "tree, eager": {"speculative_config": TREE, "enforce_eager": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_without_drafts(judge: Judge, mode: str) -> None:
    check_mode(judge, mode, MODES[mode])


@pytest.mark.parametrize("kv", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("drafts", [OWN, TREE], ids=["chain", "tree"])
def test_over_codes_tokens_are_those_without_drafts(drafts: dict[str, Any], kv: str) -> None:
    """Chains to the bit, where steps are invariant; of trees, where two answers part, both tokens were nearly as
    likely."""
    answers, invariant = [], drafts is OWN
    way = {"dtype": "bfloat16" if invariant else "float32", "batch_invariant": invariant, "kv_cache_dtype": kv}
    asked = params(max_tokens=30, logprobs=2)
    for config in (None, drafts):
        with LLM(**{**STRICT, **way, "speculative_config": config}) as llm:
            answers.append([each.outputs[0] for each in ask(llm, asked)])
            assert config is None or right(llm) > (0.6 if invariant else 0.15)
    for plain, drafted in zip(*answers, strict=True):
        at = next(
            (i for i, pair in enumerate(zip(plain.token_ids, drafted.token_ids, strict=True)) if len({*pair}) > 1), None
        )
        if at is not None:
            best, next_best = sorted((each.logprob for each in plain.logprobs[at].values()), reverse=True)[:2]
            assert not invariant and best - next_best < 0.1, at
