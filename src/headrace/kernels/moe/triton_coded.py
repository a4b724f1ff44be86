# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The sparse feed-forward over experts in codes of few bits: the grouped products of triton_moe.py, whose weights are
read by triton_codes.py.

What lives here: those two kernels. What may not: routing, the weighted sum (triton_moe.py), the callable (coded.py).
"""

from __future__ import annotations

import triton.language as tl

from headrace.kernels.build.launch import launchable
from headrace.kernels.linear.triton_codes import _product, _split
from headrace.kernels.moe.triton_moe import _unit
from headrace.kernels.norm.triton_activation import act


@launchable(do_not_specialize=["room", "steps", "tiles"])
def _expand_coded_kernel(
    x_ptr, words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, inner_ptr, counts_ptr, listed_ptr, x_row, room, steps, tiles,
    BITS: tl.constexpr, SETS: tl.constexpr, ZEROS: tl.constexpr, SHIFTS: tl.constexpr, FLOATS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, RAW: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Gate and up take turns, ``tiles`` blocks of 64 rows of them an expert."""
    across: tl.constexpr = (INNER + BLOCKS * 32 - 1) // (BLOCKS * 32)
    expert, count, before, tile, strip = _unit(counts_ptr, tl.program_id(0), across, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        there = place < count
        pair = tl.load(listed_ptr + expert.to(tl.int64) * room + place, mask=there, other=0)
        block = expert.to(tl.int64) * tiles + strip * BLOCKS
        factor = tl.load(factor_ptr + block * 64 + tl.arange(0, BLOCKS * 64))
        total = _product(
            x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_row, there, x_ptr, words_ptr, shorts_ptr, bytes_ptr, table_ptr, factor,
            block * steps * BLOCK_BYTES, 0, steps, steps, HIDDEN,
            BITS, SETS, ZEROS, SHIFTS, FLOATS, TABLE, SCALES, RAW, BLOCK_BYTES, False, BLOCKS, BLOCK_M,
        )  # fmt: skip
        gate, up = _split(total, BLOCKS, BLOCK_M)
        kind = inner_ptr.dtype.element_ty
        y = (act(gate.to(kind).to(tl.float32), KIND) * up.to(kind).to(tl.float32)).to(kind)
        column = strip * (BLOCKS * 32) + tl.arange(0, BLOCKS * 32)
        at = inner_ptr + (before + place)[None, :] * INNER + column[:, None]
        tl.store(at, y, mask=there[None, :] & (column < INNER)[:, None])


@launchable(do_not_specialize=["room", "steps", "tiles"])
def _contract_coded_kernel(
    inner_ptr, words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, out_ptr, counts_ptr, listed_ptr, room, steps, tiles,
    BITS: tl.constexpr, SETS: tl.constexpr, ZEROS: tl.constexpr, SHIFTS: tl.constexpr, FLOATS: tl.constexpr, TABLE: tl.constexpr,
    SCALES: tl.constexpr, RAW: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = (HIDDEN + BLOCKS * 64 - 1) // (BLOCKS * 64)
    expert, count, before, tile, strip = _unit(counts_ptr, tl.program_id(0), across, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        there = place < count
        block = expert.to(tl.int64) * tiles + strip * BLOCKS
        factor = tl.load(factor_ptr + block * 64 + tl.arange(0, BLOCKS * 64))
        total = _product(
            inner_ptr + (before + place)[:, None] * INNER, there, inner_ptr, words_ptr, shorts_ptr, bytes_ptr, table_ptr, factor,
            block * steps * BLOCK_BYTES, 0, steps, steps, INNER,
            BITS, SETS, ZEROS, SHIFTS, FLOATS, TABLE, SCALES, RAW, BLOCK_BYTES, False, BLOCKS, BLOCK_M,
        )  # fmt: skip
        pair = tl.load(listed_ptr + expert.to(tl.int64) * room + place, mask=there, other=0).to(tl.int64)
        column = strip * (BLOCKS * 64) + tl.arange(0, BLOCKS * 64)
        at = out_ptr + pair[None, :] * HIDDEN + column[:, None]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=there[None, :] & (column < HIDDEN)[:, None])
