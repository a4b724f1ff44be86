"""Choices that only the model and the device can make, each with its reason; and what an engine then says about itself.

What lives here: automatic values of the engine's own fields, the executor without a model. What may not: torch, loading, the loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.config import Decision, EngineConfig
from headrace.engine.core import EngineCore
from headrace.engine.executor import KeyedHashExecutor, keyed_hash_info
from headrace.engine.info import EngineInfo
from headrace.errors import ConfigError
from headrace.models.source import ModelSource, find_model
from headrace.techniques import TECHNIQUES, Technique

CPU_TOKENS_A_STEP = 512  # about two seconds of a 1B model's prefill: what a running answer may have to wait
CPU_TOKENS_A_TIMED_STEP = 2048
CUDA_TOKENS_A_STEP = 8448  # 64 a processor of an H200: whole rounds of tiles in every product; a fifth of a second of an 8B model's prefill
LONG_TOKENS_A_STEP = 16384
DEFAULT_ROWS = 256
CUDA_ROWS = 512
DEFAULT_BLOCK_SIZE = 16  # tokens
HASH_TOKENS_A_STEP = 2048
HASH_SLOTS = 1 << 20  # tokens, if that holds one sequence; eight bytes each
MAX_HASH_SLOTS = 1 << 24


def find_source(config: EngineConfig) -> ModelSource:
    """The model's files; without a model to compute its weights are not looked for."""
    weightless = config.device.executor == "keyed-hash"
    return find_model(replace(config.model, load_format="dummy") if weightless else config.model)


def resolve_config(config: EngineConfig, device: str, *, long_steps: bool = False) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """Fills max_num_seqs, max_num_batched_tokens, block_size, overlap and, for ``deadline``, max_step_ms.

    ``device``: "cpu", "cuda" or "none" (keyed-hash).

    ``long_steps``: nobody reads answers while they are written, and the model gains by longer steps (worker/settings.py).
    """
    decisions: list[Decision] = []
    if config.scheduler.max_num_seqs is None:
        rows, reason = _sequences_at_once(device)
        decisions.append(Decision("max_num_seqs", rows, reason))
        config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=rows))
    splits = config.scheduler.chunked_prefill and config.cache.kv_caching  # prompts: a step of whole ones takes what it takes
    if config.scheduler.scheduling_policy == "deadline" and config.scheduler.max_step_ms is None and device != "none" and splits:
        bound = config.scheduler.tpot_target_ms
        decisions.append(Decision("max_step_ms", bound, "deadline: steps keep to the time between tokens (--tpot-target-ms)"))
        config = replace(config, scheduler=replace(config.scheduler, max_step_ms=bound))
    if config.scheduler.max_num_batched_tokens is None:
        tokens, reason = _tokens_a_step(device, long_steps=long_steps, timed=config.scheduler.max_step_ms is not None)
        tokens = max(tokens, config.scheduler.rows)
        decisions.append(Decision("max_num_batched_tokens", tokens, reason))
        config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=tokens))
    if config.cache.block_size is None:
        size, reason = _block_size(device)
        decisions.append(Decision("block_size", size, reason))
        config = replace(config, cache=replace(config.cache, block_size=size))
    if config.device.overlap is None:
        depth, reason = _overlap(device, config.device.device_time)
        decisions.append(Decision("overlap", depth, reason))
        config = replace(config, device=replace(config.device, overlap=depth))
    return config, tuple(decisions)


def _sequences_at_once(device: str) -> tuple[int, str]:
    if device == "cuda":
        return CUDA_ROWS, "a step reads the weights once for all of them; beyond, keys and values are most of what it reads"
    if device == "cpu":
        return DEFAULT_ROWS, "more would only share the same cores"
    return DEFAULT_ROWS, "the keyed-hash executor's default"


def _tokens_a_step(device: str, *, long_steps: bool, timed: bool) -> tuple[int, str]:
    if device == "cpu" and timed:
        return CPU_TOKENS_A_TIMED_STEP, "--max-step-ms bounds steps that answers wait for; the others may compute more at once"
    if device == "cuda" and long_steps:
        return LONG_TOKENS_A_STEP, "offline only the whole counts, and this model's fewer, larger steps read experts less often or launch less"
    if device == "cuda":
        return CUDA_TOKENS_A_STEP, "fills the device, an H200 with whole rounds of tiles; running answers wait no longer than that takes"
    if device == "cpu":
        return CPU_TOKENS_A_STEP, "prompts beside running answers are computed in chunks short enough for a CPU"
    return HASH_TOKENS_A_STEP, "the keyed-hash executor's default"


def _block_size(device: str) -> tuple[int, str]:
    if device == "cuda":
        return 128, "whole tiles of keys and values, as the attention kernels read them"
    return DEFAULT_BLOCK_SIZE, "small blocks share more of a prefix and waste less of a short answer"


def _overlap(device: str, device_time: float) -> tuple[int, str]:
    if device == "cuda":
        return 1, "the next step is scheduled while the device runs this one"
    if device == "cpu":
        return 0, "scheduling would compete with computing for the same cores"
    return (1, "the next step is scheduled while this one's device time passes") if device_time else (0, "there is no device to keep busy")


def create_hash_executor(config: EngineConfig, source: ModelSource) -> KeyedHashExecutor:
    """No model is computed; vocabulary and context are those of ``source``, so that its tokenizer fits."""
    longest = _positive(source.config.get("max_position_embeddings"), 4096)
    max_model_len = config.model.max_model_len or longest
    if max_model_len > MAX_HASH_SLOTS:
        raise ConfigError(f"max_model_len is {max_model_len}, but the keyed-hash executor holds {MAX_HASH_SLOTS} tokens at most; give less.")
    block_size, rows = config.cache.block_size or DEFAULT_BLOCK_SIZE, config.scheduler.rows
    needed = -(-max_model_len // block_size)
    num_blocks = config.cache.num_blocks or max(needed, min(rows * needed, HASH_SLOTS // block_size))
    info = keyed_hash_info(
        vocab_size=_positive(source.config.get("vocab_size"), 512),
        max_model_len=max_model_len,
        max_num_seqs=rows,
        num_blocks=num_blocks,
        block_size=block_size,
    )
    return KeyedHashExecutor(info, key=config.model.seed, device_time=config.device.device_time)


def _positive(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


def describe(config: EngineConfig, source: ModelSource, core: EngineCore, eos: tuple[int, ...], decisions: tuple[Decision, ...]) -> EngineInfo:
    """The engine's own account of itself, once it stands."""
    info = core.executor.info
    model = config.model.model or source.name
    return EngineInfo(
        model=model,
        served_names=config.model.served_model_name or (model,),
        max_model_len=info.max_model_len,
        max_sequence_tokens=core.scheduler.max_sequence_tokens,
        vocab_size=info.vocab_size,
        max_num_seqs=core.scheduler.limits.max_num_seqs,
        eos_token_ids=eos,
        device=info.device,
        dtype=next((str(each.value) for each in decisions if each.name == "dtype"), config.model.dtype),
        decisions=decisions,
        memory=info.memory,
        techniques={technique.name: _state_of(technique, config, info.device) for technique in TECHNIQUES},
        max_num_batched_tokens=core.scheduler.limits.max_num_batched_tokens,
    )


def _state_of(technique: Technique, config: EngineConfig, device: str) -> str:
    """How a technique stands in a resolved config."""
    folder, _, name = technique.switch.partition(".")
    value = getattr(getattr(config, folder), name)
    if needed := technique.lacks(device):
        return f"needs a {needed}"
    if value == technique.off:
        return "off"
    return "on" if isinstance(value, bool) or value == technique.on else str(value)
