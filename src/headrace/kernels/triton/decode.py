# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Attention of sequences with few queries: the tiles of all sequences dealt out evenly, partial results merged by whoever comes last.

What lives here: the kernel and its scratch memory. What may not: choosing tiles or kernels (attention.py).

    sequence           | 0                 | 1     | 2                     One line of tiles, sequence by sequence, KV head by KV head,
    KV head            | 0       | 1       | 0 | 1 | 0         | 1         cut into equal spans, one a program (Stream-K, Osama et al.
    tile               | . . . . | . . . . | . | . | . . . . . | . . . . . 2023; LeanAttention, Sanovar et al. 2024). Uneven lengths cost
    program            | 0     | 1     | 2     | 3     | 4     | 5     |   nothing, and the launch is the same for any: graphs can hold it.

A program's span meets at most two pairs of sequence and KV head that it does not hold whole: one it continues (part 0), one it begins
(part 1). Each program of such a pair leaves its part and takes a ticket; the last one adds up the parts, in order of the line.
A program goes through its span in one flat loop, so that the keys of the next pair are on their way while the last ones are used. For
that, every sequence has at least one tile, if only to pass it by: one of no key, for one without context or for the other kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.triton.launch import launchable
from headrace.kernels.triton.prefill import MAX_WINDOW, load_tile, padded, weigh
from headrace.layers.inputs import AttentionInputs

if TYPE_CHECKING:
    from headrace.kernels.triton.attention import Tiles

MIN_SPAN = 4  # tiles a program is worth starting for, where contexts are long and sequences few


@triton.jit
def _first_key(context, queries, window, WINDOW: tl.constexpr):
    """The first key that any query of the sequence sees."""
    return tl.maximum(context - queries + 1 - window, 0) if WINDOW else context * 0


@triton.jit
def _own(context, queries, few):
    """Context and queries of a sequence as this kernel sees it: none of one for the other kernel."""
    return tl.where(queries <= few, context, 0), tl.where(queries <= few, queries, 0)


@triton.jit
def _tiles(context, queries, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.maximum(tl.cdiv(context, BLOCK_N) - _first_key(context, queries, window, WINDOW) // BLOCK_N, 1)


@triton.jit
def _units(chunk, query_start_ptr, context_ptr, sequences, few, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr):
    """Tiles of the sequences from ``chunk`` on, [BLOCK_S]; none beyond the last."""
    every = chunk + tl.arange(0, BLOCK_S)
    inside = every < sequences
    starts = tl.load(query_start_ptr + every, mask=inside, other=0)
    ends = tl.load(query_start_ptr + 1 + every, mask=inside, other=0)
    context, queries = _own(tl.load(context_ptr + every, mask=inside, other=0), ends - starts, few)
    return tl.where(inside, _tiles(context, queries, window, WINDOW, BLOCK_N), 0)


@triton.jit
def _passed(units, ahead, unit):
    """How many of these sequences, with ``ahead`` tiles before them, end before tile ``unit`` of the line, and their tiles."""
    passed = (units > 0) & (ahead + tl.cumsum(units, 0) <= unit)
    return tl.sum(passed.to(tl.int32), 0), tl.sum(tl.where(passed, units, 0), 0)


@triton.jit
def _merge(
    sequence, head, first, last, out_ptr, part_ptr, part_peak_ptr, query_start_ptr, out_token, out_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Adds up what programs first … last found for one pair of sequence and KV head, each part weighted by its share of the mass."""
    start = tl.load(query_start_ptr + sequence)
    queries = tl.load(query_start_ptr + sequence + 1) - start
    member, element = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    inside = (member < GROUP)[:, None] & (element < DIM)[None, :]
    for query in range(queries):
        total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        peak = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_G,), tl.float32)
        for some in range(first, last + 1, BLOCK_P):
            for each in tl.static_range(BLOCK_P):  # their loads stand together; a thread sums up what it loaded
                program = some + each
                at = (program * 2 + (program == first).to(tl.int32)) * BLOCK_M + query * GROUP + member
                here = tl.load(part_peak_ptr + at, mask=(member < GROUP) & (program <= last), other=float("-inf"), cache_modifier=".cg")
                place = part_ptr + at.to(tl.int64)[:, None] * BLOCK_D + element[None, :]
                part = tl.load(place, mask=inside & (program <= last), other=0.0, cache_modifier=".cg")
                higher = tl.maximum(peak, here)
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weight, keep = tl.exp2(here - shift), tl.exp2(peak - shift)
                total = total * keep[:, None] + part * weight[:, None]
                mass = mass * keep + weight
                peak = higher
        out = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        at_out = (start + query).to(tl.int64) * out_token + (head * GROUP + member) * out_head
        tl.store(out_ptr + at_out[:, None] + element[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@launchable(do_not_specialize=["table_ptr", "query_start_ptr", "context_ptr", "sequences", "few", "window", "table_row"])
def _decode_kernel(
    q_ptr, out_ptr, part_ptr, part_peak_ptr, ticket_ptr, k_ptr, v_ptr, table_ptr, query_start_ptr, context_ptr,
    sequences, few, window,
    q_token, q_head, out_token, out_head, k_block, k_head, k_row, v_block, v_head, v_row, table_row, scale, soft_cap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, MIN_SPAN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lane, element = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = lane // GROUP
    if PDL:
        gdc_wait()
    head_units = _units(0, query_start_ptr, context_ptr, sequences, few, window, WINDOW, BLOCK_N, BLOCK_S)
    line, longest = tl.sum(head_units, 0), tl.max(head_units, 0)
    for chunk in range(BLOCK_S, sequences, BLOCK_S):
        units = _units(chunk, query_start_ptr, context_ptr, sequences, few, window, WINDOW, BLOCK_N, BLOCK_S)
        line += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
    least = tl.maximum(tl.minimum(longest, 2), tl.minimum(tl.cdiv(longest, 16), MIN_SPAN))  # more parts cost more than they gain
    span = tl.maximum(tl.cdiv(line * KV_HEADS, tl.num_programs(0)), least)
    begin = program * span
    end = tl.minimum(begin + span, line * KV_HEADS)
    if begin < end:
        sequence, before = _passed(head_units, 0, begin // KV_HEADS)
        ahead = tl.sum(head_units, 0)
        for chunk in range(BLOCK_S, sequences, BLOCK_S):
            units = _units(chunk, query_start_ptr, context_ptr, sequences, few, window, WINDOW, BLOCK_N, BLOCK_S)
            count, tiles = _passed(units, ahead, begin // KV_HEADS)
            sequence, before, ahead = sequence + count, before + tiles, ahead + tl.sum(units, 0)
        first_queries = tl.load(query_start_ptr + sequence + 1) - tl.load(query_start_ptr + sequence)
        first_context, first_queries = _own(tl.load(context_ptr + sequence), first_queries, few)
        first_whole = _tiles(first_context, first_queries, window, WINDOW, BLOCK_N)
        kv_head = (begin - before * KV_HEADS) // first_whole
        step = begin - before * KV_HEADS - kv_head * first_whole  # tiles of this pair that belong to programs before
        first_sequence, first_head, first_step = sequence, kv_head, step
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        masses = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # by key of a tile: their sum is wanted once a pair, not once a tile
        for unit in range(begin, end):
            start = tl.load(query_start_ptr + sequence)
            counted = tl.load(query_start_ptr + sequence + 1) - start
            context, queries = _own(tl.load(context_ptr + sequence), counted, few)
            whole = _tiles(context, queries, window, WINDOW, BLOCK_N)
            first_key = _first_key(context, queries, window, WINDOW)
            tile = first_key // BLOCK_N + step
            key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            there = (key < context) & (key >= first_key)
            live = lane < queries * GROUP
            inside = live[:, None] & (element < DIM)[None, :]
            token = (start + query).to(tl.int64)
            head = kv_head * GROUP + lane % GROUP
            k_head_at, v_head_at, table = kv_head.to(tl.int64) * k_head, kv_head.to(tl.int64) * v_head, table_ptr + sequence.to(tl.int64) * table_row
            q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + element[None, :], mask=inside, other=0.0)
            k = load_tile(k_ptr, k_ptr, table, tile, key, there, context, k_block, k_head_at, k_row, False, True, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N)
            v = load_tile(v_ptr, v_ptr, table, tile, key, there, context, v_block, v_head_at, v_row, False, True, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N)
            position = context - queries + query
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            fresh = (step == 0) | (unit == begin)  # what another pair left is not multiplied by zero: it may be NaN
            total = tl.where(fresh, 0.0, total)
            peak = tl.where(fresh, float("-inf"), peak)
            masses = tl.where(fresh, 0.0, masses)
            weight, keep, peak = weigh(peak, q, k, seen, scale, soft_cap, True, SOFT_CAP, PRECISION)
            masses = masses * keep[:, None] + weight
            total = tl.dot(weight.to(v.dtype), v, total * keep[:, None], input_precision=PRECISION)
            ends = step + 1 == whole
            begun = unit - step >= begin  # by this program
            if ends | (unit + 1 == end):
                mass = tl.sum(masses, 1)
                result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
                if ends & begun:
                    at = (token * out_token + head * out_head)[:, None] + element[None, :]
                    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)
                else:
                    place = ((program * 2 + begun.to(tl.int32)) * BLOCK_M + lane).to(tl.int64)
                    tl.store(part_ptr + place[:, None] * BLOCK_D + element[None, :], result, mask=inside)
                    tl.store(part_peak_ptr + place, peak + tl.log2(mass), mask=live)
            step = tl.where(ends, 0, step + 1)
            kv_head += ends.to(tl.int32)
            sequence += (kv_head == KV_HEADS).to(tl.int32)
            kv_head = tl.where(kv_head == KV_HEADS, 0, kv_head)
        tl.debug_barrier()  # parts of all threads before the tickets of one
        begun = (step > 0) & (end - step >= begin)
        last_queries = tl.load(query_start_ptr + sequence + 1, mask=begun, other=0) - tl.load(query_start_ptr + sequence, mask=begun, other=0)
        last_context, last_queries = _own(tl.load(context_ptr + sequence, mask=begun, other=0), last_queries, few)
        which = tl.arange(0, 2)  # the pair continued, the pair begun
        origin = tl.where(which == 0, begin - first_step, end - step)
        whole = tl.where(which == 0, first_whole, _tiles(last_context, last_queries, window, WINDOW, BLOCK_N))
        firsts, lasts = origin // span, (origin + whole - 1) // span
        shared = ((which == 0) & (first_step > 0)) | ((which == 1) & begun)
        arrived = tl.atomic_add(ticket_ptr + firsts, 1, mask=shared, sem="acq_rel")
        complete = (shared & (arrived == lasts - firsts)).to(tl.int32)
        tl.store(ticket_ptr + firsts, 0, mask=complete > 0)  # as the next launch wants it
        for pair in range(2):
            if tl.sum(tl.where(which == pair, complete, 0), 0) > 0:
                _merge(
                    tl.where(pair == 0, first_sequence, sequence), tl.where(pair == 0, first_head, kv_head),
                    tl.sum(tl.where(which == pair, firsts, 0), 0), tl.sum(tl.where(which == pair, lasts, 0), 0),
                    out_ptr, part_ptr, part_peak_ptr, query_start_ptr, out_token, out_head, GROUP, DIM, BLOCK_D, BLOCK_M, BLOCK_G, BLOCK_P,
                )  # fmt: skip
    if PDL:
        gdc_launch_dependents()


@dataclass(frozen=True, slots=True)
class Scratch:
    """What programs leave for each other, for launches that follow each other. ``tickets`` are zero between them."""

    parts: Tensor  # [programs, 2, rows, D], float32
    peaks: Tensor  # [programs, 2, rows], float32
    tickets: Tensor  # [programs], int32


def make_scratch(programs: int, rows: int, head_dim: int, device: torch.device | str) -> Scratch:
    parts = torch.empty((programs, 2, rows, padded(head_dim)), dtype=torch.float32, device=device)
    peaks = torch.empty((programs, 2, rows), dtype=torch.float32, device=device)
    return Scratch(parts, peaks, torch.zeros(programs, dtype=torch.int32, device=device))


def attend(
    q: Tensor,  # [T, Hq, D]
    out: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [blocks, Hk, block_size, D]
    v_cache: Tensor,  # [blocks, Hk, block_size, D]
    inputs: AttentionInputs,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    few: int,
    programs: int,
    tiles: Tiles,
    scratch: Scratch,
) -> None:
    """Fills ``out`` for the sequences with 1 to ``few`` queries. See PagedAttention; ``few`` × group heads fit into ``tiles.rows``."""
    heads, dim, kv_heads, sequences = q.shape[1], q.shape[2], k_cache.shape[1], inputs.context_len.shape[0]
    block_g = triton.next_power_of_2(heads // kv_heads)
    _decode_kernel[(programs,)](
        q, out, scratch.parts, scratch.peaks, scratch.tickets, k_cache, v_cache,
        inputs.block_table, inputs.query_start, inputs.context_len, sequences, few, window or MAX_WINDOW,
        *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], inputs.block_table.stride(0), scale, soft_cap or 0.0,
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, WINDOW=window is not None, SOFT_CAP=soft_cap is not None,
        BLOCK_SIZE=inputs.block_size, DIM=dim, BLOCK_D=padded(dim), BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, BLOCK_S=tiles.sequences,
        BLOCK_G=block_g, BLOCK_P=max(1, min(8, 8192 // (block_g * padded(dim)))), MIN_SPAN=MIN_SPAN,
        PRECISION="ieee", PDL=False, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
