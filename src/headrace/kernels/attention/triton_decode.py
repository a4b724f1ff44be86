# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Attention of sequences with few queries: the tiles of all sequences dealt out evenly, partial results merged by
whoever comes last.

What lives here: the kernel and its scratch memory. What may not: choosing tiles or kernels (paged.py), dealing out
tiles (triton_plan.py), keys that sequences share (triton_cascade.py).

A program's span of the line of tiles (triton_plan.py) meets at most two pairs of sequence and KV head that it does not
hold whole: one it continues (part 0), one it begins (part 1). Each program of such a pair leaves its part and takes a
ticket; the last one adds up the parts, in order of the line. A program goes through its span in one flat loop, so that
the keys of the next pair are on their way while the last ones are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.triton_cascade import Common, attend_shared, settle
from headrace.kernels.attention.triton_codes import Form, Held, add_values, of_head, scales_of
from headrace.kernels.attention.triton_plan import (
    BEGIN,
    END,
    FIELDS,
    FIRST_0,
    HEAD,
    LAST_0,
    SEQUENCE,
    SHARED_LINE,
    SHARED_SPAN,
    STEP,
    Plan,
    first_key,
    own_keys,
    tiles_of,
)  # fmt: skip
from headrace.kernels.attention.triton_prefill import (
    LOG2_E,
    MAX_WINDOW,
    Attended,
    Parts,
    Rows,
    Rule,
    load_held,
    padded,
    scores,
    weigh,
)  # fmt: skip
from headrace.kernels.attention.triton_sharing import CHUNK, ROWS, SLOT
from headrace.kernels.build.launch import launchable

if TYPE_CHECKING:
    from headrace.kernels.attention.paged import Tiles

_AGAIN = 32  # keys read at once by programs that begin again: few, so that this takes no registers of the first pass
LEAST_MASS = tl.constexpr(2.0**-64)  # of a row whose scores were taken as powers of 2; and 1 / LEAST_MASS at most


class Span(NamedTuple):
    """What a variant is made for beside keys (``Form``). COMMON_M: rows of a tile over shared keys. LSE: it leaves the
    log-sum-exp of each row, too; not with CASCADE."""

    CASCADE: Any
    GROUP: Any
    KV_HEADS: Any
    COMMON_M: Any
    BLOCK_G: Any
    BLOCK_M: Any
    BLOCK_P: Any
    LSE: Any


@triton.jit
def _own(context, queries, few):
    """Context and queries of a sequence as this kernel sees it: none of one for the other kernel."""
    return tl.where(queries <= few, context, 0), tl.where(queries <= few, queries, 0)


@triton.jit
def _place(shared_ptr, shared_row, sequence, shares, kv_head, SPAN: tl.constexpr):
    """Where the pair's own part lies for those who add it to that of its chunk (triton_cascade.py)."""
    chunk = tl.load(shared_ptr + CHUNK * shared_row + sequence, mask=shares, other=0)
    slot = tl.load(shared_ptr + SLOT * shared_row + sequence, mask=shares, other=0)
    return (chunk * (SPAN.COMMON_M // SPAN.BLOCK_G) + slot) * SPAN.KV_HEADS + kv_head


@triton.jit
def _doubtful(mass):
    """Whether float32 may not have held what makes up sums of powers of 2. One score too high lifts the sum: there is
    no more to look at."""
    return ~((mass >= LEAST_MASS) & (mass <= 1.0 / LEAST_MASS))  # NaN: yes


@triton.jit
def _fold_parts(
    row, first, last, inside, live, left, BLOCK_D: tl.constexpr, SPAN: tl.constexpr, UNIFIED: tl.constexpr
):  # fmt: skip
    """Sums of what programs first … last found for rows ``row`` of one pair: [G, D], their peak and mass. UNIFIED: as
    they are."""
    element = tl.arange(0, BLOCK_D)
    total = tl.zeros((SPAN.BLOCK_G, BLOCK_D), tl.float32)
    peak = tl.zeros((SPAN.BLOCK_G,), tl.float32) if UNIFIED else tl.full((SPAN.BLOCK_G,), float("-inf"), tl.float32)
    mass = tl.zeros((SPAN.BLOCK_G,), tl.float32)
    for some in range(first, last + 1, SPAN.BLOCK_P):
        for each in tl.static_range(SPAN.BLOCK_P):  # their loads stand together; a thread sums up what it loaded
            program = some + each
            at = (program * 2 + (program == first).to(tl.int32)) * SPAN.BLOCK_M + row
            here = tl.load(left.peaks + at, mask=live & (program <= last), other=float("-inf"), cache_modifier=".cg")
            place = left.ptr + at.to(tl.int64)[:, None] * BLOCK_D + element[None, :]
            part = tl.load(place, mask=inside & (program <= last), other=0.0, cache_modifier=".cg")
            if UNIFIED:
                weight = tl.exp2(here)
                total += part * weight[:, None]
                mass += weight
            else:
                higher = tl.maximum(peak, here)
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weight, keep = tl.exp2(here - shift), tl.exp2(peak - shift)
                total = total * keep[:, None] + part * weight[:, None]
                mass = mass * keep + weight
                peak = higher
    return total, peak, mass


@triton.jit
def _merge(
    sequence, head, first, last, place, out, sums, left, rest, query_start_ptr,
    SPAN: tl.constexpr, FORM: tl.constexpr, UNIFIED: tl.constexpr,
):  # fmt: skip
    """Adds up what programs first … last found for one pair of sequence and KV head, each part weighted by its share of
    the mass.

    ``place``: where to leave it for those who read the keys before them, −1 if nobody does.
    """
    start = tl.load(query_start_ptr + sequence)
    queries = tl.load(query_start_ptr + sequence + 1) - start
    member, element = tl.arange(0, SPAN.BLOCK_G), tl.arange(0, FORM.BLOCK_D)
    live = member < SPAN.GROUP
    inside = live[:, None] & (element < FORM.DIM)[None, :]
    for query in range(queries):
        row = query * SPAN.GROUP + member
        total, peak, mass = _fold_parts(row, first, last, inside, live, left, FORM.BLOCK_D, SPAN, UNIFIED)
        if UNIFIED:  # noqa: SIM102  this one is compiled away
            if tl.max((_doubtful(mass) & live).to(tl.int32), 0) > 0:
                total, peak, mass = _fold_parts(row, first, last, inside, live, left, FORM.BLOCK_D, SPAN, False)
        result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        if place < 0:
            at_out = (start + query).to(tl.int64) * out.token + (head * SPAN.GROUP + member) * out.head
            tl.store(out.ptr + at_out[:, None] + element[None, :], result.to(out.ptr.dtype.element_ty), mask=inside)
            if SPAN.LSE:
                its = (start + query).to(tl.int64) * sums.token + head * SPAN.GROUP + member
                tl.store(sums.ptr + its, (peak + tl.log2(mass)) / LOG2_E, mask=live)
        else:
            at = place * SPAN.GROUP + member
            tl.store(rest.ptr + at.to(tl.int64)[:, None] * FORM.BLOCK_D + element[None, :], result, mask=inside)
            tl.store(rest.peaks + at, peak + tl.log2(mass), mask=live)


@triton.jit
def _own_span(
    q, out, sums, left, rest, keys, values, table_row, query_start_ptr, context_ptr, shared_ptr, shared_row,
    begin, end, sequence, kv_head, step, few, rule,
    SPAN: tl.constexpr, FORM: tl.constexpr, UNIFIED: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Attends to tiles begin … end - 1 of the line, the first of which is tile ``step`` of (sequence, kv_head). Returns
    the pair it ends in or before, and which rows' sums are in doubt. UNIFIED: scores are powers of 2 as they are, not
    relative to the highest. TIMES: that many tiles here are one of the plan's.
    """
    GROUP: tl.constexpr = SPAN.GROUP
    BLOCK_M: tl.constexpr = SPAN.BLOCK_M
    BLOCK_N: tl.constexpr = FORM.BLOCK_N
    BLOCK_D: tl.constexpr = FORM.BLOCK_D
    program = tl.program_id(0)
    lane, element = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = lane // GROUP
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak = tl.zeros((BLOCK_M,), tl.float32) if UNIFIED else tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # by key of a tile: their sum is wanted once a pair, not once a tile
    masses = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    doubt = tl.zeros((BLOCK_M,), tl.int32)
    for unit in range(begin, end):
        start = tl.load(query_start_ptr + sequence)
        counted = tl.load(query_start_ptr + sequence + 1) - start
        context, queries = _own(tl.load(context_ptr + sequence), counted, few)
        own = own_keys(shared_ptr, shared_row, sequence, sequence >= 0, SPAN.CASCADE)
        whole = tiles_of(context, queries, own, rule.window, FORM.WINDOW, BLOCK_N * TIMES) * TIMES
        lowest = first_key(context, queries, own, rule.window, FORM.WINDOW)
        tile = lowest // (BLOCK_N * TIMES) * TIMES + step
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        there = (key < context) & (key >= lowest)
        live = lane < queries * GROUP
        inside = live[:, None] & (element < FORM.DIM)[None, :]
        token = (start + query).to(tl.int64)
        head = kv_head * GROUP + lane % GROUP
        table = sequence.to(tl.int64) * table_row
        its_q = tl.load(q.ptr + (token * q.token + head * q.head)[:, None] + element[None, :], mask=inside, other=0.0)
        k = load_held(of_head(keys, table, kv_head), tile, key, there, context, its_q, False, True, FORM)
        v = load_held(of_head(values, table, kv_head), tile, key, there, context, its_q, False, True, FORM)
        position = context - queries + query
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if FORM.WINDOW:
            seen = seen & (key[None, :] > position[:, None] - rule.window)
        fresh = (step == 0) | (unit == begin)  # what another pair left is not multiplied by zero: it may be NaN
        total = tl.where(fresh, 0.0, total)
        if not UNIFIED:
            peak = tl.where(fresh, float("-inf"), peak)
        masses = tl.where(fresh, 0.0, masses)
        if UNIFIED:
            score = scores(its_q, k, seen, rule, True, FORM)
            weight = tl.exp2(score * (LOG2_E if FORM.SOFT_CAP else rule.scale * LOG2_E))
            masses += weight
            total = add_values(total, weight, v, FORM)
        else:
            weight, keep, peak = weigh(peak, its_q, k, seen, rule, True, FORM)
            masses = masses * keep[:, None] + weight
            total = add_values(total * keep[:, None], weight, v, FORM)
        ends = step + 1 == whole
        begun = unit - step >= begin  # by this program
        if ends | (unit + 1 == end):
            mass = tl.sum(masses, 1)
            if UNIFIED:
                doubt = doubt | (_doubtful(mass) & live & (context > 0)).to(tl.int32)
            result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
            if SPAN.CASCADE & ends & begun & (own > 0):
                at = _place(shared_ptr, shared_row, sequence, sequence >= 0, kv_head, SPAN) * GROUP + lane
                tl.store(rest.ptr + at.to(tl.int64)[:, None] * BLOCK_D + element[None, :], result, mask=inside)
                tl.store(rest.peaks + at, peak + tl.log2(mass), mask=live)
            elif ends & begun:
                at_out = (token * out.token + head * out.head)[:, None] + element[None, :]
                tl.store(out.ptr + at_out, result.to(out.ptr.dtype.element_ty), mask=inside)
                if SPAN.LSE:
                    tl.store(sums.ptr + token * sums.token + head, (peak + tl.log2(mass)) / LOG2_E, mask=live)
            else:
                place = ((program * 2 + begun.to(tl.int32)) * BLOCK_M + lane).to(tl.int64)
                tl.store(left.ptr + place[:, None] * BLOCK_D + element[None, :], result, mask=inside)
                tl.store(left.peaks + place, peak + tl.log2(mass), mask=live)
        step = tl.where(ends, 0, step + 1)
        kv_head += ends.to(tl.int32)
        sequence += (kv_head == SPAN.KV_HEADS).to(tl.int32)
        kv_head = tl.where(kv_head == SPAN.KV_HEADS, 0, kv_head)
    return sequence, kv_head, doubt


@launchable(
    do_not_specialize=["table_ptr", "query_start_ptr", "context_ptr", "few", "window", "table_row", "shared_row"]
)
def _decode_kernel(
    q_ptr, out_ptr, sums_ptr, part_ptr, part_peak_ptr, ticket_ptr, k_ptr, v_ptr, table_ptr, query_start_ptr, context_ptr,
    common_ptr, common_peak_ptr, rest_ptr, rest_peak_ptr, common_ticket_ptr, plan_ptr, shared_ptr,
    k_shared, v_shared, few, window,
    q_token, q_head, out_token, out_head, k_block, k_head, k_row, v_block, v_head, v_row, table_row, shared_row, scale, soft_cap,
    CASCADE: tl.constexpr, COMMON_M: tl.constexpr, COMMON_N: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, LSE: tl.constexpr, UNIFIED: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    q, out, rule = Rows(q_ptr, q_token, q_head), Rows(out_ptr, out_token, out_head), Rule(scale, soft_cap, window)
    sums = Rows(sums_ptr, GROUP * KV_HEADS, 1)
    left, common, rest = (
        Parts(part_ptr, part_peak_ptr),
        Parts(common_ptr, common_peak_ptr),
        Parts(rest_ptr, rest_peak_ptr),
    )
    keys = Held(k_ptr, k_ptr, k_shared, table_ptr, k_block, k_head, k_row)
    values = Held(v_ptr, v_ptr, v_shared, table_ptr, v_block, v_head, v_row)
    SPAN: tl.constexpr = Span(CASCADE, GROUP, KV_HEADS, COMMON_M, BLOCK_G, BLOCK_M, BLOCK_P, LSE)
    FORM: tl.constexpr = Form(KV, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, WINDOW, SOFT_CAP)
    COMMON: tl.constexpr = Form(KV, BLOCK_SIZE, DIM, BLOCK_D, COMMON_N, False, SOFT_CAP)
    if CASCADE:
        attend_shared(
            q, out, common, rest, common_ticket_ptr, keys, values, table_row, plan_ptr, shared_ptr, shared_row, rule, SPAN, COMMON
        )  # fmt: skip
    record = plan_ptr + program * FIELDS
    begin, end = tl.load(record + BEGIN), tl.load(record + END)
    sequence, kv_head, step = tl.load(record + SEQUENCE), tl.load(record + HEAD), tl.load(record + STEP)
    if begin < end:
        first_sequence, first_head, first_step = sequence, kv_head, step
        sequence, kv_head, doubt = _own_span(
            q, out, sums, left, rest, keys, values, table_row, query_start_ptr, context_ptr, shared_ptr, shared_row,
            begin, end, first_sequence, first_head, first_step, few, rule, SPAN, FORM, UNIFIED, 1,
        )  # fmt: skip
        if UNIFIED:  # noqa: SIM102  this one is compiled away
            if tl.max(doubt, 0) > 0:
                tl.debug_barrier()  # what is in doubt is written before it is written over
                AGAIN: tl.constexpr = Form(KV, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N // TIMES, WINDOW, SOFT_CAP)
                _own_span(
                    q, out, sums, left, rest, keys, values, table_row, query_start_ptr, context_ptr, shared_ptr, shared_row,
                    begin * TIMES, end * TIMES, first_sequence, first_head, first_step * TIMES, few, rule, SPAN, AGAIN, False, TIMES,
                )  # fmt: skip
        which = tl.arange(0, 2)  # the pair continued, the pair begun
        firsts, lasts = tl.load(record + FIRST_0 + 2 * which), tl.load(record + LAST_0 + 2 * which)
        split = firsts <= lasts
        complete = which * 0
        if tl.max(split.to(tl.int32), 0) > 0:
            tl.debug_barrier()  # parts of all threads before the tickets of one
            arrived = tl.atomic_add(ticket_ptr + firsts, 1, mask=split, sem="acq_rel")
            complete = (split & (arrived == lasts - firsts)).to(tl.int32)
            tl.store(ticket_ptr + firsts, 0, mask=complete > 0)  # as the next launch wants it
            for pair in range(2):
                if tl.sum(tl.where(which == pair, complete, 0), 0) > 0:
                    its_sequence = tl.where(pair == 0, first_sequence, sequence)
                    its_head = tl.where(pair == 0, first_head, kv_head)
                    place = sequence * 0 - 1
                    if CASCADE:
                        shares = own_keys(shared_ptr, shared_row, its_sequence, its_sequence >= 0, CASCADE) > 0
                        at = _place(shared_ptr, shared_row, its_sequence, shares, its_head, SPAN)
                        place = tl.where(shares, at, -1)
                    its_first, its_last = (
                        tl.sum(tl.where(which == pair, firsts, 0), 0),
                        tl.sum(tl.where(which == pair, lasts, 0), 0),
                    )
                    _merge(
                        its_sequence, its_head, its_first, its_last, place, out, sums, left, rest, query_start_ptr, SPAN, FORM, UNIFIED
                    )  # fmt: skip
        if CASCADE:  # noqa: SIM102  this one is compiled away
            if tl.load(record + SHARED_LINE) > 0:
                common_span = tl.load(record + SHARED_SPAN)
                merged_first = tl.sum(tl.where(which == 0, complete, 0), 0)
                merged_last = tl.sum(tl.where(which == 1, complete, 0), 0)
                # parts; smaller heads have more pairs a program and gain nothing by it
                AT_ONCE: tl.constexpr = 4 if BLOCK_D == 128 else 1
                # pairs: as many as registers hold
                SETTLED: tl.constexpr = COMMON_M // BLOCK_G // (2 if AT_ONCE > 1 else 1)
                some = first_sequence * KV_HEADS + first_head
                past = sequence * KV_HEADS + kv_head  # pairs before it are done with
                continued = tl.where(first_step > 0, some, -1)
                # a pair may begin before and end behind this span
                past += tl.where(past == some, tl.maximum(merged_first, merged_last), merged_last)
                while some < past:
                    each = some + tl.arange(0, SETTLED)
                    done = (each < past) & ((each != continued) | (merged_first > 0))
                    its = each // KV_HEADS
                    done = done & (own_keys(shared_ptr, shared_row, its, done, CASCADE) > 0)
                    settle(
                        tl.load(shared_ptr + CHUNK * shared_row + its, mask=done, other=0),
                        tl.load(shared_ptr + SLOT * shared_row + its, mask=done, other=0), each % KV_HEADS, done,
                        out, common, rest, common_ticket_ptr, shared_ptr, common_span, shared_row, SPAN, COMMON, AT_ONCE,
                    )  # fmt: skip
                    some += SETTLED


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
    call: Attended, few: int, tiles: Tiles, plan: Plan, scratch: Scratch, common: Common | None, unified: bool
) -> None:
    """Fills ``out`` for the sequences with 1 to ``few`` queries. See PagedAttention; ``few`` × group heads fit into
    ``tiles.rows``.

    ``plan`` is this step's, with this window. ``common``: scratch memory for what sequences share, needed if the plan
    says that some do. ``unified``: not for float16, whose weights reach from 2⁻²⁴ to 2¹⁶.
    """
    q, out, k_cache, v_cache, inputs, scale, window, soft_cap, quantized, lse = call
    form = call.form
    block_g = triton.next_power_of_2(form["GROUP"])
    shared = plan.shared
    parts = (scratch.parts, scratch.peaks, scratch.parts, scratch.peaks, scratch.tickets)  # of no use
    if shared is not None:
        assert common is not None, "a plan in which sequences may share keys needs memory for that"
        parts = (common.parts, common.peaks, common.rest, common.rest_peaks, common.tickets)
    _decode_kernel[(plan.spans.shape[0],)](
        q, out, scratch.peaks if lse is None else lse, scratch.parts, scratch.peaks, scratch.tickets, k_cache, v_cache,
        inputs.block_table, inputs.query_start, inputs.context_len, *parts, plan.spans, plan.spans if shared is None else shared,
        *scales_of(k_cache, v_cache, quantized), few, window or MAX_WINDOW,
        *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], inputs.block_table.stride(0),
        0 if shared is None else shared.stride(0), scale, soft_cap or 0.0,
        CASCADE=shared is not None, COMMON_M=ROWS, COMMON_N=tiles.common,
        **form, KV_HEADS=k_cache.shape[1], BLOCK_M=tiles.rows, BLOCK_N=tiles.keys,
        BLOCK_G=block_g, BLOCK_P=max(1, min(8, 8192 // (block_g * form["BLOCK_D"]))),
        LSE=lse is not None, UNIFIED=unified, TIMES=max(1, tiles.keys // _AGAIN), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
