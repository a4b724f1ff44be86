"""The candidates for attention with rotary embedding and the cache write inside, for the registry.

What lives here: what declines a call site before anything is compiled, and what a start builds. What may not: kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from headrace.kernels.candidate import Candidate, Declined, Site, Sizes
from headrace.kernels.triton.candidates import missing

ROPE = "rope"
ROPE_CASCADE = "rope_cascade"  # which leaves steps in which sequences may share keys to cascade attention
_CAPABILITY = (9, 0)  # programmatic launches, 227 KiB of shared memory
_HEAD_DIMS = (64, 128)
_MOST_GROUP = 8  # heads of a KV head: the columns of one matrix instruction


def why_not(facts: Mapping[str, Any]) -> str | None:
    """Why layers with these facts are not served; None: they are."""
    head_dim, heads, kv_heads = (facts.get(name) for name in ("head_dim", "num_heads", "num_kv_heads"))
    if facts.get("dtype") is not torch.bfloat16:
        return f"element type {str(facts.get('dtype')).removeprefix('torch.')} is not bfloat16"
    if head_dim not in _HEAD_DIMS:
        return f"head_dim {head_dim} is none of {', '.join(map(str, _HEAD_DIMS))}"
    if not heads or not kv_heads or heads % kv_heads or heads // kv_heads > _MOST_GROUP:
        return f"{heads} heads over {kv_heads} KV heads are no group of 1 to {_MOST_GROUP}"
    if facts.get("rotary_dim") != head_dim:
        return f"{facts.get('rotary_dim')} of {head_dim} elements of a head are turned, not all"
    if facts.get("normed"):
        return "heads are normed between the product and the rotation"
    if facts.get("window") is not None or facts.get("soft_cap") is not None:
        return "there is a window or a cap on scores"
    return None


def create_singles(site: Site) -> Any | None:
    """Who attends to single queries beside prompts at a call site of ``paged_attention``, as rope_attention.Singles; None: the others do."""
    turned = {"rotary_dim": site.facts.get("head_dim"), "normed": False, "window": None, "soft_cap": None}  # who calls sees to that
    if not site.cuda_decode or site.batch_invariant or site.unified_maximum or why_not({**site.facts, **turned}) is not None:
        return None
    if torch.cuda.get_device_capability(site.device) < _CAPABILITY:
        return None
    return import_module("headrace.kernels.cuda.rope_attention").create_singles(site)


def _create(site: Site, *, cascade: bool) -> Callable[..., Any] | Declined:
    """Whoever is declined loses nothing but speed: rotation and attention apart stand behind it."""
    if (reason := why_not(site.facts)) is not None or (reason := missing(site.device)) is not None:
        return Declined(reason, by_choice=True)
    if site.unified_maximum:
        return Declined("it looks for the maximum of every row", by_choice=True)
    if (capability := torch.cuda.get_device_capability(site.device)) < _CAPABILITY:
        return Declined("compute capability {}.{} is below {}.{}".format(*capability, *_CAPABILITY), by_choice=True)
    made: Callable[..., Any] = import_module("headrace.kernels.cuda.rope_attention").create(site, cascade=cascade)
    return made


def _rehearse(site: Site, made: Callable[..., Any], sizes: Sizes) -> Iterable[tuple[str, Callable[[], object]]]:
    yield f"blocks of {sizes.block_size}", partial(made.rehearse, sizes.block_size)  # type: ignore[attr-defined]


def _failure(error: Exception) -> str | None:
    reason: str | None = import_module("headrace.kernels.triton.toolchain").build_failure(error)
    return reason


def _candidate(name: str, *, cascade: bool) -> Candidate:
    def create(site: Site) -> Callable[..., Any] | Declined:
        return _create(site, cascade=cascade)

    return Candidate(name, create, ("cuda",), batch_invariant=False, failure=_failure, rehearse=_rehearse)


ROPE_ATTENTION = (_candidate(ROPE_CASCADE, cascade=True), _candidate(ROPE, cascade=False))
