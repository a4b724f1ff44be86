# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Rows rotated in small blocks: what products by weights that were rotated read (quant/rotated.py).

What lives here: the kernel and its launch. What may not: products, rounding.

    y = x · H / √size of each block of ``size``, by log2(size) rounds of sums and differences; float32, rounded once
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import Empty

_PART = 4096  # elements of a row, a program


@launchable(do_not_specialize=("factor",))
def _rotate_kernel(
    x_ptr, y_ptr, factor, WIDTH: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr
):
    """A program a part of a row, [PART]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0)
    kind = x.dtype
    x = x.to(tl.float32)
    ROUNDS: tl.constexpr = (
        (SIZE > 1) + (SIZE > 2) + (SIZE > 4) + (SIZE > 8) + (SIZE > 16) + (SIZE > 32) + (SIZE > 64) + (SIZE > 128)
    )
    for turn in tl.static_range(ROUNDS):
        low, high = tl.split(x.reshape(PART // (2 << turn), 2, 1 << turn).permute(0, 2, 1))
        x = tl.join(low + high, low - high).permute(0, 2, 1).reshape(PART)
    tl.store(y_ptr + row * WIDTH + column, (x * factor).to(kind), mask=column < WIDTH)


def rotate(x: Tensor, size: int, empty: Empty, *, pdl: bool) -> Tensor:
    """``x`` [T, width], rows one behind the other, bfloat16 or float16; ``size``: a power of two up to 256 that divides
    the width."""
    y = empty(tuple(x.shape), x.dtype, x.device)
    width = x.shape[1]
    part = min(_PART, triton.next_power_of_2(width))
    if len(x):
        _rotate_kernel[(len(x), triton.cdiv(width, part))](
            x,
            y,
            size**-0.5,
            WIDTH=width,
            PART=part,
            SIZE=size,
            PDL=pdl,
            num_warps=4,
            **dependent(pdl),
        )
    return y
