"""How a model would lie on a device that is not here: precision, weights, what steps need, and the KV blocks that are left.

The engine's own rules divide the memory (worker/memory.py); what the engine measures on a real card is a bound or an assumption here.

What lives here: putting sizes together, and what is said when they do not fit. What may not: torch at import, prices, running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.executor import ExecutorInfo
from headrace.errors import ConfigError
from headrace.models import families
from headrace.planner.devices import GIB, Device, known_devices
from headrace.spec import DecoderSpec, KVSpec, kv_groups

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CARD_BYTES = 3 * GIB // 2  # a context, kernels and graphs, as a start on an H200 takes them


@dataclass(frozen=True, slots=True)
class Placement:
    """What an executor on that device would say of itself, and in which precision it would compute."""

    info: ExecutorInfo
    dtype: str
    kv_specs: tuple[KVSpec, ...]


def place(spec: DecoderSpec, config: EngineConfig, device: Device) -> Placement:
    """``config`` is resolved. Raises ConfigError or OutOfMemory with the numbers."""
    from headrace.worker.memory import Room, plan_kv

    dtype = dtype_of(spec, config, device)
    check_kv_dtype(config.cache.kv_cache_dtype, dtype)
    available = int(device.memory * (config.cache.gpu_memory_utilization if device.overlaps else 1.0))
    purposes = _purposes(spec, config, device, ELEMENT_BYTES[dtype])
    _check_fits(spec, device, available, purposes)
    tokens_a_step, block_size = config.scheduler.max_num_batched_tokens, config.cache.block_size
    assert tokens_a_step is not None and block_size is not None, "resolved"
    specs = kv_groups(spec, block_size, ELEMENT_BYTES[dtype])
    plan = plan_kv(
        specs,
        config.cache,
        Room(available, purposes),
        on_cpu=not device.overlaps,
        max_num_seqs=config.scheduler.rows,
        tokens_a_step=tokens_a_step,
        max_positions=spec.max_positions,
        requested_len=config.model.max_model_len,
    )
    memory = {**purposes, "kv_cache": plan.num_bytes}
    info = ExecutorInfo(spec.vocab_size, plan.max_model_len, config.scheduler.rows, plan.groups, f"{device.kind} (modelled: {device.name})", memory)
    return Placement(info, dtype, specs)


def dtype_of(spec: DecoderSpec, config: EngineConfig, device: Device) -> str:
    """As the engine would choose; ``cpu`` is this one."""
    from headrace.worker.settings import resolve_dtype

    return str(resolve_dtype(config.model.dtype, spec.checkpoint_dtype, device.kind)[1].value)


def check_kv_dtype(requested: str, dtype: str) -> None:
    """As the engine does. Raises ConfigError."""
    if requested not in ("auto", dtype):
        raise ConfigError(f"--kv-cache-dtype is {requested}, but the model computes in {dtype} and the cache cannot differ yet; leave it at auto.")


def weight_bytes(spec: DecoderSpec, element_bytes: int) -> int:
    return families.count_weights(spec) * element_bytes


def _purposes(spec: DecoderSpec, config: EngineConfig, device: Device, element_bytes: int) -> dict[str, int]:
    """Bytes for anything but KV."""
    from headrace.worker.memory import activation_bytes

    scheduler = config.scheduler
    tokens = scheduler.max_num_batched_tokens or 1
    logits_rows = min(scheduler.logits_rows, max(scheduler.rows, tokens))
    purposes = {"weights": weight_bytes(spec, element_bytes), "activations": activation_bytes(spec, tokens, logits_rows, element_bytes)}
    return purposes | ({"context, kernels and graphs": CARD_BYTES} if device.overlaps else {})


def _check_fits(spec: DecoderSpec, device: Device, available: int, purposes: Mapping[str, int]) -> None:
    needed = sum(purposes.values())
    if needed < available:
        return
    parts = ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in purposes.items())
    share = available / device.memory
    larger = [name for name, each in known_devices().items() if each.memory * share > needed]
    smaller = "take a smaller model or --dtype bfloat16"
    if purposes["activations"] > purposes["weights"]:
        smaller = "lower --max-num-batched-tokens or --max-num-seqs"
    advice = f"It would fit on: {', '.join(larger)}." if larger else f"No device that is known here holds it; {smaller}."
    raise ConfigError(
        f"This model does not fit on {device.name}: {needed / GIB:.1f} GiB are needed ({parts}) before any KV, "
        f"and {available / GIB:.1f} of its {device.memory / GIB:.1f} GiB may be used. {advice}"
    )
