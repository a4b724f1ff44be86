# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Cascade attention: keys that many sequences share are read once for as many as one matrix instruction takes.

What lives here: the first half of the decode kernel, over shared keys, and the last, which adds both halves up. What
may not: finding who shares (triton_sharing.py), keys of one sequence (triton_decode.py).

    line of tiles      | chunk 0                   | chunk 1 …     Rows of a tile are (sequence of the chunk, head of
    the group) pairs. The
    KV head            | 0       | 1       | 2     | 0       | 1   line is cut into equal spans, one a program, as
    triton_decode.py cuts its own
    tile               | . . . . | . . . . | . . . | . . . . | .   afterwards: every program does its share of both.
    What it found for one
    program            | 0     | 1     | 2     | 3     | 4     |   pair of chunk and KV head is a part, in place pair +
    program: both grow
                                                                   along the line, so no two parts have the same place.

Each (sequence, KV head) that shares has a ticket: one arrival for each part of its chunk, one for its own keys; the
last to arrive adds up. After Hydragen (Juravsky et al. 2024) and FlashInfer's cascade attention (Ye et al. 2024), in
one launch whatever the groups are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.triton_codes import of_head
from headrace.kernels.attention.triton_plan import FIELDS, SHARED_BEGIN, SHARED_CHUNK, SHARED_END, SHARED_SPAN
from headrace.kernels.attention.triton_prefill import accumulate, nothing, padded
from headrace.kernels.attention.triton_sharing import AHEAD, COUNT, FIRST, ORDER, PAIRS, QUERY, ROWS, TOKENS


@triton.jit
def settle(
    chunk, slot, head, arrives, out, common, rest, ticket_ptr, shared_ptr, span, shared_row,
    SPAN: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One more part is there of (chunk, slot, head) [L], where it ``arrives`` [L]; what is complete now is added up. So
    many PARTS are asked for together: one behind the other, each waits for its own read of the second-level cache."""
    GROUP: tl.constexpr = SPAN.GROUP
    KV_HEADS: tl.constexpr = SPAN.KV_HEADS
    ROWS: tl.constexpr = SPAN.COMMON_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    tokens = tl.load(shared_ptr + TOKENS * shared_row + chunk, mask=arrives, other=BLOCK_N)
    ahead = tl.load(shared_ptr + AHEAD * shared_row + chunk, mask=arrives, other=0)
    order = tl.load(shared_ptr + FIRST * shared_row + chunk, mask=arrives, other=0) + slot
    tiles = tokens // BLOCK_N
    origin = ahead // BLOCK_N * KV_HEADS + head * tiles
    first, last = origin // span, (origin + tiles - 1) // span  # programs with a part of the chunk
    place = (chunk * (ROWS // SPAN.BLOCK_G) + slot) * KV_HEADS + head
    tl.debug_barrier()  # parts of all threads before the tickets of some
    arrived = tl.atomic_add(ticket_ptr + place, 1, mask=arrives, sem="acq_rel")
    complete = arrives & (arrived == last - first + 1)
    if tl.sum(complete.to(tl.int32), 0) > 0:
        tl.store(ticket_ptr + place, 0, mask=complete)  # as the next launch wants it
        token = tl.load(shared_ptr + QUERY * shared_row + order, mask=complete, other=0).to(tl.int64)
        member, element = tl.arange(0, SPAN.BLOCK_G), tl.arange(0, FORM.BLOCK_D)
        rows = complete[:, None] & (member < GROUP)[None, :]
        inside = rows[:, :, None] & (element < FORM.DIM)[None, None, :]
        at = place[:, None] * GROUP + member[None, :]
        peak = tl.load(rest.peaks + at, mask=rows, other=0.0, cache_modifier=".cg")
        total = tl.load(
            rest.ptr + at.to(tl.int64)[:, :, None] * FORM.BLOCK_D + element[None, None, :],
            mask=inside,
            other=0.0,
            cache_modifier=".cg",
        )
        mass = tl.where(rows, 1.0, 1.0)
        for some in range(0, tl.max(tl.where(complete, last - first + 1, 0), 0), PARTS):
            if PARTS == 1:
                program = first + some
                there = rows & (program <= last)[:, None]
                from_ = ((chunk * KV_HEADS + head + program) * ROWS + slot * GROUP)[:, None] + member[None, :]
                here = tl.load(common.peaks + from_, mask=there, other=float("-inf"), cache_modifier=".cg")
                part_at = common.ptr + from_.to(tl.int64)[:, :, None] * FORM.BLOCK_D + element[None, None, :]
                part = tl.load(part_at, mask=inside & (program <= last)[:, None, None], other=0.0, cache_modifier=".cg")
                higher = tl.maximum(peak, here)
                weight, keep = tl.exp2(here - higher), tl.exp2(peak - higher)
                total = total * keep[:, :, None] + part * weight[:, :, None]
                mass = mass * keep + weight
            else:  # [L, PARTS, G, D]
                program = first[:, None] + some + tl.arange(0, PARTS)[None, :]
                there = (program <= last[:, None])[:, :, None] & rows[:, None, :]
                from_ = (((chunk * KV_HEADS + head)[:, None] + program) * ROWS + (slot * GROUP)[:, None])[
                    :, :, None
                ] + member[None, None, :]
                here = tl.load(common.peaks + from_, mask=there, other=float("-inf"), cache_modifier=".cg")
                part_at = common.ptr + from_.to(tl.int64)[:, :, :, None] * FORM.BLOCK_D + element[None, None, None, :]
                part = tl.load(
                    part_at,
                    mask=there[:, :, :, None] & (element < FORM.DIM)[None, None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                higher = tl.maximum(peak, tl.max(here, 1))
                weight, keep = tl.exp2(here - higher[:, None, :]), tl.exp2(peak - higher)
                total = total * keep[:, :, None] + tl.sum(part * weight[:, :, :, None], 1)
                mass = mass * keep + tl.sum(weight, 1)
            peak = higher
        at_out = (token * out.token)[:, None] + (head[:, None] * GROUP + member[None, :]) * out.head
        result = total / mass[:, :, None]
        tl.store(
            out.ptr + at_out[:, :, None] + element[None, None, :], result.to(out.ptr.dtype.element_ty), mask=inside
        )


@triton.jit
def attend_shared(
    q, out, common, rest, ticket_ptr, keys, values, table_row, plan_ptr, shared_ptr, shared_row, rule,
    SPAN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """This program's span of the line of chunks: a part for each pair of chunk and KV head that it meets."""
    GROUP: tl.constexpr = SPAN.GROUP
    KV_HEADS: tl.constexpr = SPAN.KV_HEADS
    ROWS: tl.constexpr = SPAN.COMMON_M
    MEMBERS: tl.constexpr = ROWS // SPAN.BLOCK_G
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    program = tl.program_id(0)
    record = plan_ptr + program * FIELDS
    begun, end = tl.load(record + SHARED_BEGIN), tl.load(record + SHARED_END)
    chunk, span = tl.load(record + SHARED_CHUNK), tl.load(record + SHARED_SPAN)
    lane, element = tl.arange(0, ROWS), tl.arange(0, FORM.BLOCK_D)
    slot = lane // GROUP
    while begun < end:
        tiles = tl.load(shared_ptr + TOKENS * shared_row + chunk) // BLOCK_N
        first = tl.load(shared_ptr + FIRST * shared_row + chunk)
        count = tl.load(shared_ptr + COUNT * shared_row + chunk)
        step = begun - tl.load(shared_ptr + AHEAD * shared_row + chunk) // BLOCK_N * KV_HEADS
        head = step // tiles
        step = step % tiles
        stop = tl.minimum(tiles, step + end - begun)
        live = (slot < count) & (lane < MEMBERS * GROUP)
        token = tl.load(shared_ptr + QUERY * shared_row + first + slot, mask=live, other=0).to(tl.int64)
        inside = live[:, None] & (element < FORM.DIM)[None, :]
        at_q = (token * q.token + (head * GROUP + lane % GROUP) * q.head)[:, None] + element[None, :]
        its_q = tl.load(q.ptr + at_q, mask=inside, other=0.0)
        table = tl.load(shared_ptr + ORDER * shared_row + first).to(tl.int64) * table_row
        total, peak, mass = accumulate(
            nothing(ROWS, FORM.BLOCK_D), its_q, lane, of_head(keys, table, head), of_head(values, table, head),
            step, stop, 0, tiles * BLOCK_N, rule, False, False, FORM,
        )  # fmt: skip
        place = (chunk * KV_HEADS + head + program) * ROWS + lane
        at = place.to(tl.int64)[:, None] * FORM.BLOCK_D + element[None, :]
        tl.store(common.ptr + at, total / mass[:, None], mask=inside)
        tl.store(common.peaks + place, peak + tl.log2(mass), mask=live)
        member = tl.arange(0, MEMBERS)
        settle(
            chunk + member * 0, member, head + member * 0, member < count, out, common, rest, ticket_ptr,
            shared_ptr, span, shared_row, SPAN, FORM, 1,
        )  # fmt: skip
        begun += stop - step
        chunk += ((stop == tiles) & (head + 1 == KV_HEADS)).to(tl.int32)


@dataclass(frozen=True, slots=True)
class Common:
    """What programs leave for each other of sequences that share keys. ``tickets`` are zero between launches."""

    parts: Tensor  # [pairs + programs, ROWS, D], float32: of a pair of chunk and KV head, from one program
    peaks: Tensor  # [pairs + programs, ROWS], float32
    rest: Tensor  # [pairs, ROWS, D], float32: of the keys that are a sequence's own, by chunk, place, KV head and head
    rest_peaks: Tensor  # [pairs, ROWS], float32
    tickets: Tensor  # [pairs, ROWS], int32: by chunk, place and KV head


def make_common(programs: int, head_dim: int, device: torch.device | str) -> Common:
    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    dim, rows = padded(head_dim), PAIRS + programs
    tickets = torch.zeros((PAIRS, ROWS), dtype=torch.int32, device=device)
    return Common(floats(rows, ROWS, dim), floats(rows, ROWS), floats(PAIRS, ROWS, dim), floats(PAIRS, ROWS), tickets)
