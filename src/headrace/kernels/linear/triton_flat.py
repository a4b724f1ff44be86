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

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import launchable
from headrace.kernels.linear.triton_ends import GATED, Ends, _early, _finish, _summed


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
