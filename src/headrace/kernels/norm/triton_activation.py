# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Activations, plain and gated.

What lives here: SiLU and GELU, their device function for other kernels too. What may not: matrix products.
"""

from __future__ import annotations

from types import MappingProxyType

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.build.launch import launchable
from headrace.kernels.candidate import Empty, plainly_empty
from headrace.spec import Activation

KINDS = MappingProxyType({Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2})  # as ``act`` numbers them
_BLOCK = 2048


@triton.jit
def act(x, KIND: tl.constexpr):
    """float32 in, float32 out. tanh GELU as x · sigmoid(2u): no cancellation near 0."""
    if KIND == 0:
        y = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return y


@launchable()
def _activation_kernel(
    x_ptr, y_ptr, row_stride, WIDTH: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    y = act(tl.load(x_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        y *= tl.load(x_ptr + row * row_stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * WIDTH + column, y.to(y_ptr.dtype.element_ty), mask=mask)


def gated_activation(x: Tensor, kind: Activation, *, empty: Empty = plainly_empty) -> Tensor:
    """act(first half) · second half (Shazeer 2020): ``x`` [..., 2I] → [..., I], float32, bfloat16 or float16; float32
    inside."""
    return _launch(x, x.shape[-1] // 2, kind, empty, gated=True)


def activation(x: Tensor, kind: Activation, *, empty: Empty = plainly_empty) -> Tensor:
    """SiLU x·σ(x), GELU x·Φ(x) or its tanh form (Hendrycks and Gimpel 2016), elementwise over any shape; types as
    ``gated_activation``."""
    return _launch(x, x.shape[-1], kind, empty, gated=False)


def _launch(x: Tensor, width: int, kind: Activation, empty: Empty, *, gated: bool) -> Tensor:
    y = empty((*x.shape[:-1], width), x.dtype, x.device)
    if y.numel() == 0:
        return y
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    block = min(_BLOCK, triton.next_power_of_2(width))
    _activation_kernel[(rows.shape[0] * triton.cdiv(width, block),)](
        rows, y, rows.stride(0), WIDTH=width, GATED=gated, KIND=KINDS[kind], BLOCK=block, num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return y
