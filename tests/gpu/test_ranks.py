"""Ranks, stages and replicas on several cards, against the same requests one by one on the CPU: float32, so tokens are
equal; and a rank that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace import LLM, LoRARequest, SamplingParams
from headrace.errors import EngineDead
from headrace.request import RequestOutput
from tests.support import adapters, tiny
from tests.support.card import STRICT, Judge, params, require_card

require_card()
if torch.cuda.device_count() < 2:
    pytest.skip("needs two cards", allow_module_level=True)

PROMPTS = [[(7 * i + 3 * j) % 8000 for j in range(5 + 11 * i % 97)] for i in range(23)]
SMALL = [[each % 300 for each in prompt] for prompt in PROMPTS]  # of a tiny model's tokens
ASKED = (
    params(max_tokens=20, logprobs=1),
    params(max_tokens=20, temperature=0.8, top_p=0.9, top_k=50, seed=3, logprobs=2, prompt_logprobs=1),
)
MODES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "eager, chunks of 33": {"enforce_eager": True, "max_num_batched_tokens": 33},
    "preempted, overlap 2": {"num_blocks": 24, "block_size": 16, "overlap": 2},
    "rows shared out": {"sequence_parallel": True, "expert_dispatch": True},
    "rows shared out, eager": {"sequence_parallel": True, "expert_dispatch": True, "enforce_eager": True},
}
# tensor, pipeline, context parallel
LAYOUTS = {
    "tp2": (2, 1, 1),
    "pp2": (1, 2, 1),
    "cp2": (1, 1, 2),
    "tp2xpp2": (2, 2, 1),
    "tp2xcp2": (2, 1, 2),
    "pp2xcp2": (1, 2, 2),
    "pp4": (1, 4, 1),
}
DRAFTS: dict[str, dict[str, Any]] = {
    "n-grams": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "a model": {"model": str(Path(headrace.__file__).parent / "data" / "demo"), "num_speculative_tokens": 3},
}


def sizes(layout: str) -> dict[str, int]:
    """Skips where there are too few cards."""
    ranks, stages, places = LAYOUTS[layout]
    if torch.cuda.device_count() < ranks * stages * places:
        pytest.skip(f"needs {ranks * stages * places} cards")
    names = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    return dict(zip(names, LAYOUTS[layout], strict=True))


def ask(llm: LLM, asked: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_the_cpu(judge: Judge, layout: str, mode: str) -> None:
    with LLM(**{**STRICT, **MODES[mode], **sizes(layout)}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)


def test_queries_go_to_keys_that_are_many_more() -> None:
    """Prompts behind a long beginning that is cached; the one before had its keys come to its queries."""
    trunk = [(5 * at) % 8000 for at in range(2400)]
    prompts = [trunk + [(7 * i + 3 * j) % 8000 for j in range(36)] for i in range(8)]
    asked = params(max_tokens=12, logprobs=1)
    judge = Judge(enable_prefix_caching=True)
    with LLM(**{**STRICT, **sizes("cp2"), "block_size": 16}) as llm:
        for some in (prompts[:1], prompts):
            found = llm.generate([{"prompt_token_ids": each} for each in some], asked, use_tqdm=False)
            for prompt, answer in zip(some, found, strict=True):
                judge.check(prompt, asked, answer)
        assert llm.engine.core.stats().counters.prefix_hits >= 8 * 2400
    judge.close()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("pooled", [(2, 0), (2, 2)])
def test_stages_lend_each_other_memory(judge: Judge, pooled: tuple[int, int], eager: bool) -> None:
    with LLM(**{**STRICT, **sizes("pp2"), "pooled_layers": pooled, "enforce_eager": eager}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)


@pytest.mark.parametrize("layout", ["pp2", "cp2"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_ranks_accept_drafts_and_say_what_the_cpu_says(judge: Judge, drafts: str, layout: str) -> None:
    with LLM(**{**STRICT, **sizes(layout), "speculative_config": DRAFTS[drafts]}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)
        counts = llm.engine.core.stats().drafts
        assert counts is not None and sum(counts.accepted) > 20


@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_ranks_answer_with_adapters_as_the_cpu_does(tmp_path: Path, layout: str) -> None:
    made = tiny.create("llama", seed=3)
    made.save_pretrained(tmp_path / "base")
    every = (*adapters.LLAMA, "embed_tokens", "lm_head")
    paths = [adapters.write(tmp_path / name, made, targets=every, seed=at) for at, name in enumerate(("one", "two"))]
    prompts = [{"prompt_token_ids": each} for each in SMALL[:12]]
    asked = [LoRARequest("one"), None, LoRARequest("two")] * 4
    found = []
    for device in ({**STRICT, **sizes(layout)}, {"device": "cpu", "dtype": "float32", "threads": 2}):
        with LLM(tmp_path / "base", lora_modules=[f"{path.name}={path}" for path in paths], **device) as llm:
            answers = llm.generate(prompts, params(max_tokens=12, detokenize=False), use_tqdm=False, lora_request=asked)
            found.append([each.outputs[0].token_ids for each in answers])
    assert found[0] == found[1]


def test_replicas_that_hand_over_keys_say_what_the_cpu_says(judge: Judge) -> None:
    with LLM(**{**STRICT, "data_parallel_size": 2, "prefill_replicas": 1}) as llm:
        for asked in ASKED:
            for prompt, found in zip(PROMPTS, ask(llm, asked), strict=True):
                judge.check(prompt, asked, found)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("longest", [40, 900, 1900, 3000])
def test_sums_that_take_in_what_stands_behind_them_change_no_more_than_bfloat16_does(
    tmp_path: Path, longest: int, ranks: int
) -> None:
    """Scores of tokens that a model is made to write, in steps of up to 16 rows, by products as large as those that have
    kernels of their own: as near to float32 as without, and as on one card. Long prompts' sums are norms, too, in one
    launch, or in chunks that are sent while others are computed, in a graph or not."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} cards")
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 2048 * ranks,
        "num_attention_heads": 8 * ranks,
        "num_key_value_heads": 4 * ranks,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    }
    folder = str(tiny.save("llama", tmp_path, **sizes))
    draw = random.Random(6)
    lengths = [draw.randint(1, 40) for _ in range(36)] + [longest - 7 * at for at in range(4)]
    prompts = [{"prompt_token_ids": draw.choices(range(300), k=length)} for length in lengths]
    forced = params(max_tokens=10, allowed_token_ids=(77,), logprobs=0)

    def scores(folds: bool | None, **keywords: Any) -> list[float]:
        with LLM(folder, **{**STRICT, "max_model_len": 4096, "num_blocks": 2048, **keywords}) as llm:
            if folds is not None:
                assert llm.engine.core.executor.decoder.composed(16)[0] == folds  # type: ignore[attr-defined]
            found = llm.generate(prompts, forced, use_tqdm=False)
        return [next(iter(entry.values())).logprob for each in found for entry in each.outputs[0].logprobs or ()]

    halves: dict[str, Any] = {"dtype": "bfloat16"}
    exact, alone = scores(None), scores(True, **halves)
    two: dict[str, Any] = {**halves, "tensor_parallel_size": ranks}
    on, off = scores(True, **two), scores(False, **two, technique={"fused_sums": False})

    def apart(found: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact)

    assert len(exact) == 400 and on != off
    assert apart(off) <= 2 * apart(alone) + 2e-3, [apart(each) for each in (off, alone)]
    assert apart(on) <= 1.5 * max(apart(alone), apart(off)) + 2e-3, [apart(each) for each in (on, off, alone)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copies", [False, True])
def test_ranks_of_whole_experts_say_what_the_cpu_says(tmp_path: Path, mode: str, copies: bool) -> None:
    """With copies, one expert is on both cards: rows take turns, and tokens are what they were."""
    folder = str(tiny.save("qwen3-moe", tmp_path))
    placed = {index: [[0, 1, 2, 3, *([4] if copies else ())], [4, 5, 6, 7]] for index in range(3)}
    (tmp_path / "placed.json").write_text(json.dumps({"experts": placed}), encoding="utf-8")
    keywords = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "expert_placement": str(tmp_path / "placed.json"),
    }
    judge = Judge(folder)
    try:
        with LLM(folder, **{**STRICT, **MODES[mode], **keywords}) as llm:
            for asked in ASKED:
                found = llm.generate([{"prompt_token_ids": each} for each in SMALL], asked, use_tqdm=False)
                for prompt, answer in zip(SMALL, found, strict=True):
                    judge.check(prompt, asked, answer)
    finally:
        judge.close()


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_actors_of_ray_have_a_card_each(judge: Judge, layout: str) -> None:
    pytest.importorskip("ray")
    with LLM(**{**STRICT, **sizes(layout), "distributed_executor_backend": "ray"}) as llm:
        for prompt, found in zip(PROMPTS, ask(llm, ASKED[0]), strict=True):
            judge.check(prompt, ASKED[0], found)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
def test_a_rank_that_is_killed_in_a_step_ends_all_and_is_named(layout: str) -> None:
    with LLM(**{**STRICT, **sizes(layout)}) as llm:
        ask(llm, ASKED[0])
        (rank,) = llm.engine.core.executor._ranks._ranks  # type: ignore[attr-defined]
        collector = llm.submit([5, 6, 7], params(max_tokens=400))
        llm.turn()
        os.kill(rank.process.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(EngineDead, match="SIGKILL"):
            while not collector.finished:
                llm.turn()
            llm.turn()
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize("mode", MODES)
def test_an_expert_rank_that_is_killed_is_nobodys_failure(tmp_path: Path, mode: str) -> None:
    """In the middle of requests, of up to four ranks two that are no neighbours, one after the other."""
    folder = str(tiny.save("qwen3-moe", tmp_path))
    ranks = min(4, torch.cuda.device_count())
    keywords = {"tensor_parallel_size": ranks, "enable_expert_parallel": True, "expert_failover": True}
    judge = Judge(folder)
    try:
        with LLM(folder, **{**STRICT, **MODES[mode], **keywords}) as llm:
            for number in range(1, ranks, 2):
                collectors = [llm.submit(prompt, ASKED[0]) for prompt in SMALL]
                for _ in range(6):
                    llm.turn()
                others = llm.engine.core.executor._ranks._ranks  # type: ignore[attr-defined]
                os.kill(next(rank.process.pid for rank in others if rank.number == number), signal.SIGKILL)
                while not all(each.finished for each in collectors):
                    llm.turn()
                for prompt, each in zip(SMALL, collectors, strict=True):
                    judge.check(prompt, ASKED[0], each.output())
    finally:
        judge.close()
