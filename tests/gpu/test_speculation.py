"""Drafts on the card: graphs compute them and the steps that verify them, and tokens are those of the CPU without
drafts.

The draft model is the target itself: where it is wrong, a key of its is missing or stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import LLM, SamplingParams
from headrace.worker.graphs import DecodeGraphs, Kind
from tests.support import tiny_heads
from tests.support.card import STRICT, Judge, params, require_card, runner_of

require_card()

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
MODES: dict[str, dict[str, Any]] = {
    "draft model": {"speculative_config": OWN},
    "draft model, overlap 0": {"speculative_config": OWN, "overlap": 0},
    "draft model, overlap 2": {"speculative_config": OWN, "overlap": 2},
    "draft model, eager": {"speculative_config": OWN, "enforce_eager": True},
    "draft model, alone": {"speculative_config": OWN, "max_num_seqs": 1},
    "draft model, preempted": {"speculative_config": OWN, "num_blocks": 14, "block_size": 16},
    "n-gram": {"speculative_config": NGRAM},
    "tree": {"speculative_config": TREE},
    "tree, overlap 2": {"speculative_config": TREE, "overlap": 2},
    "tree, eager": {"speculative_config": TREE, "enforce_eager": True},
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.close()


def _ask(llm: LLM, asked: SamplingParams) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)


def _right(llm: LLM) -> float:
    counts = llm.engine.core.stats().drafts
    assert counts is not None and sum(counts.drafted) > 50
    return sum(counts.accepted) / sum(counts.drafted)


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_without_drafts(judge: Judge, mode: str) -> None:
    with LLM(**{**STRICT, **MODES[mode]}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, _ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)
        right, graphs = _right(llm), runner_of(llm).passes.graphs
    if mode.startswith("draft model"):
        assert right > (0.6 if "preempted" in mode else 0.85)
    assert mode.startswith("n-gram") or right > 0.2
    assert (graphs is None) == ("eager" in mode)
    if graphs is not None:
        assert _captured(graphs, Kind.TREE if "tree" in mode else Kind.CHAINED), "no step that verifies was replayed"


def _captured(graphs: DecodeGraphs, kind: Kind) -> bool:
    return any(bucket.of(kind) is not None for bucket in graphs._captured.values())


@pytest.mark.parametrize("asked", ASKED, ids=["greedy", "sampled", "penalised"])
def test_no_bit_changes_where_steps_are_invariant(asked: SamplingParams) -> None:
    answers = []
    for config in (None, OWN, NGRAM):
        with LLM(**{**STRICT, "dtype": "bfloat16", "batch_invariant": True, "speculative_config": config}) as llm:
            answers.append(
                [[(list(each.token_ids), each.logprobs) for each in found.outputs] for found in _ask(llm, asked)]
            )
    assert answers[0] == answers[1] == answers[2]


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
            answers.append([each.outputs[0] for each in _ask(llm, asked)])
            assert config is None or _right(llm) > (0.6 if invariant else 0.15)
    for plain, drafted in zip(*answers, strict=True):
        at = next(
            (i for i, pair in enumerate(zip(plain.token_ids, drafted.token_ids, strict=True)) if len({*pair}) > 1), None
        )
        if at is not None:
            best, next_best = sorted((each.logprob for each in plain.logprobs[at].values()), reverse=True)[:2]
            assert not invariant and best - next_best < 0.1, at


def test_a_draft_of_the_same_weights_in_bfloat16_is_right(judge: Judge) -> None:
    """The megakernel drafts, layer by layer it is verified."""
    with LLM(**{**STRICT, "dtype": "bfloat16", "max_num_seqs": 2, "speculative_config": OWN}) as llm:
        _ask(llm, ASKED[0])
        assert _right(llm) > 0.8


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
            right = config is None or _right(llm) > 0.9
            if config is not None and not more:
                assert _captured(runner_of(llm)._speculator._proposer._graphs, Kind.CHAINED)
    assert answers[0] == answers[1] and right


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
            for prompt, found in zip(PROMPTS, _ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)
        right, counts, drafter = _right(llm), llm.engine.core.stats().drafts, runner_of(llm)._speculator._proposer
        (said,) = (each.reason for each in llm.info.decisions if each.name == "draft memory")
    other = "cpu" if "CPU" in mode else "cuda"
    assert drafter.side.rows.device.type == other != drafter._target.device.type and said.endswith(f"; on {other}")
    assert counts is not None and bool(counts.ahead) == ("ahead" not in mode and "trees" not in mode)
    if "trees" not in mode:
        assert right > (0.6 if "preempted" in mode else 0.85)
