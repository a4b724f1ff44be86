"""Trained checkpoints give their golden tokens: greedy ids, log-probabilities of prompts, the five best of each step.

Teacher-forced, all prompts of a file in one packed step, and again token by token for a few of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.models.decoder import Decoder
from tests.support.forward import PagedRun, load_decoder
from tests.support.outside import shared

TOLERANCE = 1e-4
GOLDEN = {
    "demo": "golden.json",
    "demo-draft": "golden.json",
    "demo-moe": "golden.json",
    "stories260k": "golden_greedy.json",
}


@dataclass(frozen=True)
class Golden:
    """One prompt and what must follow. ``best[i]``: (id, log-probability) of step i, best first."""

    prompt: list[int]
    prompt_logprobs: list[float]
    greedy: list[int]
    gaps: list[float]  # between the best and the second best, in nats
    best: list[list[tuple[int, float]]]


def folder_of(model: str) -> Path:
    return shared("data", model) if model == "stories260k" else shared("models", model)


def read_golden(model: str) -> list[Golden]:
    data = json.loads((folder_of(model) / GOLDEN[model]).read_text(encoding="utf-8"))
    return (
        [_from_steps(entry) for entry in data]
        if isinstance(data, list)
        else [_from_lists(entry) for entry in data["prompts"]]
    )


def _from_steps(entry: dict[str, Any]) -> Golden:
    steps = entry["greedy"]
    best = [[(token, logprob) for token, logprob in step["top5"]] for step in steps]
    return Golden(
        entry["prompt_ids"], entry["prompt_logprobs"], [s["id"] for s in steps], [s["gap"] for s in steps], best
    )


def _from_lists(entry: dict[str, Any]) -> Golden:
    best = [[(int(token), logprob) for token, logprob in step] for step in entry["top5"]]
    return Golden(entry["prompt_ids"], entry["prompt_logprobs"], entry["greedy_ids"], entry["gaps"], best)


@pytest.fixture(scope="module", params=GOLDEN)
def model(request: pytest.FixtureRequest) -> tuple[list[Golden], Decoder]:
    return read_golden(request.param), load_decoder(folder_of(request.param))


def run_all(decoder: Decoder, prompts: list[Golden]) -> list[Tensor]:
    """Log-probabilities at every position of each prompt and its golden answer, [tokens, vocab], float64."""
    tokens = {str(index): golden.prompt + golden.greedy[:-1] for index, golden in enumerate(prompts)}
    blocks = sum(len(ids) // 16 + 1 for ids in tokens.values()) + 1
    logits = PagedRun(decoder, block_size=16, num_blocks=blocks).step(tokens)
    return [torch.log_softmax(rows.double(), dim=-1) for rows in logits.values()]


def test_golden_tokens_and_logprobs(model: tuple[list[Golden], Decoder]) -> None:
    prompts, decoder = model
    for golden, rows in zip(prompts, run_all(decoder, prompts), strict=True):
        scored = rows[: len(golden.prompt) - 1].gather(1, torch.tensor(golden.prompt[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(
            scored, torch.tensor(golden.prompt_logprobs, dtype=torch.float64), rtol=0, atol=TOLERANCE
        )
        answer = rows[len(golden.prompt) - 1 :]
        assert answer.argmax(dim=-1).tolist() == golden.greedy
        for row, best in zip(answer, golden.best, strict=False):
            found = row[[token for token, _ in best]]
            assert (found - torch.tensor([logprob for _, logprob in best])).abs().max() <= TOLERANCE


def test_golden_tokens_step_by_step(model: tuple[list[Golden], Decoder]) -> None:
    """The shortest three prompts together, one token a step, each step from the tokens the last one chose."""
    prompts, decoder = model
    chosen = sorted(prompts, key=lambda golden: len(golden.prompt))[:3]
    run = PagedRun(decoder, block_size=16)
    tokens = {str(index): golden.prompt for index, golden in enumerate(chosen)}
    answers: dict[str, list[int]] = {key: [] for key in tokens}
    for _ in range(24):
        tokens = {key: [int(rows[-1].argmax())] for key, rows in run.step(tokens).items()}
        for key, ids in tokens.items():
            answers[key] += ids
    assert list(answers.values()) == [golden.greedy[:24] for golden in chosen]


@pytest.mark.parametrize("name", ["demo", "demo-moe"])
def test_golden_tokens_in_bfloat16(name: str) -> None:
    """Wherever the best token leads by a quarter of a nat, bfloat16 finds it too."""
    prompts = read_golden(name)
    for golden, rows in zip(
        prompts, run_all(load_decoder(folder_of(name), dtype=torch.bfloat16), prompts), strict=True
    ):
        clear = torch.tensor(golden.gaps) > 0.25
        found = rows[len(golden.prompt) - 1 :].argmax(dim=-1)
        assert (found == torch.tensor(golden.greedy))[clear].all()
