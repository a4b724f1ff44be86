# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""A few weights that lie apart, beside a product over the others (SpQR, Dettmers et al. 2023), on a GPU.

What lives here: the kernel and its launch. What may not: the product beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.build.launch import launchable

_ENTRIES = 16  # of a row, at once


@launchable(do_not_specialize=("tokens", "outs"))
def _sparse_kernel(
    y_ptr, x_ptr, ends_ptr, columns_ptr, values_ptr, tokens, outs, ins,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """A program some rows of S, and of x and y, which it adds to."""
    row, token = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < outs
    first = tl.load(ends_ptr + row, mask=inside, other=0)
    last = tl.load(ends_ptr + row + 1, mask=inside, other=0)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for begin in range(0, tl.max(last - first, 0), ENTRIES):
        at = first[:, None] + begin + tl.arange(0, ENTRIES)[None, :]
        there = at < last[:, None]
        column = tl.load(columns_ptr + at, mask=there, other=0)
        value = tl.load(values_ptr + at, mask=there, other=0.0)
        x = tl.load(
            x_ptr + token.to(tl.int64)[:, None, None] * ins + column[None, :, :],
            mask=(token < tokens)[:, None, None] & there[None, :, :],
            other=0.0,
        )
        total += tl.sum(x.to(tl.float32) * value[None, :, :], 2)
    place = y_ptr + token.to(tl.int64)[:, None] * outs + row[None, :]
    mask = (token < tokens)[:, None] & inside[None, :]
    before = tl.load(place, mask=mask, other=0.0)
    tl.store(place, (before.to(tl.float32) + total).to(y_ptr.dtype.element_ty), mask=mask)


def add_sparse(y: Tensor, x: Tensor, ends: Tensor, columns: Tensor, values: Tensor) -> None:
    """As the twin; rows of ``y`` lie one behind the other."""
    assert y.is_contiguous()
    (tokens, outs), x = y.shape, x.contiguous()
    block = min(8, triton.next_power_of_2(max(1, tokens)))
    if tokens:
        _sparse_kernel[(triton.cdiv(outs, 16), triton.cdiv(tokens, block))](
            y,
            x,
            ends,
            columns,
            values,
            tokens,
            outs,
            x.shape[1],
            BLOCK_M=block,
            BLOCK_R=16,
            ENTRIES=_ENTRIES,
            num_warps=4,
        )
