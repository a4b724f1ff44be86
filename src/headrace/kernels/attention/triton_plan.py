# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Who computes what in the decode kernel: decided on the device, once for all layers of a step.

What lives here: the launch that decides, and the layout of its decision. What may not: attention, which sequences share
keys (triton_sharing.py).

    sequence           | 0                 | 1     | 2                     One line of tiles, sequence by sequence, KV
    head by KV head,
    KV head            | 0       | 1       | 0 | 1 | 0         | 1         cut into equal spans, one a program
    (Stream-K, Osama et al.
    tile               | . . . . | . . . . | . | . | . . . . . | . . . . . 2023; LeanAttention, Sanovar et al. 2024).
    Uneven lengths cost
    program            | 0     | 1     | 2     | 3     | 4     | 5     |   nothing, and the launch is the same for any:
    it can be captured.

Every sequence has at least one tile, if only to pass it by: one of no key, for one without context or for the other
kernel. Keys that sequences share are cut likewise, in a line of their own, and left out of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention.triton_prefill import MAX_WINDOW
from headrace.kernels.attention.triton_sharing import (
    AHEAD,
    FEWEST,
    LEAST_SAVED,
    LINES,
    OWN,
    PAIRS,
    TOKENS,
    UNIT,
    choose_depth,
    form_groups,
    members,
)
from headrace.kernels.build.launch import launchable
from headrace.kernels.inputs import AttentionInputs

if TYPE_CHECKING:
    from headrace.kernels.attention.paged import Tiles

MIN_SPAN = 4  # tiles a program is worth starting for, where contexts are long and sequences few
AT_ONCE = 256  # sequences, or programs, looked at in one go
# keys of a sequence, up to which warps take pairs whole: longer ones fill spans evenly as they are
_MOST_ALIKE = tl.constexpr(1024)
_LEAST_SHARED = 256  # keys a program is worth starting for, of those that sequences share
_SAVED_OF_CODES = (
    4096  # tokens of each sequence that need not be read again: the kernel in CUDA C++ is that much quicker
)
# Of each program, [programs, FIELDS] int32: its span of the line; sequence, KV head and tile it begins with; first and
# last program of the pair it continues, and of the one it leaves unfinished (first > last: there is none). Then its
# span of the line of shared keys, its first chunk, the length of a span and of that line. Then the context of the
# sequence it begins with; then, where that was asked for, whether sequences are so many and so alike that warps should
# take pairs whole, in place of all that is said here.
BEGIN, END, SEQUENCE, HEAD, STEP, FIRST_0, LAST_0, FIRST_1, LAST_1 = (tl.constexpr(field) for field in range(9))
SHARED_BEGIN, SHARED_END, SHARED_CHUNK, SHARED_SPAN, SHARED_LINE = (tl.constexpr(field) for field in range(9, 14))
CONTEXT, ALIKE = tl.constexpr(14), tl.constexpr(15)
FIELDS = tl.constexpr(16)


@triton.jit
def first_key(context, queries, begin, window, WINDOW: tl.constexpr):
    """The first key to read for a sequence: any of its queries sees it, and it is not read for many at once."""
    return tl.maximum(context - queries + 1 - window, 0) if WINDOW else begin


@triton.jit
def tiles_of(context, queries, begin, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.maximum(tl.cdiv(context, BLOCK_N) - first_key(context, queries, begin, window, WINDOW) // BLOCK_N, 1)


@triton.jit
def own_keys(shared_ptr, shared_row, sequence, inside, CASCADE: tl.constexpr):
    """The first key that is the sequence's alone."""
    return tl.load(shared_ptr + OWN * shared_row + sequence, mask=inside, other=0) if CASCADE else sequence * 0


@triton.jit
def _measure(
    query_start_ptr, context_ptr, shared_ptr, ahead_ptr, sequences, shared_row, few, window,
    CASCADE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BEGINNING: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Writes how many tiles lie before each sequence; returns those of all, and of the longest."""
    line, longest = sequences * 0, sequences * 0
    for some in range(0, sequences, BLOCK_S):
        each = some + tl.arange(0, BLOCK_S)
        inside = each < sequences
        queries = tl.load(query_start_ptr + each + 1, mask=inside, other=0) - tl.load(
            query_start_ptr + each, mask=inside, other=0
        )
        context = tl.load(context_ptr + each, mask=inside, other=0)
        context, queries = tl.where(queries <= few, context, 0), tl.where(queries <= few, queries, 0)
        begin = own_keys(shared_ptr, shared_row, each, inside, CASCADE)
        units = tl.where(inside, BEGINNING + tiles_of(context, queries, begin, window, WINDOW, BLOCK_N), 0)
        upto = line + tl.cumsum(units, 0)
        tl.store(ahead_ptr + each, upto - units, mask=inside)
        line += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
    tl.store(ahead_ptr + sequences, line)
    return line, longest


@triton.jit
def _holder(ahead_ptr, sequences, unit):
    """Which sequence tile ``unit`` belongs to: the last with no more tiles before it."""
    low, high, step = unit * 0, unit * 0 + sequences, sequences
    while step > 0:
        middle = (low + high) // 2
        before = tl.load(ahead_ptr + middle) <= unit
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
        step = step // 2
    return low


@triton.jit
def _locate(ahead_ptr, sequences, unit, KV_HEADS: tl.constexpr):
    """Sequence, KV head and tile within the pair of unit ``unit`` of all heads' line, and the pair's tiles."""
    sequence = _holder(ahead_ptr, sequences, unit // KV_HEADS)
    before = tl.load(ahead_ptr + sequence)
    whole = tl.load(ahead_ptr + sequence + 1) - before
    within = unit - before * KV_HEADS
    return sequence, within // whole, within % whole, whole


@triton.jit
def _cut(
    plan_ptr, ahead_ptr, context_ptr, line, longest, sequences, programs,
    KV_HEADS: tl.constexpr, WHOLE: tl.constexpr, FEWEST_TILES: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Every program's span."""
    # more parts cost more than they gain
    least = tl.maximum(tl.minimum(longest, WHOLE), tl.minimum(tl.cdiv(longest, 16), FEWEST_TILES))
    span = tl.maximum(tl.cdiv(line * KV_HEADS, programs), least)
    for some in range(0, programs, BLOCK_S):
        program = some + tl.arange(0, BLOCK_S)
        inside = program < programs
        begin = tl.minimum(program * span, line * KV_HEADS)
        end = tl.minimum(begin + span, line * KV_HEADS)
        at = plan_ptr + program * FIELDS
        tl.store(at + BEGIN, begin, mask=inside)
        tl.store(at + END, end, mask=inside)
        sequence, head, step, whole = _locate(ahead_ptr, sequences, tl.minimum(begin, line * KV_HEADS - 1), KV_HEADS)
        tl.store(at + SEQUENCE, sequence, mask=inside)
        tl.store(at + HEAD, head, mask=inside)
        tl.store(at + STEP, step, mask=inside)
        tl.store(at + CONTEXT, tl.load(context_ptr + sequence, mask=inside, other=0), mask=inside)
        tl.store(at + FIRST_0, tl.where(step > 0, (begin - step) // span, 1), mask=inside)
        tl.store(at + LAST_0, tl.where(step > 0, (begin - step + whole - 1) // span, 0), mask=inside)
        _, _, step, whole = _locate(ahead_ptr, sequences, tl.maximum(end - 1, 0), KV_HEADS)
        leaves = (begin < end) & (step + 1 < whole) & (end - 1 - step >= begin)
        tl.store(at + FIRST_1, tl.where(leaves, program, 1), mask=inside)
        tl.store(at + LAST_1, tl.where(leaves, (end - 2 - step + whole) // span, 0), mask=inside)


@triton.jit
def _mark_alike(
    plan_ptr, context_ptr, sequences, programs,
    KV_HEADS: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Whether half of the warps or more would have a pair, and none a tile and a half more than the average: a warp
    that is left alone reads 10 KB a µs, and what can be gained are some 3 µs. Sequences of no key are none.
    """
    longest, there, total = sequences * 0, sequences * 0, (sequences * 0).to(tl.int64)
    for some in range(0, sequences, BLOCK_S):
        each = some + tl.arange(0, BLOCK_S)
        context = tl.load(context_ptr + each, mask=each < sequences, other=0)
        longest = tl.maximum(longest, tl.max(context, 0))
        there += tl.sum((context > 0).to(tl.int32), 0)
        total += tl.sum(context.to(tl.int64), 0)
    alike = (
        (2 * there * KV_HEADS >= WARPS)
        & (longest <= _MOST_ALIKE)
        & ((longest - 3 * BLOCK_N // 2).to(tl.int64) * there <= total)
    )
    for some in range(0, programs, BLOCK_S):
        program = some + tl.arange(0, BLOCK_S)
        tl.store(plan_ptr + program * FIELDS + ALIKE, (program * 0 + alike).to(tl.int32), mask=program < programs)


@triton.jit
def _cut_shared(
    plan_ptr, shared_ptr, shared_row, sequences, programs, most,
    KV_HEADS: tl.constexpr, COMMON_N: tl.constexpr, LEAST_KEYS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Every program's span of the line of shared keys. ``most`` that a sequence shares: nothing was written if that is
    0."""
    # the last is no chunk: it has all before it
    line = tl.load(shared_ptr + AHEAD * shared_row + sequences - 1) // COMMON_N * KV_HEADS
    line = tl.where(most > 0, line, 0)
    span = tl.maximum(tl.cdiv(line, programs), LEAST_KEYS // COMMON_N)
    for some in range(0, programs, BLOCK_I):
        program = some + tl.arange(0, BLOCK_I)
        inside = program < programs
        begin = tl.minimum(program * span, line)
        chunk = program * 0
        if line > 0:
            for begins in range(0, sequences, BLOCK_S):
                each = begins + tl.arange(0, BLOCK_S)
                tokens = tl.load(shared_ptr + TOKENS * shared_row + each, mask=each < sequences, other=0)
                upto = tokens + tl.load(shared_ptr + AHEAD * shared_row + each, mask=each < sequences, other=0)
                passed = (tokens > 0)[None, :] & (upto[None, :] <= (begin // KV_HEADS * COMMON_N)[:, None])
                chunk += tl.sum(passed.to(tl.int32), 1)
        at = plan_ptr + program * FIELDS
        tl.store(at + SHARED_BEGIN, begin, mask=inside)
        tl.store(at + SHARED_END, tl.minimum(begin + span, line), mask=inside)
        tl.store(at + SHARED_CHUNK, chunk, mask=inside)
        tl.store(at + SHARED_SPAN, span, mask=inside)
        tl.store(at + SHARED_LINE, line, mask=inside)


@launchable(
    do_not_specialize=[
        "table_ptr",
        "query_start_ptr",
        "context_ptr",
        "sequences",
        "programs",
        "few",
        "window",
        "table_row",
    ]
)
def _plan_kernel(
    table_ptr, query_start_ptr, context_ptr, plan_ptr, ahead_ptr, shared_ptr, ticket_ptr, sequences, programs, few, window, table_row,
    CASCADE: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    COMMON_N: tl.constexpr, MEMBERS: tl.constexpr, MOST_CHUNKS: tl.constexpr, UNIT: tl.constexpr, LEAST: tl.constexpr,
    BEGINNING: tl.constexpr, WHOLE: tl.constexpr, FEWEST_TILES: tl.constexpr, LEAST_KEYS: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_I: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    last = True
    if CASCADE:
        choose_depth(
            tl.program_id(0), table_ptr, query_start_ptr, context_ptr, shared_ptr, sequences, sequences, table_row,
            BLOCK_SIZE, UNIT, LEAST, BLOCK_S, BLOCK_K,
        )  # fmt: skip
        tl.debug_barrier()
        last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == sequences - 1
    if last:
        if CASCADE:
            tl.store(ticket_ptr, 0)
            most = form_groups(
                query_start_ptr, shared_ptr, sequences, sequences, MEMBERS, MOST_CHUNKS, LEAST, BLOCK_S, BLOCK_I
            )
            _cut_shared(
                plan_ptr,
                shared_ptr,
                sequences,
                sequences,
                programs,
                most,
                KV_HEADS,
                COMMON_N,
                LEAST_KEYS,
                BLOCK_S,
                BLOCK_I,
            )
        line, longest = _measure(
            query_start_ptr, context_ptr, shared_ptr, ahead_ptr, sequences, sequences, few, window, CASCADE, WINDOW, BLOCK_N, BEGINNING, BLOCK_S
        )  # fmt: skip
        tl.debug_barrier()
        _cut(
            plan_ptr, ahead_ptr, context_ptr, line, longest, sequences, programs, KV_HEADS, WHOLE, FEWEST_TILES, BLOCK_S
        )
        if WARPS:
            _mark_alike(plan_ptr, context_ptr, sequences, programs, KV_HEADS, WARPS, BLOCK_N, BLOCK_S)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's decision. ``shared`` [LINES, sequences], int32, as triton_sharing.py lays it out; None: every sequence
    reads all its keys."""

    spans: Tensor  # [programs, FIELDS], int32
    shared: Tensor | None


def make_plan(
    inputs: AttentionInputs,
    window: int | None,
    few: int,
    programs: int,
    group: int,
    kv_heads: int,
    tiles: Tiles,
    ticket: Tensor | None,  # [1], int32, zero between launches; None: nobody shares
    whole: int = 2,  # tiles of a pair that is not cut
    beginning: int = 0,  # tiles without keys that each pair begins with: so much time its beginning and end take
    warps: int = 0,  # of all programs, for which ALIKE is said
) -> Plan:
    """For sequences of 1 to ``few`` queries; at least one sequence of any length."""
    sequences, device = inputs.context_len.shape[0], inputs.context_len.device
    spans = torch.empty((programs, FIELDS.value), dtype=torch.int32, device=device)
    ahead = torch.empty(sequences + 1, dtype=torch.int32, device=device)
    cascade = cascades(inputs, window, group, ticket)
    shared = torch.empty((LINES, sequences), dtype=torch.int32, device=device) if cascade else None
    _plan_kernel[(sequences if cascade else 1,)](
        inputs.block_table, inputs.query_start, inputs.context_len, spans, ahead,
        ahead if shared is None else shared, ahead if ticket is None else ticket,
        sequences, programs, few, window or MAX_WINDOW, inputs.block_table.stride(0),
        CASCADE=cascade, WINDOW=window is not None, KV_HEADS=kv_heads, BLOCK_SIZE=inputs.block_size, BLOCK_N=tiles.keys,
        COMMON_N=tiles.common, MEMBERS=members(group), MOST_CHUNKS=PAIRS // kv_heads, UNIT=UNIT, LEAST=LEAST_SAVED,
        BEGINNING=beginning, WHOLE=whole, FEWEST_TILES=MIN_SPAN, LEAST_KEYS=_LEAST_SHARED, BLOCK_S=AT_ONCE, BLOCK_K=16, BLOCK_I=32,
        WARPS=warps, num_warps=4,
    )  # fmt: skip
    return Plan(spans, shared)


def empty_plan(inputs: AttentionInputs, window: int | None, programs: int, group: int, ticket: Tensor | None) -> Plan:
    """As ``make_plan`` would make it for these arguments, but that nobody does anything by it."""
    device = inputs.context_len.device
    spans = torch.zeros((programs, FIELDS.value), dtype=torch.int32, device=device)
    spans[:, [FIRST_0.value, FIRST_1.value]] = 1  # behind the last ones: there are none
    cascade = cascades(inputs, window, group, ticket)
    return Plan(
        spans, torch.zeros((LINES, inputs.context_len.shape[0]), dtype=torch.int32, device=device) if cascade else None
    )


def may_group(sequences: int, group: int) -> bool:
    """Whether so many sequences are worth looking at for keys that they share."""
    return sequences >= FEWEST and members(group) > 1  # chunks < sequences


def least_saved(sequences: int, *, codes: bool) -> int:
    """How many tokens that need not be read again are worth looking for. ``codes``: cuda_rope.py would read them all."""
    return max(LEAST_SAVED, sequences * _SAVED_OF_CODES) if codes else LEAST_SAVED


def may_share(inputs: AttentionInputs, group: int, *, codes: bool = False) -> bool:
    """Whether the step's sequences are looked at for keys that they share. ``codes``: as for ``least_saved``."""
    sequences, shared = inputs.context_len.shape[0], inputs.shared_tokens
    return may_group(sequences, group) and (shared is None or shared >= least_saved(sequences, codes=codes))


def cascades(
    inputs: AttentionInputs, window: int | None, group: int, ticket: Tensor | None, *, codes: bool = False
) -> bool:
    """Whether keys that sequences share are read once for many."""
    return ticket is not None and window is None and may_share(inputs, group, codes=codes)
