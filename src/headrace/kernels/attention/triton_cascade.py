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

from headrace.kernels.attention.triton_plan import FIELDS, SHARED_BEGIN, SHARED_CHUNK, SHARED_END, SHARED_SPAN
from headrace.kernels.attention.triton_prefill import accumulate, padded
from headrace.kernels.attention.triton_sharing import AHEAD, COUNT, FIRST, ORDER, PAIRS, QUERY, ROWS, TOKENS


@triton.jit
def settle(
    chunk, slot, head, arrives, out_ptr, common_ptr, common_peak_ptr, rest_ptr, rest_peak_ptr, ticket_ptr, shared_ptr,
    span, shared_row, out_token, out_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    MEMBERS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One more part is there of (chunk, slot, head) [L], where it ``arrives`` [L]; what is complete now is added up. So
    many PARTS are asked for together: one behind the other, each waits for its own read of the second-level cache."""
    tokens = tl.load(shared_ptr + TOKENS * shared_row + chunk, mask=arrives, other=BLOCK_N)
    ahead = tl.load(shared_ptr + AHEAD * shared_row + chunk, mask=arrives, other=0)
    order = tl.load(shared_ptr + FIRST * shared_row + chunk, mask=arrives, other=0) + slot
    tiles = tokens // BLOCK_N
    origin = ahead // BLOCK_N * KV_HEADS + head * tiles
    first, last = origin // span, (origin + tiles - 1) // span  # programs with a part of the chunk
    place = (chunk * MEMBERS + slot) * KV_HEADS + head
    tl.debug_barrier()  # parts of all threads before the tickets of some
    arrived = tl.atomic_add(ticket_ptr + place, 1, mask=arrives, sem="acq_rel")
    complete = arrives & (arrived == last - first + 1)
    if tl.sum(complete.to(tl.int32), 0) > 0:
        tl.store(ticket_ptr + place, 0, mask=complete)  # as the next launch wants it
        token = tl.load(shared_ptr + QUERY * shared_row + order, mask=complete, other=0).to(tl.int64)
        member, element = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        rows = complete[:, None] & (member < GROUP)[None, :]
        inside = rows[:, :, None] & (element < DIM)[None, None, :]
        at = place[:, None] * GROUP + member[None, :]
        peak = tl.load(rest_peak_ptr + at, mask=rows, other=0.0, cache_modifier=".cg")
        total = tl.load(
            rest_ptr + at.to(tl.int64)[:, :, None] * BLOCK_D + element[None, None, :],
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
                here = tl.load(common_peak_ptr + from_, mask=there, other=float("-inf"), cache_modifier=".cg")
                part_at = common_ptr + from_.to(tl.int64)[:, :, None] * BLOCK_D + element[None, None, :]
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
                here = tl.load(common_peak_ptr + from_, mask=there, other=float("-inf"), cache_modifier=".cg")
                part_at = common_ptr + from_.to(tl.int64)[:, :, :, None] * BLOCK_D + element[None, None, None, :]
                part = tl.load(
                    part_at,
                    mask=there[:, :, :, None] & (element < DIM)[None, None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                higher = tl.maximum(peak, tl.max(here, 1))
                weight, keep = tl.exp2(here - higher[:, None, :]), tl.exp2(peak - higher)
                total = total * keep[:, :, None] + tl.sum(part * weight[:, :, :, None], 1)
                mass = mass * keep + tl.sum(weight, 1)
            peak = higher
        at_out = (token * out_token)[:, None] + (head[:, None] * GROUP + member[None, :]) * out_head
        result = total / mass[:, :, None]
        tl.store(
            out_ptr + at_out[:, :, None] + element[None, None, :], result.to(out_ptr.dtype.element_ty), mask=inside
        )


@triton.jit
def attend_shared(
    q_ptr, out_ptr, common_ptr, common_peak_ptr, rest_ptr, rest_peak_ptr, ticket_ptr, k_ptr, v_ptr, k_shared, v_shared, table_ptr, plan_ptr,
    shared_ptr, q_token, q_head, out_token, out_head, k_block, k_head, k_row, v_block, v_head, v_row, table_row, shared_row, scale, soft_cap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, SOFT_CAP: tl.constexpr, KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """This program's span of the line of chunks: a part for each pair of chunk and KV head that it meets."""
    MEMBERS: tl.constexpr = ROWS // BLOCK_G
    program = tl.program_id(0)
    record = plan_ptr + program * FIELDS
    at, end = tl.load(record + SHARED_BEGIN), tl.load(record + SHARED_END)
    chunk, span = tl.load(record + SHARED_CHUNK), tl.load(record + SHARED_SPAN)
    lane, element = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    slot = lane // GROUP
    while at < end:
        tiles = tl.load(shared_ptr + TOKENS * shared_row + chunk) // BLOCK_N
        first = tl.load(shared_ptr + FIRST * shared_row + chunk)
        count = tl.load(shared_ptr + COUNT * shared_row + chunk)
        step = at - tl.load(shared_ptr + AHEAD * shared_row + chunk) // BLOCK_N * KV_HEADS
        head = step // tiles
        step = step % tiles
        stop = tl.minimum(tiles, step + end - at)
        live = (slot < count) & (lane < MEMBERS * GROUP)
        token = tl.load(shared_ptr + QUERY * shared_row + first + slot, mask=live, other=0).to(tl.int64)
        inside = live[:, None] & (element < DIM)[None, :]
        q = tl.load(
            q_ptr + (token * q_token + (head * GROUP + lane % GROUP) * q_head)[:, None] + element[None, :],
            mask=inside,
            other=0.0,
        )
        table = table_ptr + tl.load(shared_ptr + ORDER * shared_row + first).to(tl.int64) * table_row
        total = tl.zeros((ROWS, BLOCK_D), tl.float32)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        mass = tl.zeros((ROWS,), tl.float32)
        total, peak, mass = accumulate(
            total, peak, mass, q, lane, k_ptr, v_ptr, k_ptr, v_ptr, table, k_block, head.to(tl.int64) * k_head, k_row,
            v_block, head.to(tl.int64) * v_head, v_row, k_shared, v_shared, head, step, stop, 0, tiles * BLOCK_N, 0, scale, soft_cap,
            False, False, False, SOFT_CAP, KV, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
        place = (chunk * KV_HEADS + head + program) * ROWS + lane
        tl.store(
            common_ptr + place.to(tl.int64)[:, None] * BLOCK_D + element[None, :], total / mass[:, None], mask=inside
        )
        tl.store(common_peak_ptr + place, peak + tl.log2(mass), mask=live)
        member = tl.arange(0, MEMBERS)
        settle(
            chunk + member * 0, member, head + member * 0, member < count, out_ptr, common_ptr, common_peak_ptr, rest_ptr, rest_peak_ptr,
            ticket_ptr, shared_ptr, span, shared_row, out_token, out_head, GROUP, KV_HEADS, DIM, BLOCK_D, BLOCK_G, BLOCK_N, MEMBERS, ROWS, 1,
        )  # fmt: skip
        at += stop - step
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
