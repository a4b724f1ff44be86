# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Rotary embedding of q and k, and the write of k and v into the paged cache, in one launch.

What lives here: that kernel. What may not: rotary tables (layers/rotary.py), attention.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.attention.triton_codes import kind_of, scales_of, store_codes
from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.inputs import Quantized

_ELEMENTS = 1024  # of q or k that a program turns


@triton.jit
def _turn(
    source_ptr, target_ptr, source_heads, target_heads, there, cos, sin, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """Rotates [heads, 2 · HALF] from source to target. Heads' offsets are [BLOCK_H], ``there`` their mask."""
    pair = tl.arange(0, BLOCK_HALF)
    mask = there[:, None] & (pair < HALF)[None, :]
    first = tl.load(source_ptr + source_heads[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + source_heads[:, None] + pair[None, :] + HALF, mask=mask, other=0.0).to(tl.float32)
    left, right = first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]
    tl.store(target_ptr + target_heads[:, None] + pair[None, :], left.to(target_ptr.dtype.element_ty), mask=mask)
    tl.store(
        target_ptr + target_heads[:, None] + pair[None, :] + HALF, right.to(target_ptr.dtype.element_ty), mask=mask
    )


@triton.jit
def _copy(
    source_ptr,
    target_ptr,
    source_heads,
    target_heads,
    there,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies elements FIRST … DIM - 1 of each head."""
    element = tl.arange(0, BLOCK)
    mask = there[:, None] & ((element >= FIRST) & (element < DIM))[None, :]
    x = tl.load(source_ptr + source_heads[:, None] + element[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target_ptr + target_heads[:, None] + element[None, :], x.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _turned(source_ptr, heads, there, angles_ptr, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Whole heads [BLOCK_H, BLOCK], rotated and rounded to the type they are in, as float32; beyond DIM zeros."""
    element = tl.arange(0, BLOCK)
    mask = there[:, None] & (element < DIM)[None, :]
    x = tl.load(source_ptr + heads[:, None] + element[None, :], mask=mask, other=0.0).to(tl.float32)
    if HALF > 0:
        turns, first = element < 2 * HALF, element < HALF
        pair = tl.where(first, element, element - HALF)
        cos = tl.load(angles_ptr + pair, mask=turns, other=1.0)
        sin = tl.load(angles_ptr + HALF + pair, mask=turns, other=0.0)
        sin = tl.where(first, -sin, sin)
        other = source_ptr + heads[:, None] + tl.where(first, element + HALF, element - HALF)[None, :]
        partner = tl.load(other, mask=mask & turns[None, :], other=0.0).to(tl.float32)
        x = tl.where(turns[None, :], x * cos[None, :] + partner * sin[None, :], x)
    return x.to(source_ptr.dtype.element_ty).to(tl.float32)


@launchable()
def _rotary_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, cos_sin_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scales_ptr, v_scales_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head,
    k_cache_block, k_cache_head, k_cache_row, v_cache_block, v_cache_head, v_cache_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KV: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    cos = tl.full((BLOCK_HALF,), 1.0, tl.float32)
    sin = tl.full((BLOCK_HALF,), 0.0, tl.float32)
    if HALF > 0:
        angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
        cos = tl.load(angles_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)
        sin = tl.load(angles_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    q_parts: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H if HALF > 0 else 0
    if part < q_parts:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        at = token * q_token + head.to(tl.int64) * q_head
        _turn(q_ptr, q_ptr, at, at, head < HEADS, cos, sin, HALF, BLOCK_HALF)
    else:
        slot = tl.load(slots_ptr + token)
        head = (part - q_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        there = (head < KV_HEADS) & (slot >= 0)
        block, row = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_at = token * k_token + head.to(tl.int64) * k_head
        v_at = token * v_token + head.to(tl.int64) * v_head
        if KV:
            k_part = block * k_cache_block + head.to(tl.int64) * k_cache_head
            v_part = block * v_cache_block + head.to(tl.int64) * v_cache_head
            x = _turned(
                k_ptr, k_at, there, cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF), HALF, DIM, BLOCK_DIM
            )
            store_codes(x, k_cache_ptr + k_part, row, k_scales_ptr, head, there, KV, BLOCK_SIZE, DIM, BLOCK_DIM)
            x = _turned(v_ptr, v_at, there, cos_sin_ptr, 0, DIM, BLOCK_DIM)
            store_codes(x, v_cache_ptr + v_part, row, v_scales_ptr, head, there, KV, BLOCK_SIZE, DIM, BLOCK_DIM)
        else:
            k_to = block * k_cache_block + head.to(tl.int64) * k_cache_head + row * k_cache_row
            v_to = block * v_cache_block + head.to(tl.int64) * v_cache_head + row * v_cache_row
            if HALF > 0:
                _turn(k_ptr, k_cache_ptr, k_at, k_to, there, cos, sin, HALF, BLOCK_HALF)
            if 2 * HALF < DIM:
                _copy(k_ptr, k_cache_ptr, k_at, k_to, there, 2 * HALF, DIM, BLOCK_DIM)
            _copy(v_ptr, v_cache_ptr, v_at, v_to, there, 0, DIM, BLOCK_DIM)


def rotary_write(
    q: Tensor,  # [T, Hq, D], strided
    k: Tensor,  # [T, Hk, D], strided
    v: Tensor,  # [T, Hk, D], strided
    positions: Tensor,  # [T], int64
    cos_sin: Tensor | None,  # [max_positions, rotary_dim], float32
    k_cache: Tensor,  # [blocks, Hk, block_size, D], strided
    v_cache: Tensor,  # [blocks, Hk, block_size, D], strided
    slots: Tensor,  # [T], int64
    quantized: Quantized | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """(a, b) → (a cos − b sin, b cos + a sin) over the halves of the first rotary_dim elements of q and k (RoFormer, Su
    et al. 2021).

    q is turned in place and returned; k' and v go to the cache at ``slots`` (block · block_size + offset; −1: nowhere),
    k itself stays. float32, bfloat16 or float16, float32 inside; the cache may have another type, or ``quantized`` be
    uint8 (kv_codes.py). Positions are not checked on the device.
    """
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    tokens, heads, dim = q.shape
    kv_heads, half = k.shape[1], 0 if cos_sin is None else cos_sin.shape[1] // 2
    if tokens == 0:
        return q
    block_h = min(triton.next_power_of_2(max(heads, kv_heads)), max(1, _ELEMENTS // triton.next_power_of_2(dim)))
    kind, scales = kind_of(quantized), scales_of(k_cache, v_cache, quantized)
    parts = (triton.cdiv(heads, block_h) if half else 0) + triton.cdiv(kv_heads, block_h)
    _rotary_kernel[(tokens, parts)](
        q, k, v, positions, positions if cos_sin is None else cos_sin, k_cache, v_cache, slots, *scales,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, BLOCK_SIZE=k_cache.shape[2], KV=kind, BLOCK_H=block_h,
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)), BLOCK_DIM=triton.next_power_of_2(dim),
        PDL=pdl, num_warps=4, **dependent(pdl),
    )  # fmt: skip
    return q
