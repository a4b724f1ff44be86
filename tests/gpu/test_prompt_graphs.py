"""Steps with prompts as graphs on the card: what eager steps answer, alone and together, in chunks beside decoding
rows, whatever the family."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from headrace.cost import prompt_shapes
from headrace.worker.device_memory import device_use
from headrace.worker.prompt_graphs import PromptGraphs
from tests.support import tiny
from tests.support.card import STRICT, params, require_card, runner_of

require_card()

CARD = torch.device("cuda")
FAMILIES = ("llama", "gemma2", "qwen3", "qwen3-moe-mixed", "gpt2")
CHUNKS = {"max_num_batched_tokens": 70}
MODES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "overlap 0": {"overlap": 0},
    "chunks of 70": CHUNKS,
    "whole last layer": {"technique": {"last_layer_pruning": False}},
    "padded": {"technique": {"token_concatenation": False}},
    "alone": {"max_num_seqs": 1},
}
ASKED = params(max_tokens=6, logprobs=3)
LENGTHS = (1, 5, 64, 70, 33, 17, 90, 100, 64, 41, 3)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape is recorded when it comes for the second time."""
    monkeypatch.setattr(prompt_shapes, "AGAIN_SERVED", 2)


def graphs_of(llm: LLM) -> PromptGraphs:
    graphs: PromptGraphs = runner_of(llm).passes.prompt_graphs
    return graphs


def planned_graphs(llm: LLM) -> int:
    """Bytes."""
    size: int = llm.engine.core.executor._restore.__self__.room.purposes["graphs"]  # type: ignore[attr-defined]
    return size


def answers(llm: LLM) -> list[Any]:
    """Three rounds of the same lengths, alone and then together, so that what is seen again is recorded and then
    replayed."""
    found = []
    for turn in range(3):
        draw = random.Random(turn)
        prompts = [{"prompt_token_ids": draw.choices(range(256), k=length)} for length in LENGTHS]
        for asked in (*([prompt] for prompt in prompts), prompts):
            found += [
                (each.outputs[0].token_ids, each.outputs[0].logprobs)
                for each in llm.generate(asked, ASKED, use_tqdm=False)
            ]
    return found


def close(found: Sequence[Any], expected: Sequence[Any], tolerance: float) -> None:
    for (tokens, scores), (wanted, known) in zip(found, expected, strict=True):
        assert tokens == wanted
        for here, there in zip(scores, known, strict=True):
            assert all(
                abs(here[token].logprob - there[token].logprob) <= tolerance for token in here.keys() & there.keys()
            )


def compare(model: str | None, least: int, tolerance: float = 2e-4, **keywords: Any) -> None:
    technique = keywords.pop("technique", {})
    with LLM(model, **{**STRICT, **keywords}, technique={**technique, "prompt_graphs": False}) as llm:
        assert runner_of(llm).passes.prompt_graphs is None
        expected = answers(llm)
    with LLM(model, **{**STRICT, **keywords}, technique=technique) as llm:
        before = len(graphs_of(llm).captured)
        found = answers(llm)
        assert len(graphs_of(llm).captured) >= before + least
    close(found, expected, tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_whatever_the_mode_answers_are_the_same(mode: str) -> None:
    compare(None, 3, **MODES[mode])


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_the_family_answers_are_the_same(name: str, tmp_path: Path) -> None:
    compare(str(tiny.save(name, tmp_path, seed=3)), 3, max_model_len=120, num_blocks=64, **CHUNKS)


def test_batch_invariant_answers_have_the_same_bits() -> None:
    compare(None, 3, 0.0, batch_invariant=True, **CHUNKS)


def test_what_graphs_take_is_planned_for() -> None:
    """Whatever shapes come: their memory is among what was left for graphs, and the steps' own is as it was."""
    with LLM(
        **{**STRICT, "dtype": "bfloat16", "max_num_seqs": 64, "num_blocks": 2000}, max_num_batched_tokens=2048
    ) as llm:
        graphs, draw, start = graphs_of(llm), random.Random(5), device_use(CARD).used
        for _ in range(100):
            count = draw.choice((1, 1, 2, 5, 20))
            lengths = [draw.randint(1, 2000 // count) for _ in range(count)]
            llm.generate(
                [{"prompt_token_ids": draw.choices(range(256), k=length)} for length in lengths],
                params(max_tokens=2),
                use_tqdm=False,
            )
        assert len(graphs.captured) > 12
        assert device_use(CARD).used - start <= planned_graphs(llm) - llm.info.memory["graphs"]


def test_an_idle_engine_records_ahead_and_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_shapes, "AGAIN_SERVED", 16)
    with LLM(**STRICT) as llm:
        expected, executor, before = answers(llm), llm.engine.core.executor, device_use(CARD).used
        while executor.prepare():
            pass
        lone = {shape.tokens for shape in graphs_of(llm).captured if shape.sequences == 1}
        assert lone >= {16, 48, 96, 160, 2048}
        assert device_use(CARD).used - before <= planned_graphs(llm) - llm.info.memory["graphs"]
        close(answers(llm), expected, 2e-4)
