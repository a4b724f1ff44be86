"""Every family on the card against the CPU: tiny models from safetensors, tokens and logprobs; windows, caps and
experts among them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from tests.support import tiny
from tests.support.card import STRICT, Judge, params, require_card

require_card()

LENGTHS = (1, 5, 11, 12, 13, 24, 40, 64, 64, 70, 90)  # around the window of 12; with what is decoded up to 120
ASKED = (
    params(max_tokens=30, logprobs=3, prompt_logprobs=2),
    params(max_tokens=30, temperature=1.0, top_p=0.95, seed=9, logprobs=1),
)
SHORT: dict[str, Any] = {"max_model_len": 120, "num_blocks": 64}


def prompts() -> list[list[int]]:
    draw = random.Random(4)
    return [draw.choices(range(256), k=length) for length in LENGTHS]


def ask(llm: LLM, asked: SamplingParams) -> list[Any]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], asked, use_tqdm=False)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_tokens_and_logprobs_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    folder = str(tiny.save(name, tmp_path, seed=3))
    judge = Judge(folder, **SHORT)
    with LLM(folder, **{**STRICT, **SHORT, "max_num_batched_tokens": 50}) as llm:
        for asked in ASKED:
            for prompt, found in zip(prompts(), ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)
    judge.close()
