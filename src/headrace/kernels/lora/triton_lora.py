# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""What adapters add to a product and to an embedding: down to their ranks, and up again.

What lives here: these kernels. What may not: which slot holds which adapter (lora/), products of the model's own
weights.

Which row has which slot is read on the device, so a graph holds for any mixture; nobody sorts rows. A tile of rows has
a lane for each adapter that may be in it:

    slots of a tile    2  2  -  0  2  0  -  5        rows without an adapter are in no lane
    first of a kind    2        0           5
    lane               0        1           2        lane 3 and those behind it have nothing to do

Slots, ranks and factors may be read before the launch before has ended: what writes them is never launched early.

For few rows both ways are one launch (``_few_kernel``): the programs that share a lane's inputs leave their sums and a
ticket, wait for each other, and share its outputs. They are neighbours in the order in which programs begin, so none
waits for one that cannot begin. Where that order is not given, or rows are many, it takes two launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.gpu import can_chain
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


@triton.jit
def _summed(inner_ptr, row, rank, mine, there, rows, part, most, PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
            SPLITS: tl.constexpr):  # fmt: skip
    inner = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = ((split * rows + row[:, None]).to(tl.int64) * PARTS + part) * most + rank[None, :]
        inner += tl.load(inner_ptr + at, mask=mine[:, None] & there[None, :], other=0.0, cache_modifier=".cg")
    return inner


@triton.jit
def _gained(y, gains_ptr, own, out, outs, inside):
    gain = gains_ptr + own.to(tl.int64) * 2 * outs + out
    return y * tl.load(gain, mask=inside, other=1.0)[None, :] + tl.load(gain + outs, mask=inside, other=0.0)[None, :]


@launchable(do_not_specialize=["rows", "pieces", "ranks_row", "squares_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _few_kernel(
    y_ptr, x_ptr, a_ptr, b_ptr, inner_ptr, ticket_ptr, slots_ptr, ranks_ptr, gains_ptr, squares_ptr, rows, x_row, y_row, ranks_row,
    squares_row, ins, most, pieces, eps, scale, outs, outs_0, outs_1, outs_2,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr, SPLITS: tl.constexpr,
    SHRINKS: tl.constexpr, EXPANDS: tl.constexpr, NORMED: tl.constexpr, GAINED: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one adapter of one tile at most: what does not hang on the launch before comes ahead of it."""
    share, part = tl.program_id(0), tl.program_id(2)
    row, rank = tl.program_id(1) // ROWS * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS)
    first, width = 0, outs_0
    if part == 1:
        first, width = outs_0, outs_1
    if part == 2:
        first, width = outs_0 + outs_1, outs_2
    slot, lane, _ = _kinds(slots_ptr, row, rows, ROWS)
    found = tl.max(tl.where(lane == tl.program_id(1) % ROWS, slot, -1), 0)
    own, mine = tl.maximum(found, 0).to(tl.int64), (slot == found) & (found >= 0)
    held = tl.where(found >= 0, tl.load(ranks_ptr + own * ranks_row + part), 0)
    there = rank < held
    if SHRINKS:
        place, span = tl.arange(0, INS), tl.cdiv(tl.cdiv(ins, INS), SPLITS) * INS
        begin, end = share * span, tl.minimum(ins, (share + 1) * span)
        x_at = x_ptr + row[:, None].to(tl.int64) * x_row
        a_at = a_ptr + (own * PARTS + part) * most * ins + rank[:, None].to(tl.int64) * ins
        inside = begin + place < end
        a = tl.load(a_at + begin + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    if EXPANDS:
        column, step = share * OUTS + tl.arange(0, OUTS), tl.num_programs(0) * OUTS
        b_at = b_ptr + (own * most + rank[:, None]) * outs + first
        b = tl.load(b_at + column[None, :], mask=there[:, None] & (column < width)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if held > 0:
        if SHRINKS:
            x = tl.load(x_at + begin + place[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(x, tl.trans(a), input_precision="ieee" if EXACT else "tf32")
            sums = _dots(sums, x_at, a_at, place, mine, there, begin + INS, end, INS, EXACT)
            _keep(inner_ptr, sums, squares_ptr, row, rank, mine, there, rows, squares_row, pieces, ins, eps, share, part, most, PARTS, ROWS,
                  NORMED)  # fmt: skip
            for low in range(RANKS, held, RANKS):
                more = low + rank < held
                sums = tl.zeros((ROWS, RANKS), dtype=tl.float32)
                sums = _dots(sums, x_at, a_at + low * ins, place, mine, more, begin, end, INS, EXACT)
                _keep(inner_ptr, sums, squares_ptr, row, low + rank, mine, more, rows, squares_row, pieces, ins, eps, share, part, most,
                      PARTS, ROWS, NORMED)  # fmt: skip
        if SHRINKS and EXPANDS:
            _meet(ticket_ptr + tl.program_id(1) * PARTS + part, SPLITS)
        if EXPANDS:
            inner = _summed(inner_ptr, row, rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS)
            inner = (inner * scale).to(b.dtype)
            for at in tl.range(share * OUTS, width, step, num_stages=1):
                out = at + tl.arange(0, OUTS)
                covered = out < width
                to = y_ptr + row[:, None].to(tl.int64) * y_row + first + out[None, :]
                y = tl.load(to, mask=mine[:, None] & covered[None, :], other=0.0).to(tl.float32)
                added = tl.dot(inner, b, input_precision="ieee" if EXACT else "tf32")
                for low in range(RANKS, held, RANKS):
                    more = low + rank < held
                    rest = _summed(inner_ptr, row, low + rank, mine, more, rows, part, most, PARTS, ROWS, RANKS, SPLITS)
                    b = tl.load(b_at + low * outs + out[None, :], mask=more[:, None] & covered[None, :], other=0.0)
                    added = tl.dot((rest * scale).to(b.dtype), b, added, input_precision="ieee" if EXACT else "tf32")
                if GAINED:
                    y = _gained(y, gains_ptr, own, first + out, outs, covered)
                b = tl.load(
                    b_at + (out + step)[None, :], mask=there[:, None] & (out + step < width)[None, :], other=0.0
                )
                tl.store(to, (y + added).to(y_ptr.dtype.element_ty), mask=mine[:, None] & covered[None, :])


@triton.jit
def _meet(ticket_ptr, SPLITS: tl.constexpr):
    """Waits until so many programs have come here, of this launch. The count goes on from launch to launch, round and
    round; ``SPLITS`` is a power of two."""
    if SPLITS > 1:
        tl.debug_barrier()  # what all threads have stored before the ticket of one
        now = tl.atomic_add(ticket_ptr, 1, sem="acq_rel")
        last = (now & -SPLITS) + SPLITS
        now += 1
        while now - last < 0:
            now = tl.atomic_add(ticket_ptr, 0, sem="acquire")
    tl.debug_barrier()


@launchable(do_not_specialize=["rows", "pieces", "ranks_row", "squares_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _shrink_kernel(
    x_ptr, a_ptr, inner_ptr, slots_ptr, ranks_ptr, squares_ptr, rows, x_row, ranks_row, squares_row, ins, most, pieces, eps,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, INS: tl.constexpr, NORMED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    part, rank = tl.program_id(1) % PARTS, tl.program_id(1) // PARTS * RANKS + tl.arange(0, RANKS)
    row, place = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, INS)
    x_at = x_ptr + row[:, None].to(tl.int64) * x_row
    slot, lane, kinds = _kinds(slots_ptr, row, rows, ROWS)
    for kind in range(kinds):
        own = tl.max(tl.where(lane == kind, slot, -1), 0)
        held = tl.load(ranks_ptr + own * ranks_row + part)
        if tl.program_id(1) // PARTS * RANKS < held:
            mine, there = slot == own, rank < held
            a_at = a_ptr + (own.to(tl.int64) * PARTS + part) * most * ins + rank[:, None].to(tl.int64) * ins
            sums = tl.zeros((ROWS, RANKS), dtype=tl.float32)
            sums = _dots(sums, x_at, a_at, place, mine, there, 0, ins, INS, EXACT)
            _keep(inner_ptr, sums, squares_ptr, row, rank, mine, there, rows, squares_row, pieces, ins, eps, tl.program_id(2), part, most, PARTS,
                  ROWS, NORMED)  # fmt: skip


@launchable(do_not_specialize=["rows", "ranks_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _expand_kernel(
    y_ptr, inner_ptr, b_ptr, slots_ptr, ranks_ptr, gains_ptr, rows, y_row, ranks_row, most, outs, outs_0, outs_1, outs_2,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr, GAINED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    block, part, first, last = tl.program_id(1), 0, 0, outs_0
    if PARTS > 1:
        blocks = tl.cdiv(outs_0, OUTS)
        if block >= blocks:
            block, part, first, last = block - blocks, 1, outs_0, outs_0 + outs_1
            if PARTS > 2:
                blocks = tl.cdiv(outs_1, OUTS)
                if block >= blocks:
                    block, part, first, last = block - blocks, 2, outs_0 + outs_1, outs_0 + outs_1 + outs_2
    row, rank = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS)
    out = first + block * OUTS + tl.arange(0, OUTS)
    inside = out < last
    to = y_ptr + row[:, None].to(tl.int64) * y_row + out[None, :]
    slot, lane, kinds = _kinds(slots_ptr, row, rows, ROWS)
    for kind in range(kinds):
        own = tl.max(tl.where(lane == kind, slot, -1), 0)
        held = tl.load(ranks_ptr + own * ranks_row + part)
        if held > 0:
            mine = slot == own
            mask = mine[:, None] & inside[None, :]
            sums = tl.zeros((ROWS, OUTS), dtype=tl.float32)
            for begin in range(0, held, RANKS):
                there = begin + rank < held
                inner = _summed(inner_ptr, row, begin + rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, 1)
                at = (own.to(tl.int64) * most + begin + rank[:, None]) * outs + out[None, :]
                b = tl.load(b_ptr + at, mask=there[:, None] & inside[None, :], other=0.0)
                sums = tl.dot(inner.to(b.dtype), b, sums, input_precision="ieee" if EXACT else "tf32")
            y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
            if GAINED:
                y = _gained(y, gains_ptr, own, out, outs, inside)
            tl.store(to, (y + sums).to(y_ptr.dtype.element_ty), mask=mask)


def create_add_deltas(site: CallSite[DeltaFacts]) -> Any:
    """As the twin says, in one rounding. No more than three parts."""
    facts = site.facts
    if len(facts.parts) > MOST_PARTS:
        return Declined(f"{len(facts.parts)} parts, more than {MOST_PARTS}")
    tickets = site.zeros(_LEAST_TALL * len(facts.parts), dtype=torch.int32)
    return _adder(
        programmatic=can_chain(site), invariant=site.batch_invariant, tickets=tickets if can_chain(site) else None
    )


def _adder(*, programmatic: bool, invariant: bool, tickets: Tensor | None = None) -> Callable[..., None]:
    """``tickets`` [lanes and parts], int32: where the programs of one launch meet; None: they do not."""

    def add(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: AdapterRows,
        gains: Tensor | None = None, squares: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """In place."""
        exact, x = y.dtype == torch.float32, x if x.stride(1) == 1 else x.contiguous()
        if len(y) >= _LEAST_TALL and not invariant and not exact:
            return _add_many(y, x, a, b, ranks, parts, rows, gains, squares, eps)
        splits = min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(a.shape[3], _SHARE)))
        inner = torch.empty((splits, len(y), len(parts), a.shape[2]), dtype=torch.float32, device=y.device)
        few = _Few(y, x, a, b, inner, ranks, parts, rows, gains, squares, eps, 1.0, programmatic)
        if tickets is not None and len(y) < _LEAST_TALL:
            return few.launch(splits, tickets=tickets)
        few.launch(splits, expands=False)
        return few.launch(few.blocks, shrinks=False)

    return add


class _Few(NamedTuple):
    """What ``_few_kernel`` is told. y += scale · Σ splits of ``inner`` [splits, T, parts, most] · b."""

    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    inner: Tensor
    ranks: Tensor
    parts: Sequence[int]
    rows: AdapterRows
    gains: Tensor | None
    squares: Tensor | None
    eps: float
    scale: float
    programmatic: bool

    @property
    def columns(self) -> int:
        """Outputs at once: what registers hold."""
        return max(32, _OUTS * 16 // _ranks(self.b.shape[1]))

    @property
    def blocks(self) -> int:
        found: int = triton.cdiv(max(self.parts), self.columns)
        return found

    def launch(
        self, programs: int, *, shrinks: bool = True, expands: bool = True, tickets: Tensor | None = None
    ) -> None:
        """``programs``: of a lane and part."""
        y, x, inner, squares, pdl = self.y, self.x, self.inner, self.squares, self.programmatic
        exact, count = y.dtype == torch.float32, len(self.parts)
        _few_kernel[programs, triton.cdiv(len(y), _ROWS) * _ROWS, count](
            y, x, self.a, self.b, inner, inner if tickets is None else tickets, self.rows.slots, self.ranks,
            inner if self.gains is None else self.gains, inner if squares is None else squares, len(y), x.stride(0), y.stride(0),
            self.ranks.stride(0), 0 if squares is None else squares.stride(0), self.a.shape[-1], inner.shape[3],
            1 if squares is None else len(squares), self.eps, self.scale, self.b.shape[2], *self.parts, *(0,) * (MOST_PARTS - count),
            PARTS=count, ROWS=_ROWS, RANKS=_ranks(inner.shape[3]), INS=64 if exact else _WIDE, OUTS=self.columns, SPLITS=len(inner),
            SHRINKS=shrinks, EXPANDS=expands, NORMED=squares is not None, GAINED=self.gains is not None, EXACT=exact, PDL=pdl,
            num_warps=4, num_stages=3 if exact else 4, **dependent(pdl),
        )  # fmt: skip


def _add_many(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: AdapterRows, gains: Tensor | None,
    squares: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """Tall tiles, whose programs go through the adapters that are in them."""
    count, tiles, most, exact = len(parts), triton.cdiv(len(y), _TALL), a.shape[2], y.dtype == torch.float32
    inner = torch.empty((1, len(y), count, most), dtype=torch.float32, device=y.device)
    shape: dict[str, Any] = {"PARTS": count, "ROWS": _TALL, "RANKS": _ranks(most), "EXACT": exact, "num_warps": 4}
    _shrink_kernel[tiles, count * triton.cdiv(most, _ranks(most))](
        x, a, inner, rows.slots, ranks, inner if squares is None else squares, len(y), x.stride(0), ranks.stride(0),
        0 if squares is None else squares.stride(0), a.shape[3], most, 1 if squares is None else len(squares), eps,
        **shape, INS=_WIDE, NORMED=squares is not None, num_stages=4,
    )  # fmt: skip
    _expand_kernel[tiles, sum(triton.cdiv(each, _OUTS) for each in parts)](
        y, inner, b, rows.slots, ranks, inner if gains is None else gains, len(y), y.stride(0), ranks.stride(0), most, b.shape[2],
        *parts, *(0,) * (MOST_PARTS - count), **shape, OUTS=_OUTS, GAINED=gains is not None, num_stages=2,
    )  # fmt: skip


def look_up_deltas(
    y: Tensor, ids: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scale: float | None, rows: AdapterRows
) -> None:
    """As the twin says. Rows without an adapter look at slot 0, and get nothing of it."""
    inner = a[rows.slots.clamp(min=0), ids].float().view(1, len(ids), 1, a.shape[2])
    few = _Few(y, y, a, b, inner, ranks, (y.shape[1],), rows, None, None, 0.0, 1.0 if scale is None else scale, False)
    few.launch(few.blocks, shrinks=False)


def _ranks(most: int) -> int:
    """Ranks at once: of a matrix instruction at least."""
    found: int = min(64, max(16, triton.next_power_of_2(most)))
    return found
