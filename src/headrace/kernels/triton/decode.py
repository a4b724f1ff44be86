# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Attention of sequences with few queries: the tiles of all sequences dealt out evenly, partial results merged by a second kernel.

What lives here: both kernels. What may not: choosing tiles or kernels (attention.py).

    KV head            | 0                               | 1              One line of tiles, KV head by KV head, sequence by sequence, cut
    sequence           | 0       | 1 | 2                 | 0       | 1    into equal spans, one a program (Stream-K, Osama et al. 2023;
    tile               | . . . . | . | . . . . . . . . . | . . . . | .    LeanAttention, Sanovar et al. 2024). Uneven lengths cost nothing,
    program            | 0     | 1     | 2     | 3     | 4     | 5         and the launch is the same for any lengths: graphs can hold it.

A program's span meets at most two sequences it does not hold whole: one it continues (part 0) and one it begins (part 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.triton.prefill import accumulate, cache_arguments, padded
from headrace.layers.inputs import AttentionInputs

if TYPE_CHECKING:
    from headrace.kernels.triton.attention import Tiles


@triton.jit
def _first_key(context, queries, WINDOW: tl.constexpr):
    """The first key that any query of the sequence sees."""
    return tl.maximum(context - queries + 1 - WINDOW, 0) if WINDOW > 0 else context * 0


@triton.jit
def _tiles(context, queries, MOST: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of a sequence; at least one, so that a query that sees nothing gets its zeros. None: not for this kernel."""
    count = tl.maximum(tl.cdiv(context, BLOCK_N) - _first_key(context, queries, WINDOW) // BLOCK_N, 1)
    return tl.where((queries > 0) & (queries <= MOST), count, 0)


@triton.jit
def _decode_kernel(
    q_ptr, out_ptr, part_ptr, part_peak_ptr, first_unit_ptr, span_ptr, k_ptr, v_ptr, k_map, v_map, table_ptr, query_start_ptr, context_ptr,
    sequences, q_token, q_head, out_token, out_head, k_block, k_head, k_row, v_block, v_head, v_row, table_row, scale, soft_cap,
    BULK: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane, element, every = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    if PDL:
        gdc_wait()
    starts = tl.load(query_start_ptr + every, mask=every < sequences, other=0)
    counts = tl.load(query_start_ptr + 1 + every, mask=every < sequences, other=0) - starts
    units = _tiles(tl.load(context_ptr + every, mask=every < sequences, other=0), counts, MOST, WINDOW, BLOCK_N)
    ends = tl.cumsum(units, 0)
    line = tl.sum(units, 0)
    span = tl.cdiv(line * KV_HEADS, tl.num_programs(0))
    if program == 0:
        tl.store(span_ptr, span)
    unit = program * span
    last = tl.minimum(unit + span, line * KV_HEADS)
    kv_head = unit // tl.maximum(line, 1)
    within = unit - kv_head * line
    sequence = tl.sum((ends <= within).to(tl.int32), 0)
    done = within - tl.sum(tl.where(every < sequence, units, 0), 0)  # tiles of this sequence that belong to programs before
    while unit < last:
        start = tl.load(query_start_ptr + sequence)
        queries = tl.load(query_start_ptr + sequence + 1) - start
        context = tl.load(context_ptr + sequence)
        whole = _tiles(context, queries, MOST, WINDOW, BLOCK_N)
        count = tl.minimum(whole - done, last - unit)
        if count > 0:
            query = lane // GROUP
            head = kv_head * GROUP + lane % GROUP
            live = (query < queries) & (lane < MOST * GROUP)
            inside = live[:, None] & (element < DIM)[None, :]
            token = (start + query).to(tl.int64)
            q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + element[None, :], mask=inside, other=0.0)
            first_key = _first_key(context, queries, WINDOW)
            first_tile = first_key // BLOCK_N + done
            end_tile = first_tile + count
            total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            mass = tl.zeros((BLOCK_M,), tl.float32)
            position = context - queries + query
            k_head_at, v_head_at, table = kv_head.to(tl.int64) * k_head, kv_head.to(tl.int64) * v_head, table_ptr + sequence.to(tl.int64) * table_row
            rest = first_tile
            if BULK and WINDOW == 0:
                rest = tl.maximum(tl.minimum((context - queries + 1) // BLOCK_N, end_tile), first_tile)  # every row sees the tiles before
                total, peak, mass = accumulate(
                    total, peak, mass, q, position, k_ptr, v_ptr, k_map, v_map, table, k_block, k_head_at, k_row, v_block, v_head_at, v_row,
                    first_tile, rest, 0, context, scale, soft_cap,
                    BULK, False, WINDOW, SOFT_CAP, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, PRECISION,
                )  # fmt: skip
            total, peak, mass = accumulate(
                total, peak, mass, q, position, k_ptr, v_ptr, k_map, v_map, table, k_block, k_head_at, k_row, v_block, v_head_at, v_row,
                rest, tl.minimum(end_tile, tl.cdiv(context, BLOCK_N)), first_key, context, scale, soft_cap,
                BULK, True, WINDOW, SOFT_CAP, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, PRECISION,
            )  # fmt: skip
            result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
            if done == 0:
                tl.store(first_unit_ptr + sequence * KV_HEADS + kv_head, unit)
            if count == whole:
                at = (token * out_token + head * out_head)[:, None] + element[None, :]
                tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)
            else:
                place = ((program * 2 + (done == 0).to(tl.int32)) * BLOCK_M + lane).to(tl.int64)
                tl.store(part_ptr + place[:, None] * BLOCK_D + element[None, :], result, mask=inside)
                tl.store(part_peak_ptr + place, peak + tl.log2(mass), mask=live)
        unit += count
        done = 0
        sequence += 1
        if sequence == sequences:
            sequence = 0
            kv_head += 1
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _merge_kernel(
    out_ptr, part_ptr, part_peak_ptr, first_unit_ptr, span_ptr, query_start_ptr, context_ptr, out_token, out_head,
    MOST: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row (query, head) of one sequence: its parts, weighted by what each saw of the softmax's mass."""
    sequence, query, head = tl.program_id(0) // MOST, tl.program_id(0) % MOST, tl.program_id(1)
    if PDL:
        gdc_wait()
    start = tl.load(query_start_ptr + sequence)
    queries = tl.load(query_start_ptr + sequence + 1) - start
    whole = _tiles(tl.load(context_ptr + sequence), queries, MOST, WINDOW, BLOCK_N)
    if (whole > 0) & (query < queries):
        span = tl.load(span_ptr)
        unit = tl.load(first_unit_ptr + sequence * KV_HEADS + head // GROUP)
        first, last = unit // span, (unit + whole - 1) // span
        if first < last:
            element, each = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
            total = tl.zeros((BLOCK_D,), tl.float32)
            mass = 0.0
            peak = float("-inf")
            for begin in range(first, last + 1, BLOCK_P):
                program = begin + each
                at = ((program * 2 + (program == first).to(tl.int32)) * BLOCK_M + query * GROUP + head % GROUP).to(tl.int64)
                peaks = tl.load(part_peak_ptr + at, mask=program <= last, other=float("-inf"))
                there = (program <= last)[:, None] & (element < DIM)[None, :]
                parts = tl.load(part_ptr + at[:, None] * BLOCK_D + element[None, :], mask=there, other=0.0)
                higher = tl.maximum(peak, tl.max(peaks, 0))
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weights, keep = tl.exp2(peaks - shift), tl.exp2(peak - shift)
                total = total * keep + tl.sum(parts * weights[:, None], 0)
                mass = mass * keep + tl.sum(weights, 0)
                peak = higher
            out = total / tl.where(mass == 0.0, 1.0, mass)
            at_out = (start + query).to(tl.int64) * out_token + head * out_head
            tl.store(out_ptr + at_out + element, out.to(out_ptr.dtype.element_ty), mask=element < DIM)
    if PDL:
        gdc_launch_dependents()


def attend(
    q: Tensor,  # [T, Hq, D]
    out: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [blocks, Hk, block_size, D]
    v_cache: Tensor,  # [blocks, Hk, block_size, D]
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    most: int,
    programs: int,
    tiles: Tiles,
    bulk: bool,
) -> None:
    """Fills ``out`` for the sequences with 1 to ``most`` queries. See PagedAttention; ``most`` × group heads fit into ``tiles.rows``."""
    heads, dim, kv_heads, sequences = q.shape[1], q.shape[2], k_cache.shape[1], inputs.context_len.shape[0]
    block_d, device = padded(dim), q.device
    parts = torch.empty((programs, 2, tiles.rows, block_d), dtype=torch.float32, device=device)
    peaks = torch.empty((programs, 2, tiles.rows), dtype=torch.float32, device=device)
    places = torch.empty(sequences * kv_heads + 1, dtype=torch.int32, device=device)
    first_unit, span = places[1:], places
    shape = {"MOST": most, "GROUP": heads // kv_heads, "KV_HEADS": kv_heads, "WINDOW": window or 0, "DIM": dim, "BLOCK_D": block_d}
    keys, values, *strides = cache_arguments(k_cache, v_cache, tiles.keys, bulk=bulk)
    _decode_kernel[(programs,)](
        q, out, parts, peaks, first_unit, span, k_cache, v_cache, keys, values, inputs.block_table, inputs.query_start, inputs.context_len,
        sequences, *q.stride()[:2], *out.stride()[:2], *strides, inputs.block_table.stride(0),
        scale, soft_cap or 0.0, **shape,
        BULK=bulk, SOFT_CAP=soft_cap is not None, BLOCK_SIZE=inputs.block_size, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys,
        BLOCK_S=triton.next_power_of_2(sequences), PRECISION="ieee", PDL=False, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    _merge_kernel[(sequences * most, heads)](
        out, parts, peaks, first_unit, span, inputs.query_start, inputs.context_len, *out.stride()[:2], **shape,
        BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, BLOCK_P=16, PDL=False, num_warps=2,
    )  # fmt: skip
