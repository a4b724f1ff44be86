"""Memory on the card: the plan holds, nothing is allocated in the steady state, and running out of it is survived and
explained."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, OutOfMemory
from headrace.worker.device_memory import DeviceUse, device_use
from tests.support.card import params, require_card
from tests.support.residue_masks import follow_residues, masked

require_card()

GIB = 2**30
CARD = torch.device("cuda")
# The demo model with real sizes of everything else: rows, logits, graphs.
ENGINE: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "kv_cache_memory": 2 * GIB,
    "max_num_seqs": 64,
    "threads": 2,
    "strict_kernels": True,
}


def ask(llm: LLM, count: int, longest: int, seed: int, *asked: SamplingParams) -> list[str | None]:
    """Finish reasons of ``count`` requests of random lengths."""
    draw = random.Random(seed)
    prompts = [{"prompt_token_ids": draw.choices(range(8000), k=draw.randint(1, longest))} for _ in range(count)]
    answers = llm.generate(prompts, [asked[i % len(asked)] for i in range(count)], use_tqdm=False)
    return [answer.outputs[0].finish_reason for answer in answers]


MIXED = (
    params(max_tokens=40),
    params(max_tokens=9, temperature=1.0, top_p=0.9, seed=1),
    params(max_tokens=20, presence_penalty=0.5, repetition_penalty=1.2),
    params(max_tokens=12, logprobs=20),
    params(max_tokens=3, prompt_logprobs=20),
    masked(params(max_tokens=15, logprobs=5), 2, 5),
)


def residual(llm: LLM) -> int:
    return device_use(CARD).used - sum(llm.info.memory.values())


@pytest.fixture
def llm() -> Any:
    with LLM(**ENGINE) as llm:
        follow_residues(llm)
        yield llm


def test_every_byte_on_the_card_is_accounted_for_and_no_step_asks_for_more(llm: LLM) -> None:
    assert abs(residual(llm)) <= 0.02 * device_use(CARD).used
    ask(llm, 64, 2000, 0, *MIXED)
    before = _allocations()
    for seed in range(1, 5):
        assert set(ask(llm, 150, 2000, seed, *MIXED)) == {"length"}
    ask(llm, 64, 10, 9, params(max_tokens=400))  # steady decode
    assert _allocations() == before
    assert abs(residual(llm)) <= 0.02 * device_use(CARD).used


def _allocations() -> tuple[int, int, int]:
    stats = torch.cuda.memory_stats(CARD)
    return stats["num_device_alloc"], stats["num_device_free"], stats["num_alloc_retries"]


def test_the_share_asked_for_is_the_share_in_use() -> None:
    share = 0.3 + (device_use(CARD).used / device_use(CARD).total)
    with LLM(
        **{**ENGINE, "kv_cache_memory": None, "max_num_seqs": 512, "max_model_len": 4096}, gpu_memory_utilization=share
    ) as llm:
        follow_residues(llm)
        ask(llm, 100, 2000, 0, *MIXED)
        use = device_use(CARD)
        assert use.used <= share * use.total
        assert llm.info.memory["kv_cache"] > 0


def test_a_step_that_runs_out_ends_its_requests_alone_and_the_next_are_answered(llm: LLM) -> None:
    wanted = llm.generate({"prompt_token_ids": [5, 6, 7]}, params(), use_tqdm=False)[0].outputs[0].token_ids
    torch.cuda.empty_cache()  # what was set aside for steps
    hog = _fill()
    prompts = {"prompt_token_ids": list(range(1, 2001))}
    failed = llm.generate(prompts, params(prompt_logprobs=20), use_tqdm=False)[0].outputs[0]
    assert failed.finish_reason == "error"
    assert all(
        words in str(failed.stop_reason)
        for words in ("ran out of memory", "asked for", "GiB are free", "--gpu-memory-utilization")
    )
    hog.clear()
    assert llm.generate({"prompt_token_ids": [5, 6, 7]}, params(), use_tqdm=False)[0].outputs[0].token_ids == wanted
    assert set(ask(llm, 64, 2000, 3, *MIXED)) == {"length"}


def _fill() -> list[torch.Tensor]:
    """Takes the card's memory but for less than 32 MiB, which a scored prompt of 2000 tokens needs several times."""
    hog: list[torch.Tensor] = []
    size = 2**36
    while size >= 2**25:
        while device_use(CARD).free > size:
            hog.append(torch.empty(size, dtype=torch.uint8, device=CARD))
        size //= 2
    return hog


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        (
            {"kv_cache_memory": 2**40},
            OutOfMemory,
            r"--kv-cache-memory is 1024\.00 GiB, but of the .* weights .* Lower --kv-cache-memory",
        ),
        (
            {"num_blocks": 10**8, "kv_cache_memory": None},
            OutOfMemory,
            r"--num-blocks 100000000 is .* Lower --num-blocks",
        ),
        (
            {"kv_cache_memory": 2**20, "max_model_len": 4096},
            ConfigError,
            r"--max-model-len to at most \d+ or raise --kv-cache-memory",
        ),
        ({"max_num_batched_tokens": 2**25, "max_num_seqs": 16}, OutOfMemory, r"does not fit.*--max-num-batched-tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_with_numbers(
    keywords: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LLM(**{**ENGINE, **keywords})


def test_memory_that_others_hold_is_named() -> None:
    hog = torch.empty(int(0.2 * device_use(CARD).total), dtype=torch.uint8, device=CARD)
    with pytest.raises(
        OutOfMemory, match=r"--gpu-memory-utilization 0\.1 is .* but others hold .* Give more than 0\.2"
    ):
        LLM(**{**ENGINE, "kv_cache_memory": None, "gpu_memory_utilization": 0.1})
    del hog
    torch.cuda.empty_cache()


def test_doctor_accounts_for_the_card(tmp_path: Any) -> None:
    import json

    command = [sys.executable, "-m", "headrace", "doctor", "--json", "--device", "cuda", "--kv-cache-memory", "4GiB"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert report["memory"]["share explained"] >= 0.98
    assert {"weights", "kv_cache", "rows", "activations", "graphs", "context", "kernels", "in use before"} == report[
        "memory"
    ]["purposes"].keys()
    assert "compute capability" in report["found"]["cuda"] and "driver" in report["found"]["cuda"]


def test_use_is_read_as_the_driver_counts() -> None:
    before = device_use(CARD)
    assert isinstance(before, DeviceUse)
    piece = torch.empty(2**30, dtype=torch.uint8, device=CARD)
    after = device_use(CARD)
    assert after.used - before.used == after.held - before.held == piece.numel()
    del piece
    torch.cuda.empty_cache()
