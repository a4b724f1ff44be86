"""A widened copy beside codes on the card: it is made where memory allows, prompts mean the same by it, and it is there
again after sleep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headrace import LLM, SamplingParams
from headrace.worker.memory import COPY
from tests.support.card import require_card

require_card()

PROMPTS = [{"prompt_token_ids": [1 + (7 * row + 3 * at) % 900 for at in range(200 + 90 * row)]} for row in range(3)]
SCORED = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 1024}


def scores(llm: LLM) -> torch.Tensor:
    """Of every token of every prompt."""
    answers = llm.generate(PROMPTS, SCORED, use_tqdm=False)
    told = (answer.prompt_logprobs or [] for answer in answers)
    found = [next(iter(each.values())).logprob for prompt in told for each in prompt if each]
    return torch.tensor(found)


def test_prompts_mean_the_same_by_the_copy(tmp_path: Path) -> None:
    config = json.loads(Path("lab/shapes/Llama-3.2-1B/config.json").read_text())
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, **SIZES, **heads}))
    more: dict[str, Any] = {
        "model": tmp_path, "load_format": "dummy", "quantization": "compressed-tensors", "dtype": "bfloat16", "device": "cuda",
        "kv_cache_memory": 2**26, "max_model_len": 1024, "max_num_seqs": 8,
    }  # fmt: skip
    with LLM(**more, technique={"wide_copy": False}) as llm:
        assert COPY not in llm.info.memory
        plain = scores(llm)
    with LLM(**more, enable_sleep_mode=True) as llm:
        assert llm.info.memory[COPY] == 2 * 3 * 512 * (1024 + 512 + 3 * 1024)
        copied = scores(llm)
        torch.testing.assert_close(copied, plain, rtol=0.02, atol=0.05)
        llm.sleep(1)
        torch.full((2**28,), 255, dtype=torch.uint8, device="cuda")  # what was given back is written over
        llm.wake_up()
        assert torch.equal(scores(llm), copied)
