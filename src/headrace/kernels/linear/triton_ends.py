# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""What Triton's products of few rows have in common: what stands around a product, and programs that share a tile.

What lives here: both, on the device and on the host. What may not: products, choosing their forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.candidate import Empty, Shape
from headrace.kernels.linear.epilogue import Epilogue, Fused
from headrace.kernels.linear.forms import FLAT, Forms
from headrace.kernels.norm.triton_activation import KINDS, act

# Where AROUND says what stands around a product, as kernels are compiled for it (``ends_of``).
NORMED, HAS_BIAS, GATED, KIND, RESIDUAL, NEXT, PIECES = (tl.constexpr(at) for at in range(7))


class Ends(NamedTuple):
    """Of what stands around it: pointers; any where there is nothing."""

    squares: Any
    bias: Any
    residual: Any
    scale: Any
    y: Any
    scaled: Any
    sums: Any


@triton.jit
def _squares(squares_ptr, first, pieces, tokens, row, PIECES: tl.constexpr):
    """Some of the partial sums of the row's squares, [PIECES, BLOCK_M]."""
    piece = first + tl.arange(0, PIECES)
    there = (piece < pieces)[:, None] & (row < tokens)[None, :]
    return tl.load(squares_ptr + piece[:, None] * tokens + row[None, :], mask=there, other=0.0)


@triton.jit
def _early(squares_ptr, pieces, tokens, row, AROUND: tl.constexpr):
    """The first of them; zeros where there is no norm."""
    count: tl.constexpr = AROUND[PIECES]
    if AROUND[NORMED]:
        return _squares(squares_ptr, 0, pieces, tokens, row, count)
    else:
        return tl.zeros((count, row.shape[0]), tl.float32)


@triton.jit
def _finish(total, second, squares, tile, column, row, ends, pieces, tokens, outs, ins, eps, AROUND: tl.constexpr):
    """Everything behind the sums over K. ``total`` and ``second`` [BLOCK_N, BLOCK_M]; ``squares``: the first partial
    sums, loaded early."""
    there, inside = row < tokens, column < outs
    mask = inside[:, None] & there[None, :]
    if AROUND[NORMED]:
        for first in range(AROUND[PIECES], pieces, AROUND[PIECES]):
            squares += _squares(ends.squares, first, pieces, tokens, row, AROUND[PIECES])
        norm = tl.rsqrt(tl.sum(squares, 0) / ins + eps)[None, :]
        total *= norm
        second *= norm
    if AROUND[HAS_BIAS]:
        total += tl.load(ends.bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        if AROUND[GATED]:
            second += tl.load(ends.bias + outs + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    if AROUND[GATED]:
        total = act(total, AROUND[KIND]) * second
    at = row.to(tl.int64)[None, :] * outs + column[:, None]
    if AROUND[RESIDUAL]:
        total += tl.load(ends.residual + at, mask=mask, other=0.0).to(tl.float32)
    y = total.to(ends.y.dtype.element_ty)
    tl.store(ends.y + at, y, mask=mask)
    if AROUND[NEXT]:
        wide = tl.where(mask, y.to(tl.float32), 0.0)
        scale = tl.load(ends.scale + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(ends.scaled + at, (wide * scale[:, None]).to(ends.scaled.dtype.element_ty), mask=mask)
        tl.store(ends.sums + tile * tokens + row, tl.sum(wide * wide, 0), mask=there)


@triton.jit
def _summed(total, part_ptr, ticket_ptr, tile, part, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WAYS: tl.constexpr):
    """Whether this program is the last of those that share a tile, and then all their sums, in the order of K."""
    complete = True
    if WAYS > 1:
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        parts = part_ptr + tile.to(tl.int64) * (WAYS * BLOCK_N * BLOCK_M) + cell
        tl.store(parts + part * (BLOCK_N * BLOCK_M), total, cache_modifier=".cg")
        tl.debug_barrier()  # parts of all threads before the ticket of one
        complete = tl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel") == WAYS - 1
        if complete:
            tl.store(ticket_ptr + tile, 0)  # as the next launch wants it
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for each in tl.static_range(WAYS):
                total += tl.load(parts + each * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    return complete, total


@dataclass(frozen=True, slots=True)
class Scratch:
    """What programs that share a tile leave for each other, for launches that follow each other. ``tickets`` are zero
    between them."""

    parts: Tensor  # float32
    tickets: Tensor  # int32


def make_scratch(shape: Shape, forms: Forms, device: torch.device | str) -> Scratch:
    split = [form for _, form in forms if form is not None and form.kind == FLAT and form.ways > 1]
    tiles = max((triton.cdiv(shape.outs, form.columns) for form in split), default=1)
    cells = max(
        (triton.cdiv(shape.outs, form.columns) * form.ways * form.columns * form.rows for form in split), default=1
    )
    return Scratch(
        torch.empty(cells, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


def ends_of(
    epilogue: Epilogue, bias: Tensor | None, y: Tensor, tiles: int, empty: Empty, pieces: int
) -> tuple[Fused, tuple[Tensor, ...], int, tuple[int, ...]]:
    """The results of a launch whose programs write ``tiles`` of each row, ``y`` among them; its pointers as
    ``Ends`` has them, how many partial sums of squares there are, and AROUND. So many ``pieces`` of these
    are loaded early; 0: a norm is none of the launch's business."""
    scaled = sums = None
    if epilogue.scale is not None:
        scaled = empty(y.shape, y.dtype, y.device)
        # the form decides how many: not planned
        sums = torch.empty((tiles, len(y)), dtype=torch.float32, device=y.device)
    squares, gate = epilogue.squares if pieces else None, epilogue.gate
    made = (squares, bias, epilogue.residual, epilogue.scale, y, scaled, sums)
    pointers = tuple(y if each is None else each for each in made)
    kinds = squares is not None, bias is not None, gate is not None, 0 if gate is None else KINDS[gate]
    rest = epilogue.residual is not None, epilogue.scale is not None, 1 if squares is None else pieces
    return (y, scaled, sums), pointers, 0 if squares is None else len(squares), (*kinds, *rest)
