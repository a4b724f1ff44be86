# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Keys and values in 8 and 4 bits (kv_codes.py) for the Triton kernels: a tile of codes with its scales, a head's
codes.

What lives here: both directions, to the bit as the twin has them. What may not: attention, rotary embedding.

Every code is a number of the type the model computes in, so tiles are multiplied as they are; a key's scale multiplies
its score, a value's the weight it gets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.kv_codes import KINDS
from headrace.kernels.inputs import Quantized

PLAIN, INT8, E4M3, E5M2, UINT4 = (tl.constexpr(kind) for kind in range(5))  # as KINDS has them
_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: added and taken away, it rounds to nearest even


def kind_of(quantized: Quantized | None) -> int:
    return 0 if quantized is None else KINDS[quantized.format.codes]


def scales_of(k_cache: Tensor, v_cache: Tensor, quantized: Quantized | None) -> tuple[Tensor, Tensor]:
    """Those that all tokens of a KV head share; any tensors where there are none."""
    k, v = (None, None) if quantized is None else (quantized.k_scales, quantized.v_scales)
    return k_cache if k is None else k, v_cache if v is None else v


class Held(NamedTuple):
    """Keys or values: the cache's, or as ``of_head`` has them."""

    ptr: Any
    rows: Any  # a descriptor, where the copy engine brings tiles
    scales: Any  # of codes: what all tokens of a head share
    table: Any
    block: Any  # strides
    head: Any
    row: Any


class Form(NamedTuple):
    """What a variant of a kernel is made for. BLOCK_N: keys of a tile."""

    KV: Any
    BLOCK_SIZE: Any
    DIM: Any
    BLOCK_D: Any
    BLOCK_N: Any
    WINDOW: Any
    SOFT_CAP: Any


@triton.jit
def of_head(held, table, kv_head):
    """Those of one KV head of the sequence whose ``table`` lies so far behind the first."""
    head = kv_head.to(tl.int64) * held.head
    return Held(held.ptr, held.rows, held.scales + kv_head, held.table + table, held.block, head, held.row)


@triton.jit
def load_codes(held, tile, key, there, context, like, FORM: tl.constexpr):
    """Keys (or values) ``key`` of one head that are ``there``: codes [BLOCK_N, BLOCK_D] of the type of ``like``, their
    scales and what code 0 means [BLOCK_N], float32. Zeros in place of others."""
    KV: tl.constexpr = FORM.KV
    DIM: tl.constexpr = FORM.DIM
    BLOCK_SIZE: tl.constexpr = FORM.BLOCK_SIZE
    LINE: tl.constexpr = DIM // 2 if KV == UINT4 else DIM
    if BLOCK_SIZE % FORM.BLOCK_N == 0:  # one block, wherever the tile lies
        first = tile * FORM.BLOCK_N
        block = tl.load(held.table + first // BLOCK_SIZE, mask=first < context, other=0).to(tl.int64)
        place = first % BLOCK_SIZE + tl.arange(0, FORM.BLOCK_N)
        part = held.ptr + block * held.block + held.head
    else:
        blocks = tl.load(held.table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        place = key % BLOCK_SIZE
        part = held.ptr + blocks * held.block + held.head
    lines = part + place * LINE
    if KV == UINT4:
        half = tl.arange(0, FORM.BLOCK_D // 2)
        raw = tl.load(lines[:, None] + half[None, :], mask=there[:, None] & (half < LINE)[None, :], other=0)
        codes = tl.interleave(raw & 15, raw >> 4).to(like.dtype)
    else:
        element = tl.arange(0, FORM.BLOCK_D)
        raw = tl.load(lines[:, None] + element[None, :], mask=there[:, None] & (element < DIM)[None, :], other=0)
        if KV == INT8:
            codes = raw.to(tl.int8, bitcast=True).to(like.dtype)
        elif KV == E4M3:
            codes = raw.to(tl.float8e4nv, bitcast=True).to(like.dtype)
        else:
            codes = raw.to(tl.float8e5, bitcast=True).to(like.dtype)
    OWN: tl.constexpr = 4 if KV == UINT4 else (2 if KV == INT8 else 0)  # bytes of a token's scales
    if OWN > 0:
        scales = (part + BLOCK_SIZE * LINE + place * OWN).to(tl.pointer_type(tl.bfloat16))
        scale = tl.load(scales, mask=there, other=0.0).to(tl.float32)
        low = scale
        if KV == UINT4:
            low = tl.load(scales + 1, mask=there, other=0.0).to(tl.float32)
    else:
        scale = tl.where(there, tl.load(held.scales), 0.0)
        low = scale
    return codes, scale, low


@triton.jit
def scaled_scores(score, q, scale, low, KV: tl.constexpr):
    """Products [M, N] of queries ``q`` [M, D] with codes of keys, as those with the keys."""
    score = score * scale[None, :]
    if KV == UINT4:
        score += low[None, :] * tl.sum(q.to(tl.float32), 1)[:, None]
    return score


@triton.jit
def add_values(total, weight, held, FORM: tl.constexpr):
    """``total`` [M, D] + values ``held`` [N, D], codes where they are, each by its ``weight`` [M, N]."""
    v, scale, low = held
    if FORM.KV == PLAIN:
        return tl.dot(weight.to(v.dtype), v, total, input_precision="ieee")
    if v.dtype == tl.float16:  # which may not hold the product of a weight and a scale
        values, weights = (v.to(tl.float32) * scale[:, None]).to(tl.float16), weight
    else:
        values, weights = v, weight * scale[None, :]
    total = tl.dot(weights.to(v.dtype), values, total, input_precision="ieee")
    if FORM.KV == UINT4:
        total += tl.sum(weight * low[None, :], 1)[:, None]
    return total


@triton.jit
def _float8(x, KV: tl.constexpr):
    """Codes of ``x``, to nearest even; what is too large saturates. In whole numbers, so that all devices agree."""
    SHIFT: tl.constexpr = 20 if KV == E4M3 else 21
    MOST: tl.constexpr = 448.0 if KV == E4M3 else 57344.0
    LEAST: tl.constexpr = 0.015625 if KV == E4M3 else 0.00006103515625
    UNITS: tl.constexpr = 512.0 if KV == E4M3 else 65536.0
    BIAS: tl.constexpr = 120 * 8 if KV == E4M3 else 112 * 4
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    nan = size > 0x7F800000
    wide = tl.minimum(tl.where(nan, 0, size).to(tl.float32, bitcast=True), MOST)
    whole = wide.to(tl.int32, bitcast=True)
    normal = ((whole + ((1 << (SHIFT - 1)) - 1) + ((whole >> SHIFT) & 1)) >> SHIFT) - BIAS
    small = ((wide * UNITS + _ROUND) - _ROUND).to(tl.int32)
    code = ((bits >> 24) & 0x80) | tl.where(wide < LEAST, small, normal)
    return tl.where(nan, 0x7F, code).to(tl.uint8)


@triton.jit
def store_codes(
    x,
    part,
    place,
    shared_ptr,
    head,
    there,
    KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Heads ``x`` [H, BLOCK], float32, whose parts of the block begin at ``part`` [H], as token ``place`` of the
    block."""
    LINE: tl.constexpr = DIM // 2 if KV == UINT4 else DIM
    element = tl.arange(0, BLOCK)
    real = (element < DIM)[None, :]
    line = part + place * LINE
    OWN: tl.constexpr = 4 if KV == UINT4 else (2 if KV == INT8 else 0)  # bytes of a token's scales
    scales = (part + BLOCK_SIZE * LINE + place * OWN).to(tl.pointer_type(tl.bfloat16))
    if OWN == 0:
        shared = tl.load(shared_ptr + head, mask=there, other=1.0)
        codes = _float8(tl.div_rn(x, tl.broadcast_to(shared[:, None], x.shape)), KV)
        tl.store(line[:, None] + element[None, :], codes, mask=there[:, None] & real)
    else:
        size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(tl.where(real, size, 0), 1)
        odd = largest >= 0x7F800000
        x = tl.where(odd[:, None], 0.0, x)
        if KV == INT8:
            low = tl.zeros_like(largest).to(tl.float32)
            span = tl.where(odd, 0, largest).to(tl.float32, bitcast=True)
        else:
            low = tl.min(tl.where(real, x, float("inf")), 1).to(tl.bfloat16).to(tl.float32)
            span = tl.maximum(tl.max(tl.where(real, x, float("-inf")), 1) - low, 0.0)
        LEVELS: tl.constexpr = 127.0 if KV == INT8 else 15.0
        narrow = tl.div_rn(span, tl.full(span.shape, LEVELS, tl.float32)).to(tl.bfloat16)
        scale = tl.broadcast_to(narrow.to(tl.float32)[:, None], x.shape)
        codes = tl.where(scale > 0, tl.div_rn(x - low[:, None], tl.where(scale > 0, scale, 1.0)), 0.0)
        codes = tl.minimum(tl.maximum((codes + _ROUND) - _ROUND, -127.0 if KV == INT8 else 0.0), LEVELS).to(tl.int32)
        marked = tl.where(odd, 0x7FC0, narrow.to(tl.int16, bitcast=True).to(tl.int32)).to(tl.int16)
        tl.store(scales, marked.to(tl.bfloat16, bitcast=True), mask=there)
        if KV == UINT4:
            tl.store(scales + 1, low.to(tl.bfloat16), mask=there)
            even, uneven = tl.split(tl.reshape(codes, (x.shape[0], BLOCK // 2, 2)))
            half = tl.arange(0, BLOCK // 2)
            tl.store(
                line[:, None] + half[None, :],
                (even | (uneven << 4)).to(tl.uint8),
                mask=there[:, None] & (half < LINE)[None, :],
            )
        else:
            tl.store(
                line[:, None] + element[None, :],
                codes.to(tl.int8).to(tl.uint8, bitcast=True),
                mask=there[:, None] & real,
            )
