"""The candidates for attention, rotary embedding and the cache write, best first.

What lives here: the ordered lists, what declines a call site before anything is compiled, small calls that build what a
model will launch. What may not: kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from headrace.kernels.attention.native import create_paged_attention, create_rotary_write
from headrace.kernels.attention.vendor import create_packed_attention, create_sequence_attention
from headrace.kernels.build import gpu
from headrace.kernels.build.native import native
from headrace.kernels.build.rehearsals import heads, token_counts
from headrace.kernels.candidate import Calls, CallSite, Candidate, Declined, HeadFacts, RopeFacts, Sizes
from headrace.kernels.inputs import Quantized
from headrace.kernels.linear.around import MOST_ROWS
from headrace.spec import attention_groups

CASCADE = "cascade"  # reads shared prefixes once
ROPE = "rope"
ROPE_CASCADE = "rope_cascade"  # which leaves steps in which sequences may share keys to cascade attention
MAX_HEAD_DIM = 256
_ROPE_CAPABILITY = (9, 0)  # programmatic launches, 227 KiB of shared memory
_FP8_CAPABILITY = (8, 9)
_ROPE_HEAD_DIMS = (64, 128)
_ROPE_GROUP = 8  # heads of a KV head: the columns of one matrix instruction


def _refuses(site: CallSite[HeadFacts]) -> str | None:
    if site.facts.head_dim > MAX_HEAD_DIM:
        return f"head_dim {site.facts.head_dim} is above {MAX_HEAD_DIM}"
    if (
        site.facts.kv is not None
        and site.facts.kv.codes == "float8_e4m3fn"
        and torch.cuda.get_device_capability(site.device) < _FP8_CAPABILITY
    ):
        return "keys and values in FP8 (E4M3) need compute capability 8.9; --kv-cache-dtype int8 does not"
    return site.facts.ungrouped(64)


def rotary_writes(site: CallSite[HeadFacts], run: Any, sizes: Sizes) -> Calls:
    spec = sizes.spec

    def write(layers: int, tokens: int) -> object:
        q, k, v = heads(site, sizes, tokens)
        if spec.qk_norm:
            q, k = q.contiguous(), k.contiguous()
        angles = None if spec.rope is None else site.zeros(1, spec.rope.rotary_dim, dtype=torch.float32)
        quantized, row, kind = None, spec.head_dim, None
        if (kv := site.facts.kv) is not None:
            shared = None if kv.scales else site.zeros(spec.num_kv_heads, dtype=torch.float32)
            quantized, row, kind = Quantized(kv, shared, shared), kv.token_bytes(spec.head_dim), torch.uint8
        cache = site.zeros(1, 2 * layers, spec.num_kv_heads, sizes.block_size, row, dtype=kind)
        at = site.zeros(tokens, dtype=torch.int64)
        return run(q, k, v, at, angles, cache[:, 0], cache[:, 1], at, quantized)

    for _, layers in attention_groups(spec):
        for tokens in token_counts(site):
            yield f"{len(layers)} layers, {tokens} tokens", partial(write, len(layers), tokens)


def _attentions(site: CallSite[HeadFacts], run: Any, sizes: Sizes) -> Calls:
    spec = sizes.spec
    calls = run.rehearse(
        spec.num_heads, sizes.block_size, [layer.window for layer in spec.layers], spec.attention_soft_cap
    )
    yield from ((f"variant {index}", call) for index, call in enumerate(calls))


def _unserved_heads(facts: HeadFacts) -> str | None:
    """Why the kernel for single queries does not serve heads like these."""
    if facts.kv is not None:
        return f"keys and values are held as {facts.kv.name}"
    if facts.dtype is not torch.bfloat16:
        return f"element type {facts.dtype} is not bfloat16"
    if facts.head_dim not in _ROPE_HEAD_DIMS:
        return f"head_dim {facts.head_dim} is none of {', '.join(map(str, _ROPE_HEAD_DIMS))}"
    return facts.ungrouped(_ROPE_GROUP)


def why_not(facts: RopeFacts) -> str | None:
    """Why layers with these facts are not served; None: they are."""
    if facts.rotary_dim != facts.head_dim:
        return f"{facts.rotary_dim} of {facts.head_dim} elements of a head are turned, not all"
    if facts.normed:
        return "heads are normed between the product and the rotation"
    if facts.window is not None or facts.soft_cap is not None:
        return "there is a window or a cap on scores"
    return _unserved_heads(facts)


def create_singles(site: CallSite[HeadFacts]) -> Any | None:
    """Who attends to single queries beside prompts at a call site of ``paged_attention``, as cuda_rope.Singles; None:
    the others do."""
    if not site.cuda_decode or site.batch_invariant or site.unified_maximum or _unserved_heads(site.facts) is not None:
        return None
    if torch.cuda.get_device_capability(site.device) < _ROPE_CAPABILITY:
        return None
    return gpu.load("attention.cuda_rope:create_singles")(site)


def create_rope(site: CallSite[RopeFacts], *, cascade: bool) -> Any:
    """Whoever is declined loses nothing but speed: rotation and attention apart stand behind it."""
    if (reason := why_not(site.facts) or gpu.missing(site.device)) is not None:
        return Declined(reason)
    if site.unified_maximum:
        return Declined("it looks for the maximum of every row")
    if (capability := torch.cuda.get_device_capability(site.device)) < _ROPE_CAPABILITY:
        return Declined("compute capability {}.{} is below {}.{}".format(*capability, *_ROPE_CAPABILITY))
    return gpu.load("attention.cuda_rope:create")(site, cascade=cascade)


def _rehearse_rope(site: CallSite[RopeFacts], made: Any, sizes: Sizes) -> Calls:
    yield f"blocks of {sizes.block_size}", partial(made.rehearse, sizes.block_size)


def _rope(name: str, *techniques: str) -> Candidate[RopeFacts]:
    create = partial(create_rope, cascade=name == ROPE_CASCADE)
    return Candidate(
        name, create, gpu.DEVICES, (torch.bfloat16,), frozenset(techniques), batch_invariant=False, optional=True, failure=gpu.failure,
        rehearse=_rehearse_rope,
    )  # fmt: skip


ROTARY_WRITE = (
    native(create_rotary_write),
    gpu.triton("attention.triton_rotary:rotary_write", rotary_writes, chained=MOST_ROWS),
)
PAGED_ATTENTION = (
    native(create_paged_attention),
    gpu.triton(
        "attention.paged:create_cascade_attention", _attentions, _refuses, name=CASCADE, dtypes=(torch.bfloat16, torch.float16),
        techniques=frozenset({"cascade_attention"}), batch_invariant=False, optional=True,
    ),
    gpu.triton("attention.paged:create_paged_attention", _attentions, _refuses),
)  # fmt: skip
WHOLE_ATTENTION = (
    Candidate("sdpa", create_sequence_attention, batch_invariant=False),
    Candidate("varlen", create_packed_attention, gpu.DEVICES, (torch.bfloat16, torch.float16), batch_invariant=False),
    Candidate("sdpa_sequences", create_sequence_attention, gpu.DEVICES, batch_invariant=False),
)  # fmt: skip
ROPE_ATTENTION = (_rope(ROPE_CASCADE, "fused_rope_attention", "cascade_attention"), _rope(ROPE, "fused_rope_attention"))
