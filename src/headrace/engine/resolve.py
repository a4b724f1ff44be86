"""Choices that only the model and the device can make, each with its reason; and what an engine then says about itself.

What lives here: an EngineConfig from keywords, as ``LLM(...)`` takes them (names to fields), automatic values of the
engine's own fields (choices.toml), the executor without a model. What may not: checks of values (config.py), torch,
loading, the loop.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.config import ENGINE_PARTS, Decision, EngineConfig, engine_config, field_types, switches
from headrace.engine.info import EngineInfo
from headrace.errors import ConfigError
from headrace.models.source import ModelSource, WeightFormat, find_model
from headrace.request import Given, Json
from headrace.spec import DecoderSpec
from headrace.speculative.settings import read_settings

if TYPE_CHECKING:  # a front end finds the model, and needs neither a scheduler nor an executor for that
    from headrace.engine.core import EngineCore
    from headrace.engine.keyed_hash import KeyedHashExecutor
    from headrace.techniques import Technique

_CHOSEN = tomllib.loads(Path(__file__).with_name("choices.toml").read_text(encoding="utf-8"))
HASH_SLOTS = 1 << 20  # tokens, if that holds one sequence; eight bytes each
MAX_HASH_SLOTS = 1 << 24


def find_source(config: EngineConfig) -> ModelSource:
    """The model's files; without a model to compute its weights are not looked for."""
    weightless = config.device.executor == "keyed-hash"
    return find_model(replace(config.model, load_format="dummy") if weightless else config.model)


def resolve_config(
    config: EngineConfig, device: str, *, long_steps: bool = False, least_tokens: int = 0
) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """Fills max_num_seqs, max_num_batched_tokens, block_size, overlap and, for ``deadline``, max_step_ms; for shared
    weights on a GPU max_logits_rows.

    ``device``: "cpu", "cuda" or "none" (keyed-hash).

    ``long_steps``: answers are not read while they are written, and the model gains by longer steps
    (worker/settings.py). ``least_tokens``: of a step, unless the user says otherwise.
    """
    decisions: list[Decision] = []

    def choose(folder: str, name: str, case: str = "", least: int = 0, times: int = 1) -> None:
        nonlocal config
        section = getattr(config, folder)
        if getattr(section, name) is None:
            value, reason = _CHOSEN[name].get(f"{device}, {case}") or _CHOSEN[name][device]
            value, reason = max(value * times, least), reason + f"; on each of {times} ranks" * (times > 1)
            decisions.append(Decision(name, value, reason))
            config = replace(config, **{folder: replace(section, **{name: value})})

    shares = device == "cuda" and config.model.share_weights
    choose("scheduler", "max_num_seqs", "shared weights" if shares else "")
    asked = config.scheduler
    splits = asked.chunked_prefill and config.cache.kv_caching  # prompts: a step of whole ones takes what it takes
    if asked.scheduling_policy == "deadline" and asked.max_step_ms is None and device != "none" and splits:
        bound = asked.tpot_target_ms
        reason = "deadline: steps keep to the time between tokens (--tpot-target-ms)"
        decisions.append(Decision("max_step_ms", bound, reason))
        config = replace(config, scheduler=replace(asked, max_step_ms=bound))
    cases = {
        "timed": device == "cpu" and config.scheduler.max_step_ms is not None,
        "shared weights": shares,
        "long steps": long_steps,
    }
    case = next((name for name, holds in cases.items() if holds), "")
    places = config.device.context_parallel_size if device == "cuda" else 1  # each computes some of a step's tokens
    choose("scheduler", "max_num_batched_tokens", case, max(config.scheduler.rows, least_tokens), places)
    if shares and config.scheduler.max_logits_rows is None:
        rows = config.scheduler.rows
        decisions.append(
            Decision("max_logits_rows", rows, "as many as sequences, beside others that share the weights")
        )
        config = replace(config, scheduler=replace(config.scheduler, max_logits_rows=rows))
    choose("cache", "block_size")
    choose("device", "overlap", "busy" if config.device.device_time else "")
    return config, tuple(decisions)


def resolve_pooling(config: EngineConfig, spec: DecoderSpec) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """Prompts are computed whole, and nothing of them is cached, where the model can compute no part of one. Raises
    ConfigError."""
    if spec.pooling is None:
        return config, ()
    if config.device.prefill_replicas:
        raise ConfigError(
            f"prefill_replicas is {config.device.prefill_replicas}, but this model answers with a vector, whose prompts nobody takes over; "
            "leave it out."
        )
    how = {"last": "the last token's", "cls": "the first token's", "mean": "the mean of all tokens'"}[spec.pooling.kind]
    further = ", normalized" if spec.pooling.normalize else ", and a head" if spec.pooling.task == "score" else ""
    task = Decision("task", spec.pooling.task, f"of hidden states {how}{further}")
    if not spec.whole_prompts:
        return config, (task,)
    reason = "tokens see what follows them" if not spec.causal else "the result takes in every token of a prompt"
    said = Decision("kv_caching", False, f"{reason}, so prompts are computed in one step")
    return replace(config, cache=replace(config.cache, kv_caching=False)), (task, said)


def estimated_bytes(config: EngineConfig) -> int:
    """About what an engine will hold, before it is there: its weights as they are stored, and a KV cache whose size was
    given. Finds the model, and fetches one of a hub. Raises ModelError."""
    source = find_source(config)
    files = [source.path] if source.path.is_file() else list(source.path.glob("*.safetensors"))
    weightless = source.weights is WeightFormat.DUMMY
    return (config.cache.kv_cache_memory or 0) + (0 if weightless else sum(each.stat().st_size for each in files))


def create_hash_executor(config: EngineConfig, source: ModelSource) -> KeyedHashExecutor:
    """No model is computed; vocabulary and context are those of ``source``, so that its tokenizer fits."""
    from headrace.engine.keyed_hash import KeyedHashExecutor, keyed_hash_info

    longest = _positive(source.config.get("max_position_embeddings"), 4096)
    max_model_len = config.model.max_model_len or longest
    if max_model_len > MAX_HASH_SLOTS:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the keyed-hash executor holds {MAX_HASH_SLOTS} tokens at most; give less."
        )
    block_size, rows = config.cache.block_size or _CHOSEN["block_size"]["none"][0], config.scheduler.rows
    needed = -(-max_model_len // block_size)
    settings = read_settings(config.scheduler.speculative_config)
    num_blocks = config.cache.num_blocks or max(needed, min(rows * needed, HASH_SLOTS // block_size))
    info = keyed_hash_info(
        vocab_size=_positive(source.config.get("vocab_size"), 512),
        max_model_len=max_model_len,
        max_num_seqs=rows,
        num_blocks=num_blocks,
        block_size=block_size,
        max_drafts=settings.most if settings is not None else 0,
        adapters=config.adapters.space(rows) if config.adapters.enable_lora else None,
    )
    info = replace(
        info, memory={"kv_cache": sum(each.num_blocks * each.spec.bytes_per_block for each in info.kv_groups)}
    )
    return KeyedHashExecutor(info, key=config.model.seed, device_time=config.device.device_time)


def _positive(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


def describe(
    config: EngineConfig, source: ModelSource, core: EngineCore, eos: tuple[int, ...], decisions: tuple[Decision, ...]
) -> EngineInfo:
    """The engine's own account of itself, once it stands."""
    from headrace.techniques import TECHNIQUES

    info = core.executor.info
    model = config.model.model or source.name
    return EngineInfo(
        model=model,
        served_names=config.model.served_model_name or (model,),
        max_model_len=info.max_model_len,
        max_sequence_tokens=core.scheduler.max_sequence_tokens - (info.pooling is not None),
        vocab_size=info.vocab_size,
        max_num_seqs=core.scheduler.limits.max_num_seqs,
        eos_token_ids=eos,
        device=info.device,
        dtype=next((str(each.value) for each in decisions if each.name == "dtype"), config.model.dtype),
        decisions=decisions,
        memory=info.memory,
        techniques={technique.name: _state_of(technique, config, info.device) for technique in TECHNIQUES},
        max_num_batched_tokens=core.scheduler.limits.max_num_batched_tokens,
        can_sleep=config.device.enable_sleep_mode,
        task="generate" if info.pooling is None else info.pooling.task,
        pooling=info.pooling,
        segments=_positive(source.config.get("type_vocab_size"), 0),
        num_blocks=core.scheduler.cache.num_blocks,
        block_size=info.kv_groups[0].spec.block_size if info.kv_groups else 16,
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


def create_config(
    model: str | os.PathLike[str] | None = None, *, technique: Given | None = None, **keywords: Any
) -> EngineConfig:
    """Raises ConfigError for a name that is no config field (naming the nearest ones) and for a value its field does
    not allow."""
    given = {**keywords, **_switches(technique or {})}
    if model is not None:
        given["model"] = model
    known = [name for part in ENGINE_PARTS.values() for name in field_types(part)]
    for name in given:
        if name not in known:
            raise ConfigError(f"{name!r} is not an option of the engine{_near(name, known)}")
    return engine_config(given)


def _switches(technique: Given) -> Json:
    """Values by field name; hyphens and a missing ``enable_`` are accepted, as on the command line, and so are True and
    False for any switch."""
    known, found = switches(), Json()
    for written, value in technique.items():
        name = written.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{written!r} is not a technique with a switch{_near(written, known)}")
        each = known[name][1]
        found[each.name] = each.metadata.get("on" if value else "off", value) if isinstance(value, bool) else value
    return found


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_"), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; the known ones are {', '.join(sorted(known))}."
