"""Automatic choices about the device: which one, how many threads, which precision; each with its reason.

What lives here: ``resolve_*`` of what only the device can tell. What may not: memory (memory.py), loading, running.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from headrace.config import Decision
from headrace.cost.shapes import multiplications
from headrace.errors import ConfigError
from headrace.models import families
from headrace.spec import DecoderSpec
from headrace.worker.eligibility import GPU, find_gpu
from headrace.worker.host import has_fast_bf16, physical_cores

_log = logging.getLogger(__name__)

_ROOMY = 64 * 2**30  # bytes
# Weights of a dense layer, from which on whole rounds of tiles are worth more than fewer steps: so it is with 218 million (8B), and not with
# 61 (1B); what lies between was not measured.
_LARGE_LAYER = 150_000_000

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def device_kind(requested: str) -> str:
    """cpu or cuda, for the config's auto, cpu or cuda. Raises ConfigError when a GPU is asked for and there is none that can be used."""
    return _device(requested)[0]


def resolve_device(requested: str) -> tuple[str, Decision | None]:
    """As ``device_kind``, with the reason of an automatic choice; a GPU that is there and cannot be used is a warning too."""
    kind, gpu = _device(requested)
    if gpu is None or requested != "auto":
        return kind, None
    if gpu.problem is None:
        return kind, Decision("device", kind, f"found {gpu.name}, compute capability {'.'.join(map(str, gpu.capability or ()))}")
    if gpu.name is None:
        return kind, Decision("device", kind, "there is no NVIDIA GPU here, so the CPU computes")
    reason = f"{gpu.problem}; --device cpu runs instead"
    _log.warning("%s", reason)
    return kind, Decision("device", kind, reason)


def _device(requested: str) -> tuple[str, GPU | None]:
    if requested == "cpu":
        return "cpu", None
    gpu = find_gpu()
    if requested == "cuda" and gpu.problem is not None:
        raise ConfigError(f"--device is cuda: {gpu.problem}. --device cpu runs here.")
    return "cuda" if gpu.problem is None else "cpu", gpu


def has_room(kind: str) -> bool:
    """Whether the activations of a very large step are a small part of the device's memory."""
    return kind == "cuda" and torch.cuda.get_device_properties(0).total_memory >= _ROOMY


def gains_by_long_steps(spec: DecoderSpec) -> bool:
    """Whether very long steps are quicker a token than steps of whole rounds of tiles: a sparse model's read experts less often, those of a
    model with small layers launch less."""
    return any(layer.moe for layer in spec.layers) or multiplications(spec) < _LARGE_LAYER


def takes_long_steps(kind: str, model: Mapping[str, Any]) -> bool:
    """``model``: its config.json. Who reads along is another matter."""
    return has_room(kind) and gains_by_long_steps(families.spec_from_config(model))


def resolve_threads(requested: int | None) -> tuple[int, Decision | None]:
    """CPU threads that compute. More threads than physical cores slow matrix products down."""
    if requested is not None:
        return requested, None
    cores, reason = physical_cores()
    return cores, Decision("threads", cores, reason)


def resolve_dtype(requested: str, checkpoint_dtype: str, device: str) -> tuple[torch.dtype, Decision]:
    """The precision of weights, activations and KV."""
    name = checkpoint_dtype if requested == "auto" else requested
    origin = "as the checkpoint is stored" if requested == "auto" else "as asked for"
    if name not in DTYPES:
        return torch.float32, Decision("dtype", "float32", f"the checkpoint is stored as {name}, which nothing computes in")
    if device != "cpu" or name == "float32" or (name == "bfloat16" and (requested != "auto" or has_fast_bf16())):
        return DTYPES[name], Decision("dtype", name, origin)
    # float16 has no fast arithmetic on CPUs; bfloat16 has, on some.
    chosen = "bfloat16" if has_fast_bf16() else "float32"
    why = "this CPU multiplies bfloat16 in hardware" if chosen == "bfloat16" else "this CPU has no bfloat16 arithmetic"
    return DTYPES[chosen], Decision("dtype", chosen, f"{name} {origin}, but computed in {chosen}: {why}")


def check_kv_dtype(requested: str, dtype: torch.dtype) -> None:
    """The cache holds what the model computes in; anything else is refused."""
    if requested != "auto" and DTYPES[requested] != dtype:
        name = next(key for key, value in DTYPES.items() if value == dtype)
        raise ConfigError(f"--kv-cache-dtype is {requested}, but the model computes in {name} and the cache cannot differ yet; leave it at auto.")
