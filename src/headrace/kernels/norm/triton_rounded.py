# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Rows in 8 bits with a scale: what products with FP8 and int8 inputs (W8A8) read; and rows rotated in small blocks: what
products by weights that were rotated read (quant/rotated.py).

What lives here: the kernels, for rows as they are, rows whose norm is half done, and what a residual sum with its norm
or a gate makes of rows; their launches. What may not: products.

    scale = largest of a row (or of each group of it) / 448 or 127, a power of two where asked for;  codes = x / scale,
    to the nearest
    y = x · H / √size of each block of ``size``, by log2(size) rounds of sums and differences; float32, rounded once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import EightBits, Empty, plainly_empty
from headrace.kernels.norm.triton_activation import KINDS, act
from headrace.spec import Activation

_LEAST: tl.constexpr = tl.constexpr(1e-10)  # of a row's largest input, as in quant/codes.py


@triton.jit
def scales_of(x, FP8: tl.constexpr, POWERS: tl.constexpr):
    """``x`` [groups, elements], float32 → [groups]."""
    scale = tl.maximum(tl.max(tl.abs(x), 1), _LEAST) / (448.0 if FP8 else 127.0)
    if POWERS:  # the next power of two
        bits = scale.to(tl.int32, bitcast=True)
        scale = (bits + 0x7FFFFF & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def codes_of(x, scale, FP8: tl.constexpr):
    """``x`` [groups, elements], float32, in units of ``scale`` [groups]: float8e4nv or int8."""
    most: tl.constexpr = 448.0 if FP8 else 127.0
    codes = tl.minimum(tl.maximum(x / scale[:, None], -most if FP8 else -128.0), most)
    if FP8:
        narrow = codes.to(tl.float8e4nv)
    else:
        narrow = ((codes + 12582912.0) - 12582912.0).to(tl.int8)  # ties to even: behind 1.5 · 2^23 no fraction fits
    return narrow


@triton.jit
def _store(
    x, row, static_ptr, codes_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr,
    POWERS: tl.constexpr, STATIC: tl.constexpr, DEALT: tl.constexpr,
):  # fmt: skip
    """``x`` [BLOCK] of this row, float32, of which ``WIDTH`` count. ``GROUP`` elements have a scale, BLOCK: all."""
    column = tl.arange(0, BLOCK)
    x = x.reshape(BLOCK // GROUP, GROUP)
    if STATIC:
        scale = tl.load(static_ptr) + tl.zeros((BLOCK // GROUP,), tl.float32)
    else:
        scale = scales_of(x, FP8, POWERS)
    narrow = codes_of(x, scale, FP8).to(tl.uint8, bitcast=True).reshape(BLOCK)
    place = column // 16 * 16 + column % 8 // 2 * 4 + column % 2 * 2 + column % 16 // 8 if DEALT else column
    tl.store(codes_ptr + row * WIDTH + place, narrow, mask=column < WIDTH)
    groups: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scale_ptr + row * groups + group, scale, mask=group < groups)


@launchable(do_not_specialize=("pieces", "tokens"))
def _rounded_kernel(
    x_ptr, squares_ptr, pieces, tokens, eps, static_ptr, codes_ptr, scale_ptr, NORMED: tl.constexpr, PDL: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, POWERS: tl.constexpr, STATIC: tl.constexpr,
    DEALT: tl.constexpr,
):  # fmt: skip
    """A program a row, of ``WIDTH``."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0)
    kind = x.dtype
    x = x.to(tl.float32)
    if NORMED:
        total = 0.0
        for first in range(0, pieces, 64):
            piece = first + tl.arange(0, 64)
            total += tl.sum(tl.load(squares_ptr + piece * tokens + row, mask=piece < pieces, other=0.0), 0)
        x = (x * tl.rsqrt(total / WIDTH + eps)).to(kind).to(tl.float32)  # as a norm leaves it
    _store(x, row.to(tl.int64), static_ptr, codes_ptr, scale_ptr, WIDTH, BLOCK, GROUP, FP8, POWERS, STATIC, DEALT)


@launchable()
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, total_ptr, eps, static_ptr, codes_ptr, scale_ptr, RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, POWERS: tl.constexpr, STATIC: tl.constexpr,
    DEALT: tl.constexpr,
):  # fmt: skip
    """A program a row; every value is rounded as triton_norm.py leaves it in memory."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    narrow = tl.load(x_ptr + row * WIDTH + column, mask=there, other=0.0)
    kind = narrow.dtype
    if RESIDUAL:
        added = tl.load(residual_ptr + row * WIDTH + column, mask=there, other=0.0)
        narrow = (narrow.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(total_ptr + row * WIDTH + column, narrow, mask=there)
    x = narrow.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * weight).to(kind).to(tl.float32)
    _store(x, row, static_ptr, codes_ptr, scale_ptr, WIDTH, BLOCK, GROUP, FP8, POWERS, STATIC, DEALT)


@launchable()
def _gate_kernel(
    x_ptr, static_ptr, codes_ptr, scale_ptr, KIND: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, POWERS: tl.constexpr, STATIC: tl.constexpr,
    DEALT: tl.constexpr,
):  # fmt: skip
    """A program a row of 2 · ``WIDTH``: the gate, and what it gates."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < WIDTH
    gate = tl.load(x_ptr + row * (2 * WIDTH) + column, mask=there, other=0.0)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + column, mask=there, other=0.0)
    x = (act(gate.to(tl.float32), KIND) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    _store(x, row, static_ptr, codes_ptr, scale_ptr, WIDTH, BLOCK, GROUP, FP8, POWERS, STATIC, DEALT)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rows of bfloat16 or float16, one behind the other, in 8 bits: codes [T, H], float8_e4m3fn or int8, and scales
    [T, groups], float32. ``static``: the scale of all. ``dealt``: of 16 codes, columns 2t, 2t + 8, 2t + 1, 2t + 9 lie
    side by side (whole sixteens), as triton_codes.py multiplies them."""

    eight: EightBits
    static: Tensor | None = None
    empty: Empty = plainly_empty
    dealt: bool = False

    def rows(
        self, x: Tensor, squares: Tensor | None = None, eps: float = 0.0, *, pdl: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Of ``x`` [T, H]. ``squares`` [pieces, T]: partial sums of the squares of what x was before it was multiplied
        by its norm's weight; it is divided by their mean's root first."""
        behind, how = self._behind(len(x), x.shape[1], x.device)
        sums, pieces = (behind[1], 0) if squares is None else (squares, len(squares))
        if len(x):
            _rounded_kernel[(len(x),)](
                x, sums, pieces, len(x), eps, *behind,
                NORMED=squares is not None, PDL=pdl, **how, **dependent(pdl),
            )  # fmt: skip
        return self._found(behind)

    def normed(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Of ``rms_norm``'s first result; and its second. ``x``, ``residual`` [T, H]."""
        x = x.contiguous()
        added = x if residual is None else residual.contiguous()
        total = x if residual is None else self.empty(tuple(x.shape), x.dtype, x.device)
        behind, how = self._behind(len(x), x.shape[1], x.device)
        if len(x):
            _norm_kernel[(len(x),)](x, added, weight, total, eps, *behind, RESIDUAL=residual is not None, **how)
        return *self._found(behind), total

    def activated(self, x: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
        """Of ``gated_activation``'s result. ``x`` [T, 2 H]."""
        x = x.contiguous()
        behind, how = self._behind(len(x), x.shape[1] // 2, x.device)
        if len(x):
            _gate_kernel[(len(x),)](x, *behind, KIND=KINDS[kind], **how)
        return self._found(behind)

    def _behind(self, tokens: int, width: int, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """What every kernel takes behind its inputs."""
        block, group = triton.next_power_of_2(width), self.eight.group
        codes = self.empty((tokens, width), torch.uint8, device)
        scale = torch.empty((tokens, width // group if group else 1), dtype=torch.float32, device=device)
        how = {
            "WIDTH": width,
            "BLOCK": block,
            "GROUP": group or block,
            "FP8": self.eight.kind == "fp8",
            "POWERS": self.eight.powers,
        }
        warps = min(16, max(4, block // 512))
        return (scale if self.static is None else self.static, codes, scale), {
            **how, "STATIC": self.static is not None, "DEALT": self.dealt, "num_warps": warps,
        }  # fmt: skip

    def _found(self, behind: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return behind[1].view(self.eight.dtype), behind[2]


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
