# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Residual sum and norm in one pass.

What lives here: RMS norm and layer norm. What may not: other operations.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import CallSite, Empty, NormFacts, plainly_empty
from headrace.kernels.linear.epilogue import MOST_ROWS

_TILE = 4096  # elements a program works on, if rows are not longer


@launchable(do_not_specialize=("rows",))
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr,
    rows, inner, x_outer, x_inner, residual_outer, residual_inner, eps,
    WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    mask = (row < rows)[:, None] & there[None, :]
    weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    outer, within = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + (outer * x_outer + within * x_inner)[:, None] + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if HAS_RESIDUAL:
        added_at = (outer * residual_outer + within * residual_inner)[:, None] + column[None, :]
        x += tl.load(residual_ptr + added_at, mask=mask, other=0.0).to(tl.float32)
        narrow = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, narrow, mask=mask)
        x = narrow.to(tl.float32)  # the sum as the next layer will read it
    if IS_LAYER:
        x = tl.where(mask, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * weight[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def create_rms_norm(site: CallSite[NormFacts]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Sums of few rows are parts of products; of more, products of torch's stand around it, or ours of codes."""
    alone, summed = (MOST_ROWS, site.facts.early) if site.pdl else (0, 0)

    def norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        few = len(x) <= (alone if residual is None else summed)
        return rms_norm(x, weight, eps, residual, pdl=few, empty=site.empty)

    return norm


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    *,
    pdl: bool = False,
    empty: Empty = plainly_empty,
) -> tuple[Tensor, Tensor]:
    """residual' = x + residual; y = residual' / sqrt(mean(residual'²) + eps) · weight (Zhang and Sennrich 2019).
    Returns (y, residual').

    ``x``, ``residual`` [..., H] in float32, bfloat16 or float16 (the sum is rounded to it), ``weight`` [H] of any float
    type; float32 inside. Rows may be strided. Without a residual, residual' is x itself.
    """
    return _launch(x, weight, None, eps, residual, empty, is_layer=False, pdl=pdl)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    pdl: bool = False,
    empty: Empty = plainly_empty,
) -> tuple[Tensor, Tensor]:
    """residual' = x + residual; y = (residual' − mean) / sqrt(variance + eps) · weight + bias (Ba et al. 2016). Returns
    (y, residual').

    Shapes and types as ``rms_norm``; ``bias`` [H].
    """
    return _launch(x, weight, bias, eps, residual, empty, is_layer=True, pdl=pdl and residual is None)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    empty: Empty,
    *,
    is_layer: bool,
    pdl: bool,
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // max(width, 1)
    y = empty(x.shape, x.dtype, x.device)
    total = x if residual is None else empty(x.shape, x.dtype, x.device)
    if rows == 0:
        return y, total
    chained = pdl and x.dim() == 2  # heads come after a product
    x, inner, *strides = _two_levels(x)
    added, _, *added_strides = (x, 0, 0, 0) if residual is None else _two_levels(residual)
    block = triton.next_power_of_2(width)
    block_rows = max(1, _TILE // block)  # whatever the number of rows: the layout of a tile orders the sum of each row
    _norm_kernel[(triton.cdiv(rows, block_rows),)](
        x, added, weight, weight if bias is None else bias, y, total, rows, inner, *strides, *added_strides, eps,
        WIDTH=width, BLOCK_ROWS=block_rows, BLOCK=block, HAS_RESIDUAL=residual is not None, IS_LAYER=is_layer, HAS_BIAS=bias is not None,
        PDL=chained, num_warps=min(16, max(4, block_rows * block // 512)), **dependent(chained),
    )  # fmt: skip
    return y, total


def _two_levels(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x, rows in its second last dimension, strides of outer and inner rows): heads of a merged product need no
    copy."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, 1, x.stride(0), 0
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.shape[1], x.stride(0), x.stride(1)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return flat, 1, flat.stride(0), 0
