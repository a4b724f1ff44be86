# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""What adapters add to a product and to an embedding, in two launches: down to their ranks, and up again.

What lives here: these kernels. What may not: which slot holds which adapter (lora/), products of the model's own
weights.

Which row has which slot is read on the device, so a graph holds for any mixture; nobody sorts rows. A tile of rows has
a lane for each adapter that may be in it:

    slots of a tile    2  2  -  0  2  0  -  5        rows without an adapter are in no lane
    first of a kind    2        0           5
    lane               0        1           2        lane 3 and those behind it have nothing to do

Slots, ranks and factors may be read before the launch before has ended: what writes them is never launched early.
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
from headrace.kernels.inputs import AdapterRows

MOST_PARTS = 3
_ROWS = 16  # of a tile: of a matrix instruction
_TALL = 64  # of a tile of steps with many rows, whose neighbours mostly are of one sequence
_LEAST_TALL = 512
_WIDE = 128  # inputs at once
_SHARE = 1024  # inputs of a program, where rows are few
_MOST_SPLITS = 8
_OUTS = 128  # outputs of a program
_ANYWHERE = ("slots_ptr", "ranks_ptr")  # single numbers are read there


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
def _dots(sums, x_at, a_at, place, mine, there, begin, end, INS: tl.constexpr, EXACT: tl.constexpr):
    for at in range(begin, end, INS):
        inside = at + place < end
        x = tl.load(x_at + at + place[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_at + at + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
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


@launchable(do_not_specialize=["rows", "pieces", "ranks_row", "squares_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _shrink_kernel(
    x_ptr, a_ptr, inner_ptr, slots_ptr, ranks_ptr, squares_ptr, rows, x_row, ranks_row, squares_row, ins, most, pieces, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, INS: tl.constexpr, SPLITS: tl.constexpr,
    NORMED: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, part, split = tl.program_id(0) // LANES, tl.program_id(1) % PARTS, tl.program_id(2)
    rank = tl.program_id(1) // PARTS * RANKS + tl.arange(0, RANKS)
    row, place = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, INS)
    share = tl.cdiv(tl.cdiv(ins, INS), SPLITS) * INS
    begin, end = split * share, tl.minimum(ins, (split + 1) * share)
    x_at = x_ptr + row[:, None].to(tl.int64) * x_row
    slot, lane, kinds = _kinds(slots_ptr, row, rows, ROWS)
    if LANES == ROWS:  # one adapter at most: what does not hang on the launch before comes ahead of it
        own = tl.max(tl.where(lane == tl.program_id(0) % LANES, slot, -1), 0)
        held = tl.where(own >= 0, tl.load(ranks_ptr + tl.maximum(own, 0) * ranks_row + part), 0)
        mine, there, inside = (slot == own) & (own >= 0), rank < held, begin + place < end
        a_at = a_ptr + (tl.maximum(own, 0).to(tl.int64) * PARTS + part) * most * ins + rank[:, None].to(tl.int64) * ins
        a = tl.load(a_at + begin + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        if tl.program_id(1) // PARTS * RANKS < held:
            x = tl.load(x_at + begin + place[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(x, tl.trans(a), input_precision="ieee" if EXACT else "tf32")
            sums = _dots(sums, x_at, a_at, place, mine, there, begin + INS, end, INS, EXACT)
            _keep(
                inner_ptr,
                sums,
                squares_ptr,
                row,
                rank,
                mine,
                there,
                rows,
                squares_row,
                pieces,
                ins,
                eps,
                split,
                part,
                most,
                PARTS,
                ROWS,
                NORMED,
            )
    else:
        for kind in range(tl.program_id(0) % LANES, kinds, LANES):
            own = tl.max(tl.where(lane == kind, slot, -1), 0)
            held = tl.load(ranks_ptr + own * ranks_row + part)
            if tl.program_id(1) // PARTS * RANKS < held:
                mine, there = slot == own, rank < held
                a_at = a_ptr + (own.to(tl.int64) * PARTS + part) * most * ins + rank[:, None].to(tl.int64) * ins
                sums = _dots(
                    tl.zeros((ROWS, RANKS), dtype=tl.float32), x_at, a_at, place, mine, there, begin, end, INS, EXACT
                )
                _keep(
                    inner_ptr, sums, squares_ptr, row, rank, mine, there, rows, squares_row, pieces, ins, eps, split, part, most,
                    PARTS, ROWS, NORMED,
                )  # fmt: skip


@triton.jit
def _summed(
    inner_ptr,
    row,
    rank,
    mine,
    there,
    rows,
    part,
    most,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    inner = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = ((split * rows + row[:, None]).to(tl.int64) * PARTS + part) * most + rank[None, :]
        inner += tl.load(inner_ptr + at, mask=mine[:, None] & there[None, :], other=0.0)
    return inner


@triton.jit
def _gained(y, gains_ptr, own, out, outs, inside):
    gain = gains_ptr + own.to(tl.int64) * 2 * outs + out
    return y * tl.load(gain, mask=inside, other=1.0)[None, :] + tl.load(gain + outs, mask=inside, other=0.0)[None, :]


@launchable(do_not_specialize=["rows", "ranks_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _expand_kernel(
    y_ptr, inner_ptr, b_ptr, slots_ptr, ranks_ptr, gains_ptr, rows, y_row, ranks_row, most, scale, outs, outs_0, outs_1, outs_2,
    PARTS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr, SPLITS: tl.constexpr,
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
    row, rank = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS)
    out = first + block * OUTS + tl.arange(0, OUTS)
    inside = out < last
    to = y_ptr + row[:, None].to(tl.int64) * y_row + out[None, :]
    slot, lane, kinds = _kinds(slots_ptr, row, rows, ROWS)
    if LANES == ROWS:  # as above
        own = tl.max(tl.where(lane == tl.program_id(0) % LANES, slot, -1), 0)
        held = tl.where(own >= 0, tl.load(ranks_ptr + tl.maximum(own, 0) * ranks_row + part), 0)
        mine, there = (slot == own) & (own >= 0), rank < held
        b_at = b_ptr + (tl.maximum(own, 0).to(tl.int64) * most + rank[:, None]) * outs + out[None, :]
        b = tl.load(b_at, mask=there[:, None] & inside[None, :], other=0.0)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        if held > 0:
            mask = mine[:, None] & inside[None, :]
            y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
            inner = _summed(inner_ptr, row, rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS)
            sums = tl.dot((inner * scale).to(b.dtype), b, input_precision="ieee" if EXACT else "tf32")
            for begin in range(RANKS, held, RANKS):
                there = begin + rank < held
                inner = _summed(inner_ptr, row, begin + rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS)
                b = tl.load(b_at + begin * outs, mask=there[:, None] & inside[None, :], other=0.0)
                sums = tl.dot((inner * scale).to(b.dtype), b, sums, input_precision="ieee" if EXACT else "tf32")
            if GAINED:
                y = _gained(y, gains_ptr, own, out, outs, inside)
            tl.store(to, (y + sums).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        for kind in range(tl.program_id(0) % LANES, kinds, LANES):
            own = tl.max(tl.where(lane == kind, slot, -1), 0)
            held = tl.load(ranks_ptr + own * ranks_row + part)
            if held > 0:
                mine = slot == own
                mask = mine[:, None] & inside[None, :]
                sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
                for begin in range(0, held, RANKS):
                    there = begin + rank < held
                    inner = _summed(
                        inner_ptr, row, begin + rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS
                    )
                    at = (own.to(tl.int64) * most + begin + rank[:, None]) * outs + out[None, :]
                    b = tl.load(b_ptr + at, mask=there[:, None] & inside[None, :], other=0.0)
                    sums = tl.dot((inner * scale).to(b.dtype), b, sums, input_precision="ieee" if EXACT else "tf32")
                y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
                if GAINED:
                    y = _gained(y, gains_ptr, own, out, outs, inside)
                tl.store(to, (y + sums).to(y_ptr.dtype.element_ty), mask=mask)


def create_add_deltas(site: CallSite[DeltaFacts]) -> Any:
    """As the twin says, in one rounding. No more than three parts."""
    if len(site.facts.parts) > MOST_PARTS:
        return Declined(f"{len(site.facts.parts)} parts, more than {MOST_PARTS}")
    return _adder(pdl=site.pdl, invariant=site.invariant)


def _adder(*, pdl: bool, invariant: bool) -> Callable[..., None]:
    def add(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: AdapterRows,
        gains: Tensor | None = None, squares: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """In place."""
        count, ins, most = len(y), a.shape[3], a.shape[2]
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
            x, a, inner, rows.slots, ranks, inner if squares is None else squares, count, x.stride(0), ranks.stride(0),
            0 if squares is None else squares.stride(0), ins, most, 1 if squares is None else len(squares), eps,
            PARTS=len(parts), **tile, RANKS=ranks_at_once, INS=64 if exact else _WIDE, SPLITS=splits,
            NORMED=squares is not None, EXACT=exact, PDL=early, num_warps=4, num_stages=3 if exact else 4, **dependent(early),
        )  # fmt: skip
        _expand(y, inner, b, ranks, parts, rows, gains, 1.0, tall=tall, pdl=early)

    return add


def look_up_deltas(
    y: Tensor, ids: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scale: float | None, rows: AdapterRows
) -> None:
    """As the twin says. Rows without an adapter look at slot 0, and get nothing of it."""
    inner = a[rows.slots.clamp(min=0), ids].float().view(1, len(ids), 1, a.shape[2])
    _expand(y, inner, b, ranks, (y.shape[1],), rows, None, 1.0 if scale is None else scale, tall=False, pdl=False)


def _expand(
    y: Tensor, inner: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: AdapterRows, gains: Tensor | None, scale: float, *,
    tall: bool, pdl: bool,
) -> None:  # fmt: skip
    """y += scale · Σ splits of ``inner`` [splits, T, parts, most] · b."""
    exact, ranks_at_once = y.dtype == torch.float32, _ranks(b.shape[1])
    columns = _OUTS if tall or exact or ranks_at_once > 16 else 2 * _OUTS  # what registers hold
    tile, outs = _tile(tall), tuple(parts) + (0,) * (MOST_PARTS - len(parts))
    grid = (triton.cdiv(len(y), tile["ROWS"]) * tile["LANES"], sum(triton.cdiv(each, columns) for each in parts))
    _expand_kernel[grid](
        y, inner, b, rows.slots, ranks, inner if gains is None else gains, len(y), y.stride(0), ranks.stride(0), b.shape[1], scale, b.shape[2], *outs,
        PARTS=len(parts), **tile, RANKS=ranks_at_once, OUTS=columns, SPLITS=len(inner), GAINED=gains is not None, EXACT=exact, PDL=pdl,
        num_warps=4, num_stages=2, **dependent(pdl),
    )  # fmt: skip


def _tile(tall: bool) -> dict[str, int]:
    return {"ROWS": _TALL, "LANES": 1} if tall else {"ROWS": _ROWS, "LANES": _ROWS}


def _ranks(most: int) -> int:
    """Ranks at once: of a matrix instruction at least."""
    found: int = min(64, max(16, triton.next_power_of_2(most)))
    return found
