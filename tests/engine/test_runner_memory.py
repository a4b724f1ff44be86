"""How a worker divides memory and settles what is automatic: numbers in, numbers and refusals out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, resolve_kv_format
from headrace.errors import ConfigError, OutOfMemory
from headrace.models.source import find_model
from headrace.spec import KV_FORMATS, KVKind, KVSpec
from headrace.worker import settings
from headrace.worker.memory import GIB, KVPlan, Room, blocks_needed, check_weights_fit, plan_kv
from headrace.worker.settings import resolve_dtype, resolve_threads
from headrace.worker.worker import create_executor
from tests.support import tiny
from tests.support.hand_plans import worker_for

FULL = KVSpec((0, 1), KVKind.FULL, 16, 2, 64, 2)  # 16 KiB a block
SLIDING = replace(FULL, kind=KVKind.SLIDING, window=64)
ROOM = Room(8 * GIB, {"weights": 3 * GIB, "activations": GIB})  # 4 GiB left


def _plan(
    *specs: KVSpec,
    cache: CacheConfig | None = None,
    on_cpu: bool = True,
    seqs: int = 64,
    positions: int = 8192,
    asked: int | None = None,
) -> KVPlan:
    scheduler, model = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=512), ModelConfig(max_model_len=asked)
    config = EngineConfig(model=model, cache=cache or CacheConfig(), scheduler=scheduler)
    return plan_kv(specs, config, ROOM, max_positions=positions, on_cpu=on_cpu)


def test_a_cpu_gives_a_quarter_of_what_is_left() -> None:
    plan = _plan(FULL, seqs=1000)
    assert plan.num_bytes == GIB
    assert plan.max_model_len == 8192


def test_a_gpu_gives_all_that_is_left() -> None:
    assert _plan(FULL, on_cpu=False, seqs=10_000).num_bytes == 4 * GIB


def test_no_more_blocks_than_all_rows_can_use() -> None:
    assert _plan(FULL, seqs=3, positions=100).groups[0].num_blocks == 3 * 7


def test_max_model_len_shrinks_to_what_the_cache_holds_and_says_so() -> None:
    plan = _plan(FULL, cache=CacheConfig(kv_cache_memory=FULL.bytes_per_block * 10), positions=8192)
    assert plan.max_model_len == 160
    assert "8192" in next(decision.reason for decision in plan.decisions if decision.name == "max_model_len")


def test_a_window_needs_few_blocks_and_leaves_the_rest_to_full_attention() -> None:
    plan = _plan(FULL, SLIDING, seqs=4, cache=CacheConfig(kv_cache_memory=FULL.bytes_per_block * 1000))
    full, sliding = (group.num_blocks for group in plan.groups)
    assert sliding == 4 * blocks_needed(SLIDING, 8192) + 512 // 16 == 4 * 7 + 32
    assert full + sliding == 1000


def test_every_group_holds_one_longest_sequence() -> None:
    plan = _plan(FULL, SLIDING, cache=CacheConfig(kv_cache_memory=FULL.bytes_per_block * 100))
    for group in plan.groups:
        assert group.num_blocks >= blocks_needed(group.spec, plan.max_model_len)
    assert plan.num_bytes <= FULL.bytes_per_block * 100
    assert plan.max_model_len == 16 * (100 - blocks_needed(SLIDING, 8192))


def test_a_requested_length_that_does_not_fit_names_both_flags() -> None:
    with pytest.raises(
        ConfigError, match=r"4096 tokens needs 0\.004 GiB.*--max-model-len to at most 160.*--kv-cache-memory to 4194304"
    ):
        _plan(FULL, cache=CacheConfig(kv_cache_memory=FULL.bytes_per_block * 10), asked=4096)
    with pytest.raises(ConfigError, match="9000, but this model has positions for 8192"):
        _plan(FULL, asked=9000)


def test_a_requested_length_may_take_more_than_the_default_share() -> None:
    positions = 16 * (GIB + GIB // 2) // FULL.bytes_per_block
    assert _plan(FULL, positions=positions, asked=positions).num_bytes >= GIB + GIB // 2


def test_more_than_there_is_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory, match=r"5\.00 GiB.*weights 3\.00 GiB, activations 1\.00 GiB.*4\.00 GiB left"):
        _plan(FULL, cache=CacheConfig(kv_cache_memory=5 * GIB))
    with pytest.raises(OutOfMemory, match=r"8\.00 GiB.*weights 9\.00 GiB"):
        check_weights_fit(Room(8 * GIB, {"weights": 9 * GIB}), torch.device("cpu"))


@pytest.mark.parametrize(
    ("requested", "stored", "fast", "expected"),
    [
        ("auto", "bfloat16", True, torch.bfloat16),
        ("auto", "bfloat16", False, torch.bfloat16),
        ("auto", "float16", True, torch.bfloat16),
        ("float16", "float32", False, torch.float32),
        ("bfloat16", "float32", False, torch.bfloat16),
        ("float32", "bfloat16", True, torch.float32),
    ],
)
def test_precision_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, requested: str, stored: str, fast: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(settings, "has_fast_bf16", lambda: fast)
    dtype, decision = resolve_dtype(requested, stored, "cpu")
    assert dtype == expected and decision.value == str(expected).removeprefix("torch.")
    assert resolve_dtype(requested, stored, "cuda")[0] == settings.DTYPES[stored if requested == "auto" else requested]


def test_a_cache_of_another_precision_is_refused() -> None:
    assert resolve_kv_format("bfloat16", "bfloat16", 64) is None
    with pytest.raises(ConfigError, match=r"float32.*bfloat16.*int8"):
        resolve_kv_format("float32", "bfloat16", 64)


def test_the_same_memory_holds_more_tokens() -> None:
    cache = CacheConfig(kv_cache_memory=FULL.bytes_per_block * 100)
    blocks = {
        name: _plan(replace(FULL, format=form), cache=cache).groups[0].num_blocks for name, form in KV_FORMATS.items()
    }
    assert blocks == {"fp8_e4m3": 200, "fp8_e5m2": 200, "int8": 193, "int4": 355}


def test_a_cache_of_fewer_bits_needs_heads_that_fit() -> None:
    assert resolve_kv_format(CacheConfig(kv_cache_dtype="fp8").kv_cache_dtype, "bfloat16", 33) is KV_FORMATS["fp8_e4m3"]
    with pytest.raises(ConfigError, match=r"33 elements.*4 bits; int8"):
        resolve_kv_format("int4", "bfloat16", 33)
    with pytest.raises(ConfigError, match="int3"):
        CacheConfig(kv_cache_dtype="int3")
    assert CacheConfig(kv_cache_dtype="int8_per_token_head").kv_cache_dtype == "int8"


def test_threads_are_bounded_by_cores() -> None:
    assert resolve_threads(7) == (7, None)
    threads, decision = resolve_threads(None)
    assert threads >= 1 and decision is not None and decision.reason


def test_a_worker_accounts_for_its_memory(tmp_path: Path) -> None:
    folder = tiny.save("qwen3", tmp_path, tokenizer=False)  # a tied head: counted once
    executor = worker_for(folder)
    parameters = sum(p.numel() for p in tiny.create("qwen3").parameters())
    tables = executor.info.memory["weights"] - 4 * parameters
    assert 0 <= tables <= 4 * 256 * 32  # the rotary table
    assert executor.info.memory["process"] > 0
    group = executor.info.kv_groups[0]
    assert executor.info.memory["kv_cache"] == 96 * group.spec.bytes_per_block
    assert executor.info.max_model_len == 256


def test_an_unresolved_config_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(model=str(tiny.save("llama", tmp_path, tokenizer=False)))
    with pytest.raises(ConfigError, match="resolve"):
        create_executor(EngineConfig(model=model), find_model(model))
