"""Ranks that share the keys of every sequence answer as one rank does: every mode of the engine on ranks that are threads,
a request that no rank's cache holds as processes; and what does not go with them."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, ContextLengthExceeded
from headrace.kernels.attention.reference import merge_parts, paged_attention
from headrace.kernels.inputs import AttentionInputs, PassedKeys
from headrace.layers.basic import attend_between
from headrace.parallel.context import KeyShare
from tests.support import modes, tiny
from tests.support.ranks import ThreadGroup, as_threads, together

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module", params=modes.FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save(request.param, tmp_path_factory.mktemp(request.param)))


def check(model: str, oracle: modes.Oracle, seed: int, size: int, **more: Any) -> None:
    """``more``: of the mode."""
    rng = random.Random(seed)
    cases = modes.draw_cases(rng, oracle.vocab_size, 4)
    mode = modes.draw_mode(rng, failing=False)
    block = mode.keywords["block_size"] * size
    mode.keywords |= {"num_blocks": -(-modes.LONGEST // block) + rng.choice((0, 1, 5, 30)), **more}
    mode.keywords |= {"context_parallel_size": size}
    mode.keywords["batch_invariant"] &= mode.keywords.get("tensor_parallel_size", 1) <= 2
    for case, found in zip(cases, modes.run_trial(model, mode, cases, rng), strict=True):
        if found is not None:
            modes.compare(found, oracle.answer(case), may_fail=False)


@pytest.mark.parametrize(("model", "seed"), [*zip(modes.FAMILIES, range(3), strict=True)], indirect=["model"])
def test_no_mode_of_ranks_that_share_keys_changes_an_answer(
    model: str, oracle: modes.Oracle, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether keys go to the queries, or, as where many are cached, queries to the keys."""
    as_threads(monkeypatch)
    if seed == 1:
        monkeypatch.setattr(KeyShare, "passes_keys", lambda *_: False)
    check(model, oracle, seed, 2)


BOTH = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(("model", "more"), [*zip(modes.FAMILIES, BOTH, strict=False)], indirect=["model"])
def test_ranks_that_share_keys_share_layers_too(
    model: str, oracle: modes.Oracle, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_threads(monkeypatch)
    check(model, oracle, 5, 2, **more)


DRAFTS: tuple[dict[str, Any], ...] = (
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    {"model": "itself", "num_speculative_tokens": 2},
    {"method": "suffix", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
)


def drafting(model: str, kind: int) -> dict[str, Any]:
    own = {"model": model} if "model" in DRAFTS[kind] else {}
    return {"speculative_config": {**DRAFTS[kind], **own}}


@pytest.mark.parametrize(("model", "kind"), [*zip(modes.FAMILIES, range(2), strict=False)], indirect=["model"])
def test_ranks_that_share_keys_verify_drafts(
    model: str, oracle: modes.Oracle, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_threads(monkeypatch)
    check(model, oracle, 7, 2, **drafting(model, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("seed", range(50, 58))
def test_ranks_that_share_keys_verify_drafts_at_length(
    model: str, oracle: modes.Oracle, seed: int, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_threads(monkeypatch)
    if seed % 2:
        monkeypatch.setattr(KeyShare, "passes_keys", lambda *_: False)
    sizes = {"tensor_parallel_size": 1 + seed % 4 // 3, "pipeline_parallel_size": 1 + seed // 2 % 2}
    check(model, oracle, seed, 2, **drafting(model, kind), **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("model", [*tiny.MODELS], indirect=True)
@pytest.mark.parametrize("seed", range(30, 40))
def test_ranks_that_share_keys_share_layers_too_at_length(
    model: str, oracle: modes.Oracle, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_threads(monkeypatch)
    if seed % 2:
        monkeypatch.setattr(KeyShare, "passes_keys", lambda *_: False)
    sizes = {"tensor_parallel_size": (2, 1, 2, 4, 2)[seed % 5], "pipeline_parallel_size": (1, 2, 2, 1, 3)[seed % 5]}
    check(model, oracle, seed, 2 + seed // 5 % 2, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_keys_of_eight_bits_are_shared_too(model: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_threads(monkeypatch)
    sizes: dict[str, Any] = {"dtype": "float32", "threads": 1, "device": "cpu", "max_model_len": 128, "num_blocks": 32}
    found = []
    for size in (1, 2):
        with LLM(model, **sizes, kv_cache_dtype=kind, context_parallel_size=size) as llm:
            prompts: list[Any] = [{"prompt_token_ids": [*range(3, count)]} for count in (9, 40)]
            made = llm.generate(prompts, GREEDY, use_tqdm=False)
            found.append([list(each.outputs[0].token_ids) for each in made])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("model", [*tiny.MODELS], indirect=True)
@pytest.mark.parametrize("seed", range(10, 22))
def test_no_mode_of_ranks_that_share_keys_changes_an_answer_at_length(
    model: str, oracle: modes.Oracle, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_threads(monkeypatch)
    if seed % 2:
        monkeypatch.setattr(KeyShare, "passes_keys", lambda *_: False)
    check(model, oracle, seed, 2 + seed % 3)


def spread(model: str, **more: Any) -> LLM:
    return LLM(model, **{**modes.PLAIN, "max_num_seqs": 4, "context_parallel_size": 2, "block_size": 8, **more})


def test_a_request_that_no_rank_could_hold_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of 64 tokens each, of which a prompt and its answer take 112, twice: computed, then found cached."""
    as_threads(monkeypatch)
    model, prompt = str(tiny.save("llama", tmp_path)), [(7 * at) % 250 for at in range(104)]

    def answers(**more: Any) -> list[list[int]]:
        with spread(model, num_blocks=8, **more) as llm:
            found = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2)]
            assert llm.engine.core.stats().counters.prefix_hits == 96
            info = llm.engine.core.executor.info
            assert info.memory["kv_cache"] == 8 * info.kv_groups[0].spec.bytes_per_block
        return found

    with pytest.raises(ContextLengthExceeded, match="64 tokens, but the prompt has 104"):
        answers(context_parallel_size=1)
    assert answers() == answers(context_parallel_size=1, block_size=16)


def test_what_ranks_do_not_share_is_said_before_anything_starts(model: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="--context-parallel-size is 2, but draft heads"):
        spread(model, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    with pytest.raises(ConfigError, match="--context-parallel-size is 2, but accepted branches"):
        spread(model, speculative_config={"model": model, "num_speculative_tokens": 4, "tree": 2})
    if "gemma2" in model:
        with pytest.raises(ConfigError, match="5, but it does not divide the model's sliding window of 12 tokens"):
            spread(model, context_parallel_size=5)
    assert time.monotonic() - begun < 2


def test_a_rank_attends_to_its_own_keys_while_others_are_on_their_way() -> None:
    """Two queries on each of two ranks, which see different numbers of either one's keys."""
    generator = torch.Generator().manual_seed(3)
    caches = torch.randn(2, 2, 3, 1, 2, 4, generator=generator)  # [rank, k and v, blocks, heads, tokens, size]
    order: dict[int, list[str]] = {0: [], 1: []}

    def work(group: ThreadGroup) -> Tensor:
        later, told = group.all_gather_async, order[group.rank]

        def all_gather_async(x: Tensor) -> Any:
            taken = later(x)
            told.append("sent")
            return lambda: (told.append("taken"), taken())[1]

        def attend(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, *how: Any) -> Tensor:
            told.append(f"attends to {len(inputs.context_len) // 2} rank")
            return paged_attention(q, k, v, inputs, *how)

        group.all_gather_async = all_gather_async  # type: ignore[method-assign]

        def seen(blocks: list[int], counts: list[int]) -> AttentionInputs:
            table, start, context = (
                torch.tensor(each, dtype=torch.int32) for each in ([blocks] * 2, [0, 1, 2], counts)
            )
            return AttentionInputs(table, start, context, torch.zeros(2, dtype=torch.int64), 2, 1, 4)

        counts = [3, 1], [2, 1]
        others = seen([[4, 5], [0, 1]][group.rank], counts[1 - group.rank])
        passed = PassedKeys(torch.tensor([2, 0]), seen([2, 0], counts[group.rank]), others)
        inputs = replace(passed.own, passed=passed)
        q = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(group.rank))
        k, v = caches[group.rank]
        return attend_between(group, attend, merge_parts, q, k, v, inputs, 0.5, None, None, None)

    for rank, found in enumerate(together(2, work)):
        assert order[rank] == ["sent", "attends to 1 rank", "taken", "attends to 1 rank"]
        q = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(rank))
        for at, counts in enumerate(((3, 2), (1, 1))):
            k, v = (
                torch.cat([caches[each, part][[2, 0], 0].flatten(0, 1)[:count] for each, count in enumerate(counts)])
                for part in range(2)
            )
            wanted = torch.softmax(q[at] @ k.T * 0.5, dim=-1) @ v
            torch.testing.assert_close(found[at], wanted)
