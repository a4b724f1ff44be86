"""Draft heads on the card: right wherever they foresee, in graphs and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.worker.graphs import Kind
from tests.support import tiny_heads
from tests.support.card import STRICT, require_card, runner_of
from tests.support.card_drafts import ASKED, captured, right

require_card()


@pytest.mark.parametrize("more", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_that_foresees_is_right_on_the_card(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Hidden states that a graph leaves elsewhere, or too late, would make it wrong."""
    target, head = tiny_heads.save_foreseeing(tmp_path, method)
    drafts = {"method": method, "model": str(head), "num_speculative_tokens": 3 if method == "eagle" else 1}
    answers = []
    for config in (None, drafts):
        with LLM(str(target), **{**STRICT, **more, "speculative_config": config, "max_model_len": 200}) as llm:
            asked = [{"prompt_token_ids": [3, 9, 27, each]} for each in range(4, 9)]
            answers.append([list(each.outputs[0].token_ids) for each in llm.generate(asked, ASKED[0], use_tqdm=False)])
            good = config is None or right(llm) > 0.9
            if config is not None and not more:
                assert captured(runner_of(llm)._speculator._proposer._graphs, Kind.CHAINED)
    assert answers[0] == answers[1] and good
