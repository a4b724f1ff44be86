# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Products of few rows with a large weight, and what stands around them in a layer, each in one launch.

What lives here: the kernels. What may not: choosing a form for a shape (flat_forms.py), the callables of layers
(flat_linear.py).

    y = act(s · x Wᵀ + b) ⊙ (s · x Vᵀ + c) + residual      every part but the product can be left out; then, for the
    norm that follows,
    scaled = y ⊙ g,  squares = partial sums of y²          which multiplies its product by s = 1 / sqrt(mean y² + eps)

The weight is read once and is all that takes time, so the forms differ in how it comes in:

    vector   one row: multiplied and added one by one, straight from 16-byte loads; a program's first ones are under way
    before it waits
    flat     up to 64 rows (FlashDecoding++, Hong et al. 2024, flat GEMM): the copy engine and a ring of tiles. The
    weight is the tall side of
             the matrix instruction, so rows are padded to 16 and not to 64. K may be split over programs: the last one
             adds up the parts

Sums are always in one order: no float is added atomically.

With PDL every kernel waits before it reads what another wrote and before it writes. ``LATE``: the next launch is let in
once this program's weights have been read. Large programs of the next launch would otherwise crowd on the processors
that happen to have room.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import launchable
from headrace.kernels.norm.triton_activation import act

# Where AROUND says what stands around a product, as kernels are compiled for it (flat_linear.py, ``ends_of``).
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


@launchable(do_not_specialize=("tokens", "pieces"))
def _vector_kernel(
    x_ptr, weight_ptr, squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr, pieces, tokens, outs, ins, eps,
    AROUND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. ``AHEAD``: how many steps of K, 0 to 2, are under way while one is used."""
    tile = tl.program_id(0)
    column, step, row = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, 1)
    inside = (column < outs)[:, None]
    at = weight_ptr + column.to(tl.int64)[:, None] * ins + step[None, :]
    up = at + outs.to(tl.int64) * ins
    if PDL and not LATE:
        gdc_launch_dependents()
    w = tl.load(at, mask=inside, other=0.0)
    v = tl.load(up, mask=inside, other=0.0) if AROUND[GATED] else w
    w_next, v_next = w, v
    if AHEAD == 2:
        w_next = tl.load(at + BLOCK_K, mask=inside & (ins > BLOCK_K), other=0.0)
        v_next = tl.load(up + BLOCK_K, mask=inside & (ins > BLOCK_K), other=0.0) if AROUND[GATED] else w_next
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + step)
    squares = _early(squares_ptr, pieces, tokens, row, AROUND)
    products = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    second = products
    if AHEAD == 0:
        products = w.to(tl.float32) * x.to(tl.float32)[None, :]
        if AROUND[GATED]:
            second = v.to(tl.float32) * x.to(tl.float32)[None, :]
        for k in range(BLOCK_K, ins, BLOCK_K):
            wide = tl.load(x_ptr + k + step).to(tl.float32)[None, :]
            products += tl.load(at + k, mask=inside, other=0.0).to(tl.float32) * wide
            if AROUND[GATED]:
                second += tl.load(up + k, mask=inside, other=0.0).to(tl.float32) * wide
    else:
        for k in range(0, ins, BLOCK_K):
            left = k + AHEAD * BLOCK_K < ins
            w_last = tl.load(at + k + AHEAD * BLOCK_K, mask=inside & left, other=0.0)
            v_last = tl.load(up + k + AHEAD * BLOCK_K, mask=inside & left, other=0.0) if AROUND[GATED] else w_last
            x_next = tl.load(x_ptr + k + BLOCK_K + step, mask=(k + BLOCK_K + step) < ins, other=0.0)
            wide = x.to(tl.float32)[None, :]
            products += w.to(tl.float32) * wide
            if AROUND[GATED]:
                second += v.to(tl.float32) * wide
            w, v = (w_next, v_next) if AHEAD == 2 else (w_last, v_last)
            w_next, v_next = w_last, v_last
            x = x_next
    if PDL and LATE:
        gdc_launch_dependents()
    total = tl.sum(products, 1)[:, None]
    gate = tl.sum(second, 1)[:, None] if AROUND[GATED] else total
    ends = Ends(squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr)
    _finish(total, gate, squares, tile, column, row, ends, pieces, tokens, outs, ins, eps, AROUND)


@launchable(do_not_specialize=("tokens", "pieces"))
def _flat_kernel(
    x_map, weight_map, part_ptr, ticket_ptr, squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr,
    pieces, tokens, outs, ins, share, eps,
    AROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WAYS: tl.constexpr,
    LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``WAYS`` programs a tile, each with ``share`` of K. What lies beyond a matrix arrives as zeros."""
    tile, part = tl.program_id(0) // WAYS, tl.program_id(0) % WAYS
    first, begin = tile * BLOCK_N, part * share
    column, row = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    if PDL:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()
    squares = _early(squares_ptr, pieces, tokens, row, AROUND)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = total
    for k in range(begin, tl.minimum(begin + share, ins), BLOCK_K):
        x = x_map.load([0, k]).T
        total = tl.dot(weight_map.load([first, k]), x, total)
        if AROUND[GATED]:
            second = tl.dot(weight_map.load([outs + first, k]), x, second)
    if PDL and LATE:
        gdc_launch_dependents()
    complete, total = _summed(total, part_ptr, ticket_ptr, tile, part, BLOCK_N, BLOCK_M, WAYS)
    if complete:
        ends = Ends(squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr)
        _finish(total, second, squares, tile, column, row, ends, pieces, tokens, outs, ins, eps, AROUND)
