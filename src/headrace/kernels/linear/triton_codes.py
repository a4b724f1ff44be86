# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Products with weights in codes of 1 to 8 bits (packing.py), and what stands around them in a layer, each in one
launch.

What lives here: the kernels, one for every coding (a generator over widths, as Tilus has it, Ding et al. 2025). What
may not: the layout, choosing a form, the callables of layers (coded.py).

    y = act(s · x Wᵀ + b) ⊙ (s · x Vᵀ + c) + residual      as kernels/linear/triton_ends.py has it

Codes come as words, and are widened in the registers that the matrix instruction reads: the layout is such that nothing
has to change hands. Pairs of codes become pairs of bfloat16 by putting bits in their place: behind the exponent of 128
an integer (MARLIN, Frantar et al. 2024); in the place of bfloat16's own an e2m1 or e4m3, whose exponent is then 126 or
120 too small. A weight is the tall side of the instruction, so few rows of x are padded to 16. With one scale a block
and row sums of a block are scaled; else each weight is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import launchable
from headrace.kernels.linear.triton_ends import GATED, Ends, _early, _finish, _summed

# Where a coding's facts are, in what kernels are compiled for (coded.py, ``constants``).
BITS, SETS, ZEROS, SHIFTS, FLOATS, TABLE, SCALES, RAW, BLOCK_BYTES = (tl.constexpr(at) for at in range(9))
# As packing.Scales numbers them.
HALF: tl.constexpr = tl.constexpr(0)
POWER: tl.constexpr = tl.constexpr(1)
FP8: tl.constexpr = tl.constexpr(2)
BYTE: tl.constexpr = tl.constexpr(3)
# what an exponent that was put in bfloat16's or float32's place lacks
_E4M3_SHORT: tl.constexpr = tl.constexpr(2.0**120)
_E2M1_SHORT: tl.constexpr = tl.constexpr(2.0**126)


class Blocks(NamedTuple):
    """A weight's blocks, as elements of three widths, and the table of codes."""

    words: Any
    shorts: Any
    bytes: Any
    table: Any


@triton.jit
def _pair(bits):
    """int32 as the two bfloat16 that it is, the lower one first: [..., 2]."""
    low = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _nibbles(words, PLACE: tl.constexpr, FLOATS: tl.constexpr):
    """Two codes of 4 bits, 16 bits apart."""
    bits = words >> 4 * PLACE
    if FLOATS:
        found = _pair((bits & 0x00070007) << 6 | (bits & 0x00080008) << 12) * _E2M1_SHORT
    else:
        found = _pair(bits & 0x000F000F | 0x43004300)  # 128 + code
    return found


@triton.jit
def _bytes_of(words, PLACE: tl.constexpr, FLOATS: tl.constexpr):
    """Two codes of 8 bits, 16 bits apart."""
    bits = words >> 8 * PLACE
    if FLOATS:
        found = _pair((bits & 0x007F007F) << 4 | (bits & 0x00800080) << 8) * _E4M3_SHORT
    else:  # 16 (128 + high) - 2048 - 128 + 128 + low, each step exact
        found = _pair(bits >> 4 & 0x000F000F | 0x43004300) * 16.0 - 2176.0 + _pair(bits & 0x000F000F | 0x43004300)
    return found


@triton.jit
def _code(first, second, third, PLACE: tl.constexpr, BITS: tl.constexpr):
    """One code of up to 7 bits, from its planes."""
    most: tl.constexpr = 4 if BITS & 4 else 2 if BITS & 2 else 1
    code = first >> most * PLACE & ((1 << most) - 1)
    if most < BITS:
        least: tl.constexpr = 2 if (BITS - most) & 2 else 1
        code |= (second >> least * PLACE & ((1 << least) - 1)) << most
        if most + least < BITS:
            code |= (third >> PLACE & 1) << (most + least)
    return code


@triton.jit
def _value(planes, table_ptr, PLACE: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Its pair: this code, and the one four places on."""
    first, second, third = planes
    low, high = _code(first, second, third, PLACE, BITS), _code(first, second, third, PLACE + 4, BITS)
    if TABLE:
        found = tl.join(tl.load(table_ptr + low), tl.load(table_ptr + high))
    else:
        found = _pair(low | high << 16 | 0x43004300)
    return found


@triton.jit
def _plane(blocks, block, element, BITS: tl.constexpr):
    """A plane's elements, as int32: bytes of 1,024 elements' first, and the element, [n] (int64, int32)."""
    if BITS == 4:
        found = tl.load(blocks.words + block // 4 + element)
    elif BITS == 2:
        found = tl.load(blocks.shorts + block // 2 + element).to(tl.int32)
    else:
        found = tl.load(blocks.bytes + block + element).to(tl.int32)
    return found


@triton.jit
def _planes(blocks, at, below, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """All that a code is made of, as far as there is more than one."""
    element = tl.arange(0, BLOCKS * 1024)
    block, element = at + element // 1024 * below, element % 1024
    most: tl.constexpr = 4 if BITS & 4 else 2 if BITS & 2 else 1
    least: tl.constexpr = 2 if (BITS - most) & 2 else 1
    first = _plane(blocks, block, element, most)
    second, third = first, first
    if most < BITS:
        second = _plane(blocks, block + most * 1024, element, least)
    if most + least < BITS:
        third = _plane(blocks, block + (most + least) * 1024, element, 1)
    return first, second, third


@triton.jit
def _words(blocks, at, below, BLOCKS: tl.constexpr):
    """Of codes of 8 bits."""
    element = tl.arange(0, BLOCKS * 2048)
    return tl.load(blocks.words + at // 4 + element // 2048 * (below // 4) + element % 2048)


@triton.jit
def _values(blocks, at, below, CODING: tl.constexpr, BLOCKS: tl.constexpr):
    """What the codes of ``BLOCKS`` blocks say, [64 · BLOCKS, 128]; integers above the middle 128, those of 8 bits above
    0.

    ``at``: where the first one begins, ``below``: how far the next one is, in bytes.
    """
    bits: tl.constexpr = CODING[BITS]
    table: tl.constexpr = CODING[TABLE]
    floats: tl.constexpr = CODING[FLOATS]
    if bits == 8:
        words = _words(blocks, at, below, BLOCKS)
        found = tl.join(_bytes_of(words, 0, floats), _bytes_of(words, 1, floats))
        # block, piece, warp, g, t, sixteen, side, e, h
        found = found.reshape(BLOCKS, 4, 4, 8, 4, 2, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 6, 4, 7)
    else:
        planes = _planes(blocks, at, below, bits, BLOCKS)
        if bits == 4 and not table:
            upper = tl.join(_nibbles(planes[0], 0, floats), _nibbles(planes[0], 2, floats))
            lower = tl.join(_nibbles(planes[0], 1, floats), _nibbles(planes[0], 3, floats))
        else:
            upper = tl.join(_value(planes, blocks.table, 0, bits, table), _value(planes, blocks.table, 2, bits, table))
            lower = tl.join(_value(planes, blocks.table, 1, bits, table), _value(planes, blocks.table, 3, bits, table))
        # block, piece, warp, g, t, sixteen, e, side, h
        found = tl.join(upper, lower).reshape(BLOCKS, 2, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    return found.reshape(BLOCKS * 64, 128)


@triton.jit
def _four(planes, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Codes two places apart, that four of them make."""
    first, second, third = planes
    return tl.join(
        tl.join(_code(first, second, third, PLACE, BITS), _code(first, second, third, PLACE + 4, BITS)),
        tl.join(_code(first, second, third, PLACE + 2, BITS), _code(first, second, third, PLACE + 6, BITS)),
    )


@triton.jit
def _wholes(blocks, at, below, zero, CODING: tl.constexpr, BLOCKS: tl.constexpr):
    """Integer codes around their middle or (ZEROS) their ``zero``, int8 [64 · BLOCKS, 128]; those of 4 bits without
    zeros 16 times as large: in the upper half of a byte two operations give four of them. A thread's four of 16 columns
    are side by side, as the instruction for bytes has them; ``dealt`` rows (norm/triton_rounded.py) lie like that."""
    bits: tl.constexpr = CODING[BITS]
    if bits == 8:
        words = _words(blocks, at, below, BLOCKS)
        found = tl.join(
            tl.join(words & 255, words >> 16 & 255), tl.join(words >> 8 & 255, words >> 24 & 255)
        )  # h, e behind
        # block, piece, warp, g, t, sixteen, side, e, h
        found = found.reshape(BLOCKS, 4, 4, 8, 4, 2, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 4, 7, 6)
    else:
        planes = _planes(blocks, at, below, bits, BLOCKS)
        if bits == 4 and not CODING[ZEROS]:
            high = (planes[0] ^ -0x77777778) & -0x0F0F0F10
            low = (planes[0] << 4 ^ -0x77777778) & -0x0F0F0F10
            upper = tl.join(tl.join(low, low >> 16), tl.join(low >> 8, low >> 24))
            lower = tl.join(tl.join(high, high >> 16), tl.join(high >> 8, high >> 24))
        else:
            upper, lower = _four(planes, 0, bits), _four(planes, 1, bits)
        # block, piece, warp, g, t, sixteen, e, side, h
        found = tl.join(upper, lower).reshape(BLOCKS, 2, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 4, 6, 7)
    found = found.reshape(BLOCKS * 64, 128)
    if CODING[ZEROS]:
        found -= zero.to(tl.int32) - 128
    elif bits != 4:
        found -= 1 << (bits - 1)
    return found.to(tl.int8)


@triton.jit
def _section(blocks, at, row, set, SCALES: tl.constexpr, SETS: tl.constexpr):
    """Scales or shifts, float32. ``at``: of each row, where its block's begin, in bytes; ``row`` within the block."""
    if SCALES == HALF:
        found = tl.load(blocks.shorts + at // 2 + set * 64 + row).to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALES == POWER:
        found = (tl.load(blocks.bytes + at + set * 64 + row).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    elif SCALES == FP8:
        bits = tl.load(blocks.bytes + at + set * 64 + row).to(tl.int32)
        found = ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True) * _E4M3_SHORT
    else:
        large = tl.load(blocks.shorts + at // 2 + row + set * 0).to(tl.float16, bitcast=True).to(tl.float32)
        small = (tl.load(blocks.bytes + at + 128 + row * SETS + set).to(tl.int32) ^ 128) - 128
        found = large * small.to(tl.float32)
    return found


@triton.jit
def _beside(blocks, factor, at, below, CODING: tl.constexpr, BLOCKS: tl.constexpr):
    """Scales of a block's rows and sets, and what is beside them, [64 · BLOCKS, SETS], float32: shifts; or zeros, as
    values have them.

    ``factor``: of each row. Without it float16 would overflow.
    """
    sets: tl.constexpr = CODING[SETS]
    scales: tl.constexpr = CODING[SCALES]
    row, set = tl.arange(0, BLOCKS * 64)[:, None], tl.arange(0, sets)[None, :]
    own = at + CODING[BITS] * 1024 + row // 64 * below
    scale = _section(blocks, own, row % 64, set, scales, sets) * factor[:, None]
    size: tl.constexpr = 128 * sets if scales == HALF else 128 + 64 * sets if scales == BYTE else 64 * sets
    if CODING[SHIFTS]:
        other = _section(blocks, own + size, row % 64, set, scales, sets) * factor[:, None]
    elif CODING[ZEROS]:
        bits = tl.load(blocks.shorts + (own + size) // 2 + set * 64 + row % 64)
        other = bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        other = scale
    return scale, other


@triton.jit
def _spread(values, SETS: tl.constexpr):
    """[rows, SETS] → [rows, 128], or [rows, 1], which is as good."""
    if SETS > 1:
        ROWS: tl.constexpr = values.shape[0]
        values = tl.broadcast_to(values[:, :, None], (ROWS, SETS, 128 // SETS)).reshape(ROWS, 128)
    return values


@triton.jit
def _centred(values, other, CODING: tl.constexpr):
    """Integers around zero; exact. RAW: floats, entries of a table, or integers from 0 on."""
    if CODING[ZEROS]:
        values -= _spread(other, CODING[SETS]).to(tl.bfloat16)
    elif CODING[RAW] < 0:
        values -= 128.0 if CODING[BITS] == 8 else 128.0 + (1 << (CODING[BITS] - 1))
    elif CODING[RAW] == 0 and CODING[BITS] < 8:
        values -= 128.0
    return values


@triton.jit
def _weights(values, scale, other, CODING: tl.constexpr):
    """All of it, float32."""
    wide = _centred(values, other, CODING).to(tl.float32) * _spread(scale, CODING[SETS])
    if CODING[SHIFTS]:
        wide += _spread(other, CODING[SETS])
    return wide


@triton.jit
def _split(total, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Rows that take turns by eight apart: [64 · BLOCKS, BLOCK_M] → twice half of them."""
    return tl.split(total.reshape(BLOCKS * 4, 2, 8, BLOCK_M).permute(0, 2, 3, 1).reshape(BLOCKS * 32, BLOCK_M, 2))


@triton.jit
def _product(
    x_at, there, order_ptr, blocks, factor, first, begin, end, steps, ins,
    CODING: tl.constexpr, ORDERED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Steps ``begin`` to ``end`` of K: [64 · BLOCKS, BLOCK_M]. ``x_at``: where rows of x begin, [BLOCK_M, 1];
    ``first``: the weight's rows, bytes. ``WHOLE``: x is dealt int8, and so do codes become; of one set, without shifts,
    floats, tables and zeros of 8 bits."""
    SUMS: tl.constexpr = CODING[SETS] == 1 and not CODING[SHIFTS]  # are scaled, of a block
    below, depth = steps * CODING[BLOCK_BYTES], tl.arange(0, 128)
    scale, other = _beside(blocks, factor, first + begin * CODING[BLOCK_BYTES], below, CODING, BLOCKS)
    total = tl.zeros((BLOCKS * 64, BLOCK_M), tl.float32)
    for step in range(begin, end):
        at = first + step * CODING[BLOCK_BYTES]
        k = step * 128 + depth
        if ORDERED:
            k = tl.load(order_ptr + k, mask=k < ins, other=ins)
        x = tl.load(x_at + k[None, :], mask=there[:, None] & (k < ins)[None, :], other=0)
        if WHOLE:
            values = _wholes(blocks, at, below, other, CODING, BLOCKS)
        else:
            values = _values(blocks, at, below, CODING, BLOCKS)
        # of the next step: nobody else brings them in time
        following = first + tl.minimum(step + 1, steps - 1) * CODING[BLOCK_BYTES]
        next_scale, next_other = _beside(blocks, factor, following, below, CODING, BLOCKS)
        if WHOLE:
            total += tl.dot(values, tl.trans(x), out_dtype=tl.int32).to(tl.float32) * scale
        elif SUMS:
            weight = _centred(values, other, CODING).to(x.dtype)
            total += tl.dot(weight, tl.trans(x)) * scale
        else:
            weight = _weights(values, scale, other, CODING).to(x.dtype)
            total = tl.dot(weight, tl.trans(x), total)
        scale, other = next_scale, next_other
    return total


@launchable(do_not_specialize=("tokens", "pieces", "steps", "share"))
def _codes_kernel(
    x_ptr, own_ptr, words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, order_ptr, part_ptr, ticket_ptr,
    squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr,
    pieces, tokens, outs, ins, steps, share, eps,
    CODING: tl.constexpr, ORDERED: tl.constexpr, TURNED: tl.constexpr,
    AROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCKS: tl.constexpr, WAYS: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """``WHOLE``: rows of x are int8, each with a scale of its own.

    ``WAYS`` programs a tile of 64 · ``BLOCKS`` rows of the weight and BLOCK_M of x, each with ``share`` steps of K.
    ``outs``: of y's rows; where rows of the weight take turns (``TURNED``) without a gate, half of them."""
    tile, part, band = tl.program_id(0) // WAYS, tl.program_id(0) % WAYS, tl.program_id(1)
    row, laid = band * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCKS * 64)
    there = row < tokens
    begin = part * share
    end = tl.minimum(begin + share, steps)
    first = tile.to(tl.int64) * BLOCKS * steps * CODING[BLOCK_BYTES]
    if PDL and not LATE:
        gdc_launch_dependents()
    factor = tl.load(factor_ptr + tile * (BLOCKS * 64) + laid)
    if PDL:
        gdc_wait()
    squares = _early(squares_ptr, pieces, tokens, row, AROUND)
    total = _product(
        x_ptr + row.to(tl.int64)[:, None] * ins, there, order_ptr, Blocks(words_ptr, shorts_ptr, bytes_ptr, table_ptr), factor,
        first, begin, end, steps, ins, CODING, ORDERED, BLOCKS, BLOCK_M, WHOLE,
    )  # fmt: skip
    if WHOLE:
        own = tl.load(own_ptr + row, mask=there, other=0.0)
        total *= (own * 0.0625 if CODING[BITS] == 4 and not CODING[ZEROS] else own)[None, :]
    if PDL and LATE:
        gdc_launch_dependents()
    complete, total = _summed(
        total, part_ptr, ticket_ptr, band * (tl.num_programs(0) // WAYS) + tile, part, BLOCKS * 64, BLOCK_M, WAYS
    )
    if complete:
        if AROUND[GATED]:
            whole, second = _split(total, BLOCKS, BLOCK_M)
            column = tile * (BLOCKS * 32) + tl.arange(0, BLOCKS * 32)
        else:
            whole, second, column = total, total, tile * (BLOCKS * 64) + laid
            if TURNED:
                half = column // 16 * 8 + column % 8
                column = tl.where(half < outs // 2, half + column % 16 // 8 * (outs // 2), outs)
        ends = Ends(squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr)
        _finish(whole, second, squares, tile, column, row, ends, pieces, tokens, outs, ins, eps, AROUND)


@launchable(do_not_specialize=("first_tile", "outs", "steps"))
def _widen_kernel(
    words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, out_ptr, first_tile, outs, ins, steps,
    CODING: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A block of the weight, [64, 128], for a product of many rows: of ``outs`` rows from ``first_tile`` on, as they
    lie, or both halves of those that take turns one below the other; columns as they lie."""
    tile, step = first_tile + tl.program_id(0) // steps, tl.program_id(0) % steps
    at = (tile.to(tl.int64) * steps + step) * CODING[BLOCK_BYTES]
    row, column = tl.arange(0, 64), step * 128 + tl.arange(0, 128)
    blocks = Blocks(words_ptr, shorts_ptr, bytes_ptr, table_ptr)
    factor = tl.load(factor_ptr + tile * 64 + row)
    scale, other = _beside(blocks, factor, at, 0, CODING, 1)
    values = _values(blocks, at, 0, CODING, 1)
    place = tl.program_id(0) // steps * 64 + row
    there = (place < outs)[:, None] & (column < ins)[None, :]
    if TURNED:
        place = place // 16 * 8 + place % 8 + place % 16 // 8 * (outs // 2)
    wide = _weights(values, scale, other, CODING)
    tl.store(
        out_ptr + place.to(tl.int64)[:, None] * ins + column[None, :], wide.to(out_ptr.dtype.element_ty), mask=there
    )
