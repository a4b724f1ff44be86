"""The C kernels for attention, rotary embedding and the cache write (attention.c, elementwise.c) as torch functions.

What lives here: pointers, strides, and which call sites are accepted. What may not: compiling (build/), mathematics.
"""

from __future__ import annotations

from ctypes import c_int
from struct import Struct
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of
from headrace.kernels.candidate import CallSite, Declined, HeadFacts
from headrace.kernels.inputs import AttentionInputs, Quantized

MAX_HEAD_DIM, MAX_GROUP = 512, 64  # attention.c: MAX_DIM, MAX_ROWS
# The argument structs of the C file, field for field: i int, q int64, P pointer, f float.
_ROTARY = Struct("@2i8q3P6q5P6q2P")
_ATTENTION = Struct("@2i6q2P2q2P6q3P4q4P2f")
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
    if site.facts.head_dim > MAX_HEAD_DIM:
        return Declined(f"head_dim {site.facts.head_dim} is above {MAX_HEAD_DIM}")
    if (reason := site.facts.ungrouped(MAX_GROUP)) is not None:
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
            ),
            torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for the partial sums of attention over {inputs.max_context_len} tokens")
        return out

    return paged_attention
