"""Drafts on the card: graphs compute them and the steps that verify them, and tokens are those of the CPU without
drafts. (Trees, and drafts over keys in codes: test_speculation_trees.py; heads: test_speculation_heads.py; drafts of the
other device: test_speculation_apart.py.)

The draft model is the target itself: where it is wrong, a key of its is missing or stale.
"""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.close()


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_without_drafts(judge: Judge, mode: str) -> None:
    check_mode(judge, mode, MODES[mode])


def test_no_bit_changes_where_steps_are_invariant() -> None:
    """Nor where a draft model's weights are rounded while they are read."""
    rounded = [{**OWN, "quantization": each} for each in ("fp8", "compressed-tensors")]
    answers = []
    for config in (None, OWN, NGRAM, *rounded):
        how = {"dtype": "bfloat16", "batch_invariant": True, "strict_kernels": config not in rounded}
        with LLM(**{**STRICT, **how, "speculative_config": config}) as llm:
            found = [each for asked in ASKED for each in ask(llm, asked)]
            answers.append([(list(out.token_ids), out.logprobs) for each in found for out in each.outputs])
            assert config not in rounded or right(llm) > 0.3
    assert all(each == answers[0] for each in answers)


def test_a_draft_of_the_same_weights_in_bfloat16_isright(judge: Judge) -> None:
    """The megakernel drafts, layer by layer it is verified."""
    with LLM(**{**STRICT, "dtype": "bfloat16", "max_num_seqs": 2, "speculative_config": OWN}) as llm:
        ask(llm, ASKED[0])
        assert right(llm) > 0.8
