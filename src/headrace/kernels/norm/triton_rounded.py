# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Rows in 8 bits with a scale: what products with FP8 and int8 inputs (W8A8) read.

What lives here: the kernel, which completes a norm on its way, and its launch. What may not: products.

    scale = largest of a row (or of each group of it) / 448 or 127, a power of two where asked for;  codes = x / scale,
    to the nearest
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import Empty, plainly_empty

_LEAST: tl.constexpr = tl.constexpr(1e-10)  # of a row's largest input, as in quant/codes.py


@launchable(do_not_specialize=("pieces", "tokens"))
def _rounded_kernel(
    x_ptr, squares_ptr, static_ptr, codes_ptr, scale_ptr, pieces, tokens, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, FP8: tl.constexpr, POWERS: tl.constexpr, STATIC: tl.constexpr, NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a row, of ``WIDTH``. ``GROUP`` elements have a scale, BLOCK: all of them."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row.to(tl.int64) * WIDTH + column, mask=there, other=0.0)
    kind = x.dtype
    x = x.to(tl.float32)
    if NORMED:
        total = 0.0
        for first in range(0, pieces, 64):
            piece = first + tl.arange(0, 64)
            total += tl.sum(tl.load(squares_ptr + piece * tokens + row, mask=piece < pieces, other=0.0), 0)
        x = (x * tl.rsqrt(total / WIDTH + eps)).to(kind).to(tl.float32)  # as a norm leaves it
    x = x.reshape(BLOCK // GROUP, GROUP)
    most: tl.constexpr = 448.0 if FP8 else 127.0
    if STATIC:
        scale = tl.load(static_ptr) + tl.zeros((BLOCK // GROUP,), tl.float32)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 1), _LEAST) / most
        if POWERS:  # the next power of two
            bits = scale.to(tl.int32, bitcast=True)
            scale = (bits + 0x7FFFFF & 0x7F800000).to(tl.float32, bitcast=True)
    codes = tl.minimum(tl.maximum(x / scale[:, None], -most if FP8 else -128.0), most).reshape(BLOCK)
    if FP8:
        narrow = codes.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        nearest = (codes + 12582912.0) - 12582912.0  # ties to even: behind 1.5 · 2^23 no fraction fits
        narrow = nearest.to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + row.to(tl.int64) * WIDTH + column, narrow, mask=there)
    groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)


def rounded(
    x: Tensor, kind: torch.dtype, *, group: int = 0, powers: bool = False, static: Tensor | None = None, squares: Tensor | None = None,
    eps: float = 0.0, programmatic: bool = False, empty: Empty = plainly_empty,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(codes [T, H] of ``kind``, float8_e4m3fn or int8; scales [T, groups], float32) of ``x`` [T, H], bfloat16 or
    float16, rows one behind the other.

    ``group``: elements of one scale, a power of 2 that divides H; 0: all of a row. ``static``: the scale of all.
    ``squares`` [pieces, T]: partial sums of the squares of what x was before it was multiplied by its norm's weight; it
    is divided by their mean's root first.
    """
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    codes = empty((tokens, width), torch.uint8, x.device)
    scale = torch.empty((tokens, width // group if group else 1), dtype=torch.float32, device=x.device)
    _rounded_kernel[(tokens,)](
        x, scale if squares is None else squares, scale if static is None else static, codes, scale,
        0 if squares is None else squares.shape[0], tokens, eps, WIDTH=width, BLOCK=block, GROUP=group or block, FP8=kind is not torch.int8,
        POWERS=powers, STATIC=static is not None, NORMED=squares is not None, PDL=programmatic, num_warps=min(16, max(4, block // 512)),
        **dependent(programmatic),
    )  # fmt: skip
    return codes.view(kind), scale
