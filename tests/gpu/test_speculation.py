"""Drafts on the card: graphs compute them and the steps that verify them, and tokens are those of the CPU without
drafts. (Trees, and drafts over keys in codes: test_speculation_trees.py; heads: test_speculation_heads.py; drafts of the
other device: test_speculation_apart.py.)

The draft model is the target itself: where it is wrong, a key of its is missing or stale.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace import LLM
from tests.support.card import STRICT, Judge, require_card
from tests.support.card_drafts import ASKED, NGRAM, OWN, ask, check_mode, right

require_card()

MODES: dict[str, dict[str, Any]] = {
    "draft model": {"speculative_config": OWN},
    "draft model, overlap 0": {"speculative_config": OWN, "overlap": 0},
    "draft model, overlap 2": {"speculative_config": OWN, "overlap": 2},
    "draft model, eager": {"speculative_config": OWN, "enforce_eager": True},
    "draft model, alone": {"speculative_config": OWN, "max_num_seqs": 1},
    "draft model, preempted": {"speculative_config": OWN, "num_blocks": 14, "block_size": 16},
    "n-gram": {"speculative_config": NGRAM},
}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_without_drafts(judge: Judge, mode: str) -> None:
    check_mode(judge, mode, MODES[mode])


def test_no_bit_changes_where_steps_are_invariant() -> None:
    answers = []
    for config in (None, OWN, NGRAM):
        with LLM(**{**STRICT, "dtype": "bfloat16", "batch_invariant": True, "speculative_config": config}) as llm:
            found = [each for asked in ASKED for each in ask(llm, asked)]
            answers.append([(list(out.token_ids), out.logprobs) for each in found for out in each.outputs])
    assert all(each == answers[0] for each in answers)


@pytest.mark.parametrize(("quantization", "least"), [("none", 0.8), ("fp8", 0.6), ("compressed-tensors", 0.3)])
def test_a_draft_of_the_same_weights_in_bfloat16_is_right(quantization: str, least: float) -> None:
    """The megakernel drafts, layer by layer it is verified; rounded while they are read, layers draft, too."""
    drafts = {**OWN, "quantization": quantization}
    with LLM(**{**STRICT, "dtype": "bfloat16", "max_num_seqs": 2, "speculative_config": drafts}) as llm:
        ask(llm, ASKED[0])
        assert right(llm) > least
