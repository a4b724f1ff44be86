# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Products of 8-bit inputs and 8-bit weights (W8A8), FP8 or int8, and what stands around them in a layer, each in one
launch.

What lives here: the kernel. What may not: rounding inputs (norm/triton_rounded.py), the callables of layers
(eight_bits.py).

    y = act(x Wᵀ + b) ⊙ (x Vᵀ + c) + residual, as triton_ends.py has it, of x = codes · scale of a row, W = codes ·
    scale of an output; or both of
    blocks of 128 (DeepSeek-V3, 2024), whose sums are scaled one by one
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import launchable
from headrace.kernels.linear.triton_ends import GATED, Ends, _early, _finish, _summed


@triton.jit
def _codes_of(ptr, row, there, k, ins, FP8: tl.constexpr):
    """[rows, depth]"""
    at = ptr + row.to(tl.int64)[:, None] * ins + k[None, :]
    found = tl.load(at, mask=there[:, None] & (k < ins)[None, :], other=0)
    return found.to(tl.float8e4nv, bitcast=True) if FP8 else found.to(tl.int8, bitcast=True)


@triton.jit
def _tile(
    x_ptr, scale_ptr, weight_ptr, by_ptr, row, tokens, column, limit, begin, end, ins, FP8: tl.constexpr, BLOCKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M], float32. ``by_ptr``: scales of outputs, or (of FP8) of blocks of 128 outputs, for each 128
    inputs."""
    step, inside, there = tl.arange(0, BLOCK_K), column < limit, row < tokens
    SUM: tl.constexpr = tl.float32 if FP8 else tl.int32
    total = tl.zeros((BLOCK_N, BLOCK_M), SUM)
    groups = tl.cdiv(ins, 128)
    for turn in range(begin, end):  # so that the compiler sees where k is aligned
        k = turn * BLOCK_K
        x = _codes_of(x_ptr, row, there, k + step, ins, FP8)
        weight = _codes_of(weight_ptr, column, inside, k + step, ins, FP8)
        if BLOCKED:
            by = tl.load(by_ptr + column // 128 * groups + k // 128, mask=inside, other=0.0)
            own = tl.load(scale_ptr + row * groups + k // 128, mask=there, other=0.0)
            total += tl.dot(weight, tl.trans(x)) * by[:, None] * own[None, :]
        else:
            total = tl.dot(weight, tl.trans(x), total, out_dtype=SUM)
    wide = total.to(tl.float32)
    if not BLOCKED:
        by = tl.load(by_ptr + column, mask=inside, other=0.0)
        wide *= by[:, None] * tl.load(scale_ptr + row, mask=there, other=0.0)[None, :]
    return wide


@launchable(do_not_specialize=("tokens", "share"))
def _eight_kernel(
    x_ptr, scale_ptr, weight_ptr, by_ptr, part_ptr, ticket_ptr, bias_ptr, residual_ptr, next_ptr, y_ptr, scaled_ptr, sums_ptr,
    tokens, outs, ins, share,
    FP8: tl.constexpr, BLOCKED: tl.constexpr, AROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WAYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``WAYS`` programs a tile, each with ``share`` steps of K. ``outs``: of y; with a gate the weight has twice as
    many."""
    tile, part, band = tl.program_id(0) // WAYS, tl.program_id(0) % WAYS, tl.program_id(1)
    column, row = tile * BLOCK_N + tl.arange(0, BLOCK_N), band * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = part * share
    end = tl.minimum(begin + share, tl.cdiv(ins, BLOCK_K))
    if PDL:
        gdc_wait()
    total = _tile(
        x_ptr, scale_ptr, weight_ptr, by_ptr, row, tokens, column, outs, begin, end, ins, FP8, BLOCKED, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    second = total
    if AROUND[GATED]:
        # scales of blocks: both halves are whole blocks of 128
        second = _tile(
            x_ptr, scale_ptr, weight_ptr, by_ptr, row, tokens, tl.where(column < outs, outs + column, 2 * outs), 2 * outs, begin, end, ins,
            FP8, BLOCKED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    complete, total = _summed(
        total, part_ptr, ticket_ptr, band * (tl.num_programs(0) // WAYS) + tile, part, BLOCK_N, BLOCK_M, WAYS
    )
    if complete:
        squares = _early(y_ptr, 0, tokens, row, AROUND)  # none: a norm is done with where inputs are rounded
        ends = Ends(y_ptr, bias_ptr, residual_ptr, next_ptr, y_ptr, scaled_ptr, sums_ptr)
        _finish(total, second, squares, tile, column, row, ends, 0, tokens, outs, ins, 0.0, AROUND)
