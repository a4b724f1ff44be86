# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""What adapters add to few rows, in one launch.

What lives here: that kernel. What may not: many rows, embeddings, who is in which lane (triton_lora.py).

The CTAs that share a lane's inputs leave their sums and a ticket, wait for each other, and share its outputs. They are
neighbours in the order in which CTAs begin, so none waits for one that cannot begin. (An interpreter runs them one
after another: there, only lanes of one CTA can be computed.)
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
from headrace.kernels.lora import triton_lora
from headrace.kernels.lora.triton_lora import MOST_PARTS, _dots, _found, _gained, _keep, _kinds, _summed, chunks, gains

_ROWS = 16  # of a tile, and its lanes
_FEW = 512  # rows, below which they are few
_RANKS = 16
_OUTS = 256  # outputs at once
_SHARE = 1024  # inputs of a CTA
_MOST_SPLITS = 8
_ANYWHERE = ("slots_ptr", "ranks_ptr", "a_ptr", "b_ptr", "gains_ptr")  # single numbers are read there


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


@launchable(do_not_specialize=["rows", "pieces", "table_row", "squares_row"], do_not_specialize_on_alignment=_ANYWHERE)
def _joint_kernel(
    y_ptr, x_ptr, pool_ptr, a_ptr, b_ptr, inner_ptr, ticket_ptr, slots_ptr, ranks_ptr, floats_ptr, gains_ptr, squares_ptr, rows, x_row,
    y_row, table_row, squares_row, ins, most, pieces, eps, outs_0, outs_1, outs_2,
    PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr, SPLITS: tl.constexpr,
    A_CHUNKS: tl.constexpr, A_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GAIN_CHUNKS: tl.constexpr,
    GAIN_CHUNK: tl.constexpr, FLOATS: tl.constexpr, NORMED: tl.constexpr, GAINED: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
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
    line, mine = tl.maximum(found, 0).to(tl.int64) * table_row, (slot == found) & (found >= 0)
    held = tl.where(found >= 0, tl.load(ranks_ptr + line + part), 0)
    there, known = rank < held, rank < most
    place, span = tl.arange(0, INS), tl.cdiv(tl.cdiv(ins, INS), SPLITS) * INS
    begin, end = share * span, tl.minimum(ins, (share + 1) * span)
    x_at = x_ptr + row[:, None].to(tl.int64) * x_row
    at_ptr, b_at_ptr = a_ptr + line + (part * most + rank) * A_CHUNKS, b_ptr + line + (part * most + rank) * CHUNKS
    first_at = _found(pool_ptr, at_ptr, known, begin, A_CHUNKS, A_CHUNK)
    inside = begin + place < end
    a = tl.load(first_at[:, None] + place[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    column, from_out, step = tl.arange(0, OUTS), share * OUTS, tl.num_programs(0) * OUTS
    b_at = _found(pool_ptr, b_at_ptr, known & (from_out < width), from_out, CHUNKS, CHUNK)
    b = tl.load(b_at[:, None] + column[None, :], mask=there[:, None] & (from_out + column < width)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if held > 0:
        x = tl.load(x_at + begin + place[None, :], mask=mine[:, None] & inside[None, :], other=0.0)
        sums = tl.dot(x, tl.trans(a), input_precision="ieee" if EXACT else "tf32")
        sums = _dots(sums, x_at, first_at - begin, pool_ptr, at_ptr, known, place, mine, there, begin + INS, end, INS, A_CHUNKS, A_CHUNK,
                     EXACT)  # fmt: skip
        _keep(inner_ptr, sums, squares_ptr, row, rank, mine, there, rows, squares_row, pieces, ins, eps, share, part, most, PARTS, ROWS,
              NORMED)  # fmt: skip
        _meet(ticket_ptr + tl.program_id(1) * PARTS + part, SPLITS)
        inner = _summed(inner_ptr, row, rank, mine, there, rows, part, most, PARTS, ROWS, RANKS, SPLITS, ".cg")
        inner = inner.to(b.dtype)
        for at in tl.range(from_out, width, step, num_stages=1):
            out = at + column
            covered = out < width
            to = y_ptr + row[:, None].to(tl.int64) * y_row + first + out[None, :]
            y = tl.load(to, mask=mine[:, None] & covered[None, :], other=0.0).to(tl.float32)
            added = tl.dot(inner, b, input_precision="ieee" if EXACT else "tf32")
            if GAINED:
                gain_ptr = gains_ptr + line + part * 2 * GAIN_CHUNKS
                y = _gained(y, floats_ptr, gain_ptr, out, covered, GAIN_CHUNKS, GAIN_CHUNK, FLOATS)
            if CHUNKS > 1:
                b_at = _found(pool_ptr, b_at_ptr, known & (at + step < width), at + step, CHUNKS, CHUNK)
            else:
                b_at += step
            b = tl.load(b_at[:, None] + column[None, :], mask=there[:, None] & (out + step < width)[None, :], other=0.0)
            tl.store(to, (y + added).to(y_ptr.dtype.element_ty), mask=mine[:, None] & covered[None, :])


def create_joint_deltas(site: CallSite[DeltaFacts]) -> Any:
    """As the twin says; many rows take the two launches of ``triton_lora``."""
    rest = triton_lora.create_add_deltas(site)
    if isinstance(rest, Declined) or not site.pdl or site.facts.dtype == torch.float32:
        return Declined("more than three parts, float32, or kernels may not begin before others have ended")
    if site.facts.rank > _RANKS:
        return Declined(f"ranks up to {site.facts.rank}; one launch holds up to {_RANKS} in registers")
    return _joint(site.zeros(_FEW * len(site.facts.parts), dtype=torch.int32), rest, pdl=True)


def _joint(tickets: Tensor, rest: Callable[..., None], *, pdl: bool) -> Callable[..., None]:
    """``tickets`` [lanes and parts], int32: where CTAs meet."""

    def add(
        y: Tensor, x: Tensor, factors: SlotFactors, parts: Sequence[int], rows: AdapterRows, squares: Tensor | None = None, eps: float = 0.0
    ) -> None:  # fmt: skip
        """In place."""
        if len(y) >= _FEW:
            return rest(y, x, factors, parts, rows, squares, eps)
        count, ins, most, x = len(parts), x.shape[1], factors.a.shape[2], x if x.stride(1) == 1 else x.contiguous()
        splits = min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(ins, _SHARE)))
        inner = torch.empty((splits, len(y), count, most), dtype=torch.float32, device=y.device)
        of_a = {f"A_{name}": value for name, value in chunks(factors, factors.a).items()}
        _joint_kernel[splits, triton.cdiv(len(y), _ROWS) * _ROWS, count](
            y, x, factors.pool, factors.a, factors.b, inner, tickets, rows.slots, factors.ranks, factors.floats.pool if factors.gained else inner,
            factors.gains, inner if squares is None else squares, len(y), x.stride(0), y.stride(0), factors.ranks.stride(0),
            0 if squares is None else squares.stride(0), ins, most, 1 if squares is None else len(squares), eps, *parts,
            *(0,) * (MOST_PARTS - count),
            PARTS=count, ROWS=_ROWS, RANKS=_RANKS, INS=128, OUTS=_OUTS, SPLITS=splits, **of_a, **chunks(factors, factors.b), **gains(factors),
            NORMED=squares is not None, EXACT=y.dtype == torch.float32, PDL=pdl,
            num_warps=4, num_stages=4, **dependent(pdl),
        )  # fmt: skip
        return None

    return add
