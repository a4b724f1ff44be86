"""Drafts on the card, for the tests of tests/gpu/test_speculation*.py: what drafts, what is asked, how often drafts are
right.

What lives here: that. What may not: tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headrace
from headrace import LLM, SamplingParams
from headrace.worker.graphs import DecodeGraphs, Kind
from tests.support.card import STRICT, Judge, params, runner_of

DEMO = str(Path(headrace.__file__).parent / "data" / "demo")
OWN = {"model": DEMO, "num_speculative_tokens": 3}
TREE = {**OWN, "tree": 3, "num_speculative_tokens": 7}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPTS = [[(7 * i + 3 * j) % 8000 for j in range(5 + 11 * i % 97)] for i in range(9)] + [[11, 12, 13, 14] * 9]
ASKED = (
    params(max_tokens=30, logprobs=1),
    params(max_tokens=30, temperature=0.8, top_p=0.9, top_k=50, seed=3),
    params(max_tokens=24, presence_penalty=0.5, frequency_penalty=0.2),
)


def ask(llm: LLM, asked: SamplingParams) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)


def right(llm: LLM) -> float:
    counts = llm.engine.core.stats().drafts
    assert counts is not None and sum(counts.drafted) > 50
    return sum(counts.accepted) / sum(counts.drafted)


def captured(graphs: DecodeGraphs, kind: Kind) -> bool:
    return any(bucket.of(kind) is not None for bucket in graphs._captured.values())


def check_mode(judge: Judge, mode: str, how: Mapping[str, Any]) -> None:
    """Tokens are those without drafts; drafts are mostly right, and graphs verify them."""
    with LLM(**{**STRICT, **how}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)
        share, graphs = right(llm), runner_of(llm).passes.graphs
    if mode.startswith("draft model"):
        assert share > (0.6 if "preempted" in mode else 0.85)
    assert mode.startswith("n-gram") or share > 0.2
    assert (graphs is None) == ("eager" in mode)
    if graphs is not None:
        assert captured(graphs, Kind.TREE if "tree" in mode else Kind.CHAINED), "no step that verifies was replayed"
