"""The candidates for attention, rotary embedding and the cache write, best first.

What lives here: the ordered lists, what declines a call site before anything is compiled, small calls that build what a
model will launch; calls of the library's own attention, and the C kernels (attention.c) as torch functions. What may
not: Triton, CUDA, compiling (build/), mathematics.
"""

from __future__ import annotations

from ctypes import c_int
from functools import partial
from itertools import pairwise
from struct import Struct
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.build import gpu
from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of, native
from headrace.kernels.build.warm_ups import TOKENS, heads, token_counts
from headrace.kernels.candidate import Calls, CallSite, Candidate, Declined, HeadFacts, RopeFacts, Sizes
from headrace.kernels.inputs import AttentionInputs, Quantized
from headrace.kernels.linear.epilogue import MOST_ROWS
from headrace.spec import attention_groups

_MOST_HEAD_DIM = 256  # FlashAttention 2


def create_sequence_attention(site: CallSite[HeadFacts]) -> Any:
    """A call for each sequence, on a CPU: of runs of equal lengths, one for all."""
    return sequence_attention


def sequence_attention(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, scale: float) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin, end, length in _runs(inputs.query_start.tolist()):
        # [sequences, H, length, D]
        heads = [each[begin:end].unflatten(0, (-1, length)).transpose(1, 2) for each in (q, k, v)]
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], scale=scale)
        out[begin:end] = found.transpose(1, 2).flatten(0, 1)
    return out


def _runs(starts: list[int]) -> list[tuple[int, int, int]]:
    """(begin, end, length of each) of neighbours that are equally long; empty ones are left out."""
    runs: list[tuple[int, int, int]] = []
    for begin, end in pairwise(starts):
        if runs and runs[-1][2] == end - begin:
            runs[-1] = runs[-1][0], end, end - begin
        elif end > begin:
            runs.append((begin, end, end - begin))
    return runs


def create_packed_attention(site: CallSite[HeadFacts]) -> Any:
    """One call for all sequences: FlashAttention over packed tokens (Dao 2023), in torch since 2.10."""
    if site.facts.head_dim > _MOST_HEAD_DIM or site.facts.head_dim % 8:
        return Declined(f"head_dim {site.facts.head_dim} is no multiple of 8 up to {_MOST_HEAD_DIM}")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return Declined(f"torch {torch.__version__} has no varlen_attn")

    def packed_attention(q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, scale: float) -> Tensor:
        starts, longest = inputs.query_start, inputs.max_query_len
        found = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale)
        assert isinstance(found, Tensor), "nothing beside it was asked for"
        return found

    return packed_attention


_NATIVE_HEAD_DIM, _NATIVE_GROUP = 512, 64  # attention.c: MAX_DIM, MAX_ROWS
# The argument structs of the C file, field for field: i int, q int64, P pointer, f float.
_ROTARY = Struct("@2i8q3P6q5P6q2P")
_ATTENTION = Struct("@2i6q2P2q2P6q3P4q4P2fP")
_CODES = MappingProxyType({"int8": 3, "float8_e4m3fn": 4, "float8_e5m2": 5, "uint4": 6})  # kv_codes.h


def _held(cache: Tensor, quantized: Quantized | None) -> tuple[int, int, int]:
    """The element type of a cache as C numbers it, and where the scales of its keys and its values are, 0 for none."""
    if quantized is None:
        return TYPES[cache.dtype], 0, 0
    k, v = (0 if each is None else each.data_ptr() for each in (quantized.k_scales, quantized.v_scales))
    return _CODES[quantized.format.codes], k, v


def create_rotary_write(native: Native, site: CallSite[HeadFacts]) -> Any:
    function = function_of(native, "headrace_rotary_write", "si", c_int)

    def rotary_write(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        quantized: Quantized | None = None,
    ) -> Tensor:
        """In place on q and k, where their last dimension is contiguous."""
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        rotary_dim, max_positions, angles = (
            (0, 0, None) if cos_sin is None else (cos_sin.shape[1], cos_sin.shape[0], cos_sin.data_ptr())
        )
        held, *scales = _held(k_cache, quantized)
        failed = function(
            _ROTARY.pack(
                TYPES[q.dtype], held,
                q.shape[0], q.shape[1], k.shape[1], q.shape[2], rotary_dim, max_positions, k_cache.shape[2], k_cache.shape[0],
                q.data_ptr(), k.data_ptr(), v.data_ptr(), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
                positions.data_ptr(), slots.data_ptr(), angles or 0, k_cache.data_ptr(), v_cache.data_ptr(),
                *k_cache.stride()[:3], *v_cache.stride()[:3], *scales,
            ),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise IndexError(
                f"a position is not in 0 … {max_positions - 1} or a slot is beyond {k_cache.shape[0] * k_cache.shape[2]}"
            )
        return q

    return rotary_write


def create_paged_attention(native: Native, site: CallSite[HeadFacts]) -> Any:
    if site.facts.head_dim > _NATIVE_HEAD_DIM:
        return Declined(f"head_dim {site.facts.head_dim} is above {_NATIVE_HEAD_DIM}")
    if (reason := site.facts.ungrouped(_NATIVE_GROUP)) is not None:
        return Declined(reason)
    function, empty = function_of(native, "headrace_attention", "si", c_int), site.empty

    def paged_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        quantized: Quantized | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        q = q if q.stride(2) == 1 else q.contiguous()
        out = empty(q.shape, q.dtype, q.device)
        table = inputs.block_table
        held, *scales = _held(k_cache, quantized)
        tree = (0, 0) if (of := inputs.tree) is None else (of.first.data_ptr(), of.ancestors.data_ptr())
        failed = function(
            _ATTENTION.pack(
                TYPES[q.dtype], held,
                table.shape[0], q.shape[1], k_cache.shape[1], q.shape[2], inputs.block_size, q.shape[0],
                q.data_ptr(), out.data_ptr(), *q.stride()[:2], k_cache.data_ptr(), v_cache.data_ptr(),
                *k_cache.stride()[:3], *v_cache.stride()[:3],
                table.data_ptr(), inputs.query_start.data_ptr(), inputs.context_len.data_ptr(),
                table.stride(0), inputs.max_query_len, inputs.max_context_len, window or 0, *scales, *tree, scale, soft_cap or 0.0,
                0 if lse is None else lse.data_ptr(),
            ),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the partial sums of attention over {inputs.max_context_len} tokens")
        return out

    return paged_attention


CASCADE = "cascade"  # reads shared prefixes once
ROPE = "rope"
ROPE_CASCADE = "rope_cascade"  # which leaves steps in which sequences may share keys to cascade attention
MAX_HEAD_DIM = 256
_ROPE_CAPABILITY = (9, 0)  # PDL, 227 KiB of shared memory
_FP8_CAPABILITY = (8, 9)
_ROPE_HEAD_DIMS = (64, 128)
_ROPE_GROUP = 8  # heads of a KV head: the columns of one matrix instruction


def _refuses(site: CallSite[HeadFacts]) -> str | None:
    if site.facts.head_dim > MAX_HEAD_DIM:
        return f"head_dim {site.facts.head_dim} is above {MAX_HEAD_DIM}"
    if site.facts.kv is not None and site.facts.kv.codes == "float8_e4m3fn" and site.card.capability < _FP8_CAPABILITY:
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
    calls = run.warm_up(
        spec.num_heads, sizes.block_size, [layer.window for layer in spec.layers], spec.attention_soft_cap
    )
    yield from ((f"variant {index}", call) for index, call in enumerate(calls))


def _merges(site: CallSite[HeadFacts], run: Any, sizes: Sizes) -> Calls:
    facts = site.facts

    def merge(*counts: int) -> object:
        parts = site.zeros(facts.ranks, TOKENS, facts.num_heads, facts.head_dim)
        sums = site.zeros(*parts.shape[:3], dtype=torch.float32)
        return run(*zip(parts.split(counts), sums.split(counts), strict=True))

    yield "all", partial(merge, facts.ranks)
    yield "a rank's own, and the others'", partial(merge, 1, facts.ranks - 1)


def _unserved_heads(facts: HeadFacts) -> str | None:
    """Why the kernel for single queries does not serve heads like these."""
    if facts.dtype is not torch.bfloat16:
        return f"element type {facts.dtype} is not bfloat16"
    if facts.head_dim not in _ROPE_HEAD_DIMS:
        return f"head_dim {facts.head_dim} is none of {', '.join(map(str, _ROPE_HEAD_DIMS))}"
    return facts.ungrouped(_ROPE_GROUP)


def why_not(facts: RopeFacts) -> str | None:
    """Why layers with these facts are not served; None: they are."""
    if facts.rotary_dim != facts.head_dim:
        return f"{facts.rotary_dim} of {facts.head_dim} elements of a head are turned, not all"
    if facts.normed not in (None, facts.dtype):
        return f"norms of heads have weights of element type {facts.normed}"
    if facts.window is not None or facts.soft_cap is not None:
        return "there is a window or a cap on scores"
    return _unserved_heads(facts)


def create_singles(site: CallSite[HeadFacts]) -> Any | None:
    """Who attends to single queries beside prompts at a call site of ``paged_attention``, as cuda_rope.Singles; None:
    the others do."""
    rope = ROPE_ATTENTION[-1]
    if (
        rope.is_off(site.context)
        or site.invariant
        or site.uses("unified_maximum")
        or _unserved_heads(site.facts) is not None
    ):
        return None
    if site.card.capability < rope.least:
        return None
    return gpu.load("attention.cuda_rope:create_singles")(site)


def _no_rope(site: CallSite[RopeFacts]) -> str | None:
    """Whoever is declined loses nothing but speed: rotation and attention apart stand behind it."""
    return why_not(site.facts) or ("it looks for the maximum of every row" if site.uses("unified_maximum") else None)


def _warm_up_rope(site: CallSite[RopeFacts], made: Any, sizes: Sizes) -> Calls:
    yield f"blocks of {sizes.block_size}", partial(made.warm_up, sizes.block_size)


def _rope(name: str, *techniques: str) -> Candidate[RopeFacts]:
    path = "attention.cuda_rope:create_cascade" if name == ROPE_CASCADE else "attention.cuda_rope:create_plain"
    return gpu.triton(
        path, _warm_up_rope, _no_rope, name=name, dtypes=(torch.bfloat16,), techniques=frozenset(techniques), least=_ROPE_CAPABILITY,
        varies=True, optional=True,
    )  # fmt: skip


ROTARY_WRITE = (
    native(create_rotary_write),
    gpu.triton("attention.triton_rotary:rotary_write", rotary_writes, chained=MOST_ROWS),
)
PAGED_ATTENTION = (
    native(create_paged_attention),
    gpu.triton(
        "attention.paged:create_cascade_attention", _attentions, _refuses, name=CASCADE, dtypes=(torch.bfloat16, torch.float16),
        techniques=frozenset({"cascade_attention"}), varies=True, optional=True,
    ),
    gpu.triton("attention.paged:create_paged_attention", _attentions, _refuses),
)  # fmt: skip
MERGE_PARTS = (gpu.triton("attention.triton_merge:merge_parts", _merges),)
WHOLE_ATTENTION = (
    Candidate("sdpa", create_sequence_attention, varies=True),
    Candidate("varlen", create_packed_attention, gpu.DEVICES, (torch.bfloat16, torch.float16), varies=True),
    Candidate("sdpa_sequences", create_sequence_attention, gpu.DEVICES, varies=True, reads=True),
)  # fmt: skip
ROPE_ATTENTION = (_rope(ROPE_CASCADE, "fused_rope_attention", "cascade_attention"), _rope(ROPE, "fused_rope_attention"))
