"""Drafts of the other device: the draft model on the CPU beside a target on the card, and the reverse."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import LLM
from tests.support.card import STRICT, Judge, require_card, runner_of
from tests.support.card_drafts import ASKED, OWN, PROMPTS, TREE, ask, right

require_card()

ON_CPU, ON_CARD = {**OWN, "device": "cpu"}, {**OWN, "device": "cuda"}
APART: dict[str, dict[str, Any]] = {
    "draft on the CPU": {"speculative_config": ON_CPU},
    "draft on the CPU, overlap 2": {"speculative_config": ON_CPU, "overlap": 2},
    "draft on the CPU, not ahead": {"speculative_config": ON_CPU, "drafts_ahead": False},
    "draft on the CPU, preempted": {"speculative_config": ON_CPU, "num_blocks": 14, "block_size": 16},
    "draft on the card": {"speculative_config": ON_CARD, "device": "cpu", "strict_kernels": False},
    "draft on the card, overlap 2": {
        "speculative_config": ON_CARD,
        "device": "cpu",
        "strict_kernels": False,
        "overlap": 2,
    },
    "draft on the card, trees": {
        "speculative_config": {**TREE, "device": "cuda"},
        "device": "cpu",
        "strict_kernels": False,
    },
}


@pytest.mark.parametrize("mode", APART)
def test_tokens_are_those_without_drafts_where_the_draft_is_on_the_other_device(judge: Judge, mode: str) -> None:
    """Token ids alone pass between the two; float32 on both, so what is drafted is mostly right."""
    with LLM(**{**STRICT, **APART[mode]}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)
        share, counts, drafter = right(llm), llm.engine.core.stats().drafts, runner_of(llm)._speculator._proposer
        (said,) = (each.reason for each in llm.info.decisions if each.name == "draft memory")
    other = "cpu" if "CPU" in mode else "cuda"
    assert drafter.side.rows.device.type == other != drafter._target.device.type and said.endswith(f"; on {other}")
    assert counts is not None and bool(counts.ahead) == ("ahead" not in mode and "trees" not in mode)
    if "trees" not in mode:
        assert share > (0.6 if "preempted" in mode else 0.85)
