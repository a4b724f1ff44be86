# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Attention to all keys from attention to disjoint sets of them, read once.

What lives here: the kernel. What may not: who attends to what (layers/basic.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.build.launch import launchable

_ELEMENTS = 2048  # of each part that a program reads at once


@launchable(do_not_specialize=["rows"])
def _merge_kernel(
    parts_ptr, sums_ptr, more_ptr, more_sums_ptr, out_ptr, rows,
    PARTS: tl.constexpr, ALL: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    element, there = tl.arange(0, BLOCK_D), row < rows
    inside = there[:, None] & (element < DIM)[None, :]
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    for part in tl.static_range(ALL):
        sums = (sums_ptr + part * rows) if part < PARTS else (more_sums_ptr + (part - PARTS) * rows)
        peak = tl.maximum(peak, tl.load(sums + row, mask=there, other=float("-inf")))
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total, mass = tl.zeros((BLOCK_R, BLOCK_D), tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    for part in tl.static_range(ALL):
        sums = (sums_ptr + part * rows) if part < PARTS else (more_sums_ptr + (part - PARTS) * rows)
        weight = tl.exp(tl.load(sums + row, mask=there, other=float("-inf")) - peak)
        at = (row + part * rows) if part < PARTS else (row + (part - PARTS) * rows)
        ptr = parts_ptr if part < PARTS else more_ptr
        found = tl.load(ptr + at[:, None] * DIM + element[None, :], mask=inside, other=0.0)
        total += found.to(tl.float32) * weight[:, None]
        mass += weight
    total /= tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(out_ptr + row[:, None] * DIM + element[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def merge_parts(*pieces: tuple[Tensor, Tensor]) -> Tensor:
    """As the twin. One piece, or two: (parts [n, T, H, D], log-sum-exp [n, T, H], float32), dense."""
    (parts, sums), (more, more_sums) = pieces[0], pieces[-1]
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    dim, rows = parts.shape[-1], sums[0].numel()
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, _ELEMENTS // block_d)
    assert len(pieces) <= 2 and all(each.is_contiguous() for piece in pieces for each in piece)
    if rows:
        _merge_kernel[(triton.cdiv(rows, block_r),)](
            parts, sums, more, more_sums, out, rows,
            PARTS=len(parts), ALL=sum(len(each) for each, _ in pieces), DIM=dim, BLOCK_D=block_d, BLOCK_R=block_r, num_warps=4,
        )  # fmt: skip
    return out
