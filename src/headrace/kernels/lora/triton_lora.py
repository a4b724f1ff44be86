# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""What adapters add to a product and to an embedding, in two launches: down to their ranks, and up again.

What lives here: these kernels. What may not: which slot holds which adapter (lora/), products of the model's own
weights.

Which row has which slot is read on the device, so one capture serves any mixture; nobody sorts rows. A tile of rows has
a lane for each adapter that may be in it:

    slots of a tile    2  2  -  0  2  0  -  5        rows without an adapter are in no lane
    first of a kind    2        0           5
    lane               0        1           2        lane 3 and those behind it have nothing to do

Each row of a and column of b lies where the slots' table says, in a pool (``SlotFactors``). Slots, the table and factors may
be read before the launch before has ended: what writes them is never launched early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import CallSite, Declined, DeltaFacts
from headrace.kernels.inputs import AdapterRows, SlotFactors
from headrace.spec import ADDRESS_UNIT

MOST_PARTS = 3
UNIT = tl.constexpr(ADDRESS_UNIT)
_ROWS = 16  # of a tile: of a matrix instruction
_TALL = 64  # of a tile of steps with many rows, whose neighbours mostly are of one sequence
_LEAST_TALL = 512
_WIDE = 128  # inputs at once
_SHARE = 1024  # inputs of a program, where rows are few
_MOST_SPLITS = 8
_OUTS = 128  # outputs of a program
_ANYWHERE = ("slots_ptr", "ranks_ptr", "a_ptr", "b_ptr", "gains_ptr")  # single numbers are read there


@triton.jit
def _kinds(slots_ptr, row, rows, ROWS: tl.constexpr):
    """(slot of each row; the lane of its kind where it is the first of it, else -1; kinds)."""
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1)
    at = tl.arange(0, ROWS)
    same = (slot[:, None] == slot[None, :]) & (at[None, :] < at[:, None])
    first = (slot >= 0) & (tl.sum(same.to(tl.int32), 1) == 0)
    lane = tl.where(first, tl.cumsum(first.to(tl.int32), 0) - 1, -1)
    return slot, lane, tl.sum(first.to(tl.int32), 0)


@triton.jit
def _found(pool_ptr, at_ptr, known, begin, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Where element ``begin`` of each row lies, whose first address is at ``at_ptr``. Tiles begin at multiples of
    their size, and lie in one chunk."""
    piece = 0
    if CHUNKS > 1:
        piece = begin // CHUNK
    address = tl.load(at_ptr + piece, mask=known, other=0).to(tl.int64)
    return pool_ptr + address * UNIT + (begin - piece * CHUNK)


@triton.jit
def _dots(sums, x_at, a_at, pool_ptr, at_ptr, known, place, mine, there, begin, end, INS: tl.constexpr, CHUNKS: tl.constexpr,
          CHUNK: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """``a_at``: where row's elements 0 lie, if they have one chunk."""
    for at in range(begin, end, INS):
        inside = at + place < end
        x = tl.load(x_at + at + place[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
        if CHUNKS > 1:
            row_at = _found(pool_ptr, at_ptr, known, at, CHUNKS, CHUNK)
        else:
            row_at = a_at + at
        a = tl.load(row_at[:, None] + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee" if EXACT else "tf32")
    return sums


@triton.jit
def _keep(inner_ptr, sums, squares_ptr, row, rank, mine, there, rows, squares_row, pieces, ins, eps, split, part, most, PARTS: tl.constexpr,
          ROWS: tl.constexpr, NORMED: tl.constexpr):  # fmt: skip
    if NORMED:
        total = tl.zeros((ROWS,), dtype=tl.float32)
        for piece in range(pieces):
            total += tl.load(squares_ptr + piece * squares_row + row, mask=mine, other=0.0)
        sums *= tl.rsqrt(total / ins + eps)[:, None]
    out = inner_ptr + ((split.to(tl.int64) * rows + row[:, None]) * PARTS + part) * most + rank[None, :]
    tl.store(out, sums, mask=mine[:, None] & there[None, :])


@launchable(do_not_specialize=["rows", "pieces", "table_row", "squares_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _shrink_kernel(
    x_ptr, pool_ptr, a_ptr, inner_ptr, slots_ptr, ranks_ptr, squares_ptr, rows, x_row, table_row, squares_row, ins, most, pieces, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, INS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, NORMED: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, part, split = tl.program_id(0) // LANES, tl.program_id(1) % PARTS, tl.program_id(2)
    rank = tl.program_id(1) // PARTS * RANKS + tl.arange(0, RANKS)
    row, place, known = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, INS), rank < most
    share = tl.cdiv(tl.cdiv(ins, INS), SPLITS) * INS
    begin, end = split * share, tl.minimum(ins, (split + 1) * share)
    x_at = x_ptr + row[:, None].to(tl.int64) * x_row
    slot, lane, kinds = _kinds(slots_ptr, row, rows, ROWS)
    if LANES == ROWS:  # one adapter at most: what does not hang on the launch before comes ahead of it
        own = tl.max(tl.where(lane == tl.program_id(0) % LANES, slot, -1), 0)
        line = tl.maximum(own, 0).to(tl.int64) * table_row
        held = tl.where(own >= 0, tl.load(ranks_ptr + line + part), 0)
        mine, there, inside = (slot == own) & (own >= 0), rank < held, begin + place < end
        at_ptr = a_ptr + line + (part * most + rank) * CHUNKS
        first_at = _found(pool_ptr, at_ptr, known, begin, CHUNKS, CHUNK)
        a = tl.load(first_at[:, None] + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        if tl.program_id(1) // PARTS * RANKS < held:
            x = tl.load(x_at + begin + place[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(x, tl.trans(a), input_precision="ieee" if EXACT else "tf32")
            sums = _dots(sums, x_at, first_at - begin, pool_ptr, at_ptr, known, place, mine, there, begin + INS, end, INS, CHUNKS, CHUNK,
                         EXACT)  # fmt: skip
            _keep(
                inner_ptr, sums, squares_ptr, row, rank, mine, there, rows, squares_row, pieces, ins, eps, split, part, most,
                PARTS, ROWS, NORMED,
            )  # fmt: skip
    else:
        for kind in range(tl.program_id(0) % LANES, kinds, LANES):
            own = tl.max(tl.where(lane == kind, slot, -1), 0)
            line = own.to(tl.int64) * table_row
            held = tl.load(ranks_ptr + line + part)
            if tl.program_id(1) // PARTS * RANKS < held:
                mine, there = slot == own, rank < held
                at_ptr = a_ptr + line + (part * most + rank) * CHUNKS
                first_at = _found(pool_ptr, at_ptr, known, 0, CHUNKS, CHUNK)
                sums = _dots(tl.zeros((ROWS, RANKS), dtype=tl.float32), x_at, first_at, pool_ptr, at_ptr, known, place, mine, there,
                             begin, end, INS, CHUNKS, CHUNK, EXACT)  # fmt: skip
                _keep(
                    inner_ptr, sums, squares_ptr, row, rank, mine, there, rows, squares_row, pieces, ins, eps, split, part, most,
                    PARTS, ROWS, NORMED,
                )  # fmt: skip


@triton.jit
def _summed(inner_ptr, row, rank, mine, there, rows, part, most, PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
            SPLITS: tl.constexpr, FROM: tl.constexpr):  # fmt: skip
    """``FROM``: past which caches it is read."""
    inner = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = ((split * rows + row[:, None]).to(tl.int64) * PARTS + part) * most + rank[None, :]
        inner += tl.load(inner_ptr + at, mask=mine[:, None] & there[None, :], other=0.0, cache_modifier=FROM)
    return inner


@triton.jit
def _gained(y, floats_ptr, gain_ptr, column, inside, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, FLOATS: tl.constexpr):
    """``floats_ptr``: the pool, as float32, of which an address counts FLOATS. -1: y stays as it is."""
    at = tl.load(gain_ptr + column // CHUNK, mask=inside, other=-1).to(tl.int64) * FLOATS
    moved = tl.load(gain_ptr + CHUNKS + column // CHUNK, mask=inside, other=-1).to(tl.int64) * FLOATS
    gain = tl.load(floats_ptr + at + column % CHUNK, mask=at >= 0, other=1.0)
    return y * gain[None, :] + tl.load(floats_ptr + moved + column % CHUNK, mask=at >= 0, other=0.0)[None, :]


@launchable(do_not_specialize=["rows", "table_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _expand_kernel(
    y_ptr, inner_ptr, pool_ptr, b_ptr, slots_ptr, ranks_ptr, floats_ptr, gains_ptr, rows, y_row, table_row, most, scale, outs_0, outs_1,
    outs_2,
    PARTS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GAIN_CHUNKS: tl.constexpr, GAIN_CHUNK: tl.constexpr, FLOATS: tl.constexpr,
    GAINED: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0) // LANES, tl.program_id(1)
    part, first, last = 0, 0, outs_0
    if PARTS > 1:
        blocks = tl.cdiv(outs_0, OUTS)
        if block >= blocks:
            block, part, first, last = block - blocks, 1, outs_0, outs_0 + outs_1
            if PARTS > 2:
                blocks = tl.cdiv(outs_1, OUTS)
                if block >= blocks:
                    block, part, first, last = block - blocks, 2, outs_0 + outs_1, outs_0 + outs_1 + outs_2
    row, rank, place = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, OUTS)
    begin = block * OUTS
    inside = first + begin + place < last
    to = y_ptr + row[:, None].to(tl.int64) * y_row + (first + begin + place)[None, :]
    slot, lane, kinds = _kinds(slots_ptr, row, rows, ROWS)
    if LANES == ROWS:  # as above
        own = tl.max(tl.where(lane == tl.program_id(0) % LANES, slot, -1), 0)
        line = tl.maximum(own, 0).to(tl.int64) * table_row
        held = tl.where(own >= 0, tl.load(ranks_ptr + line + part), 0)
        mine, there = (slot == own) & (own >= 0), rank < held
        at_ptr = b_ptr + line + (part * most + rank) * CHUNKS
        b_at = _found(pool_ptr, at_ptr, rank < most, begin, CHUNKS, CHUNK)
        b = tl.load(b_at[:, None] + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        if held > 0:
            mask = mine[:, None] & inside[None, :]
            y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
            inner = _summed(inner_ptr, row, rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS, "")
            sums = tl.dot((inner * scale).to(b.dtype), b, input_precision="ieee" if EXACT else "tf32")
            for from_rank in range(RANKS, held, RANKS):
                there = from_rank + rank < held
                inner = _summed(
                    inner_ptr, row, from_rank + rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS, ""
                )
                b_at = _found(pool_ptr, at_ptr + from_rank * CHUNKS, there, begin, CHUNKS, CHUNK)
                b = tl.load(b_at[:, None] + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
                sums = tl.dot((inner * scale).to(b.dtype), b, sums, input_precision="ieee" if EXACT else "tf32")
            if GAINED:
                gain_ptr = gains_ptr + line + part * 2 * GAIN_CHUNKS
                y = _gained(y, floats_ptr, gain_ptr, begin + place, inside, GAIN_CHUNKS, GAIN_CHUNK, FLOATS)
            tl.store(to, (y + sums).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        for kind in range(tl.program_id(0) % LANES, kinds, LANES):
            own = tl.max(tl.where(lane == kind, slot, -1), 0)
            line = own.to(tl.int64) * table_row
            held = tl.load(ranks_ptr + line + part)
            if held > 0:
                mine = slot == own
                mask = mine[:, None] & inside[None, :]
                sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
                for from_rank in range(0, held, RANKS):
                    there = from_rank + rank < held
                    inner = _summed(
                        inner_ptr, row, from_rank + rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS, ""
                    )
                    at_ptr = b_ptr + line + (part * most + from_rank + rank) * CHUNKS
                    b_at = _found(pool_ptr, at_ptr, there, begin, CHUNKS, CHUNK)
                    b = tl.load(b_at[:, None] + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
                    sums = tl.dot((inner * scale).to(b.dtype), b, sums, input_precision="ieee" if EXACT else "tf32")
                y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
                if GAINED:
                    gain_ptr = gains_ptr + line + part * 2 * GAIN_CHUNKS
                    y = _gained(y, floats_ptr, gain_ptr, begin + place, inside, GAIN_CHUNKS, GAIN_CHUNK, FLOATS)
                tl.store(to, (y + sums).to(y_ptr.dtype.element_ty), mask=mask)


def create_add_deltas(site: CallSite[DeltaFacts]) -> Any:
    """As the twin says, in one rounding. No more than three parts."""
    if len(site.facts.parts) > MOST_PARTS:
        return Declined(f"{len(site.facts.parts)} parts, more than {MOST_PARTS}")
    return _adder(pdl=site.pdl, invariant=site.invariant)


def _adder(*, pdl: bool, invariant: bool) -> Callable[..., None]:
    def add(
        y: Tensor, x: Tensor, factors: SlotFactors, parts: Sequence[int], rows: AdapterRows, squares: Tensor | None = None, eps: float = 0.0
    ) -> None:  # fmt: skip
        """In place."""
        count, ins, most = len(y), x.shape[1], factors.a.shape[2]
        exact = y.dtype == torch.float32
        tall = count >= _LEAST_TALL and not invariant and not exact
        early = pdl and not tall
        splits = 1 if tall else min(_MOST_SPLITS, triton.cdiv(ins, _SHARE))
        inner = torch.empty((splits, count, len(parts), most), dtype=torch.float32, device=y.device)
        tile = _tile(tall)
        ranks_at_once = _ranks(most)
        x = x if x.stride(1) == 1 else x.contiguous()
        grid = (triton.cdiv(count, tile["ROWS"]) * tile["LANES"], len(parts) * triton.cdiv(most, ranks_at_once), splits)
        _shrink_kernel[grid](
            x, factors.pool, factors.a, inner, rows.slots, factors.ranks, inner if squares is None else squares, count, x.stride(0),
            factors.ranks.stride(0), 0 if squares is None else squares.stride(0), ins, most, 1 if squares is None else len(squares), eps,
            PARTS=len(parts), **tile, RANKS=ranks_at_once, INS=64 if exact else _WIDE, SPLITS=splits, **chunks(factors, factors.a),
            NORMED=squares is not None, EXACT=exact, PDL=early, num_warps=4, num_stages=3 if exact else 4, **dependent(early),
        )  # fmt: skip
        _expand(y, inner, factors, parts, rows, 1.0, tall=tall, pdl=early)

    return add


def look_up_deltas(y: Tensor, ids: Tensor, factors: SlotFactors, scale: float | None, rows: AdapterRows) -> None:
    """As the twin says. Rows without an adapter look at slot 0, and get nothing of it."""
    at = factors.a[rows.slots.clamp(min=0), 0].gather(
        2, (ids // factors.chunk)[:, None, None].expand(-1, factors.a.shape[2], 1)
    )
    places = at.squeeze(2).clamp(min=0).long() * factors.unit + (ids % factors.chunk)[:, None]
    inner = factors.pool[places].float().view(1, len(ids), 1, factors.a.shape[2])
    _expand(y, inner, factors, (y.shape[1],), rows, 1.0 if scale is None else scale, tall=False, pdl=False)


def _expand(
    y: Tensor, inner: Tensor, factors: SlotFactors, parts: Sequence[int], rows: AdapterRows, scale: float, *, tall: bool, pdl: bool
) -> None:  # fmt: skip
    """y += scale · Σ splits of ``inner`` [splits, T, parts, most] · b."""
    most = factors.b.shape[2]
    exact, ranks_at_once = y.dtype == torch.float32, _ranks(most)
    columns = _OUTS if tall or exact or ranks_at_once > 16 else 2 * _OUTS  # what registers hold
    tile, outs = _tile(tall), tuple(parts) + (0,) * (MOST_PARTS - len(parts))
    grid = (triton.cdiv(len(y), tile["ROWS"]) * tile["LANES"], sum(triton.cdiv(each, columns) for each in parts))
    _expand_kernel[grid](
        y, inner, factors.pool, factors.b, rows.slots, factors.ranks, factors.floats.pool if factors.gained else inner, factors.gains, len(y),
        y.stride(0), factors.ranks.stride(0), most, scale, *outs,
        PARTS=len(parts), **tile, RANKS=ranks_at_once, OUTS=columns, SPLITS=len(inner), **chunks(factors, factors.b), **gains(factors),
        EXACT=exact, PDL=pdl, num_warps=4, num_stages=2, **dependent(pdl),
    )  # fmt: skip


def chunks(factors: SlotFactors, addresses: Tensor) -> dict[str, int]:
    """Of rows in one chunk, whatever that is, there is one kernel."""
    count = addresses.shape[3]
    return {"CHUNKS": count, "CHUNK": factors.chunk if count > 1 else 0}


def gains(factors: SlotFactors) -> dict[str, int | bool]:
    floats = factors.floats
    if not factors.gained:
        return {"GAINED": False, "GAIN_CHUNKS": 1, "GAIN_CHUNK": 1, "FLOATS": floats.unit}
    return {"GAINED": True, "GAIN_CHUNKS": factors.gains.shape[3], "GAIN_CHUNK": floats.chunk, "FLOATS": floats.unit}


def _tile(tall: bool) -> dict[str, int]:
    return {"ROWS": _TALL, "LANES": 1} if tall else {"ROWS": _ROWS, "LANES": _ROWS}


def _ranks(most: int) -> int:
    """Ranks at once: of a matrix instruction at least."""
    found: int = min(64, max(16, triton.next_power_of_2(most)))
    return found
