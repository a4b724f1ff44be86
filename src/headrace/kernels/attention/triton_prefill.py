# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Attention of sequences with many queries: one program for a run of queries and one KV head.

What lives here: the kernel, and what triton_decode.py and triton_cascade.py share: loading a tile of keys, steps of the
online softmax. What may not: choosing tiles or kernels (paged.py).

    sequence            | 0 (a long prompt)      | 1 (one token) | 2          Which sequence a run of queries belongs to
    is found on the
    run of queries      | 0      1      2        | 3             | 4     5    device. The last queries of a sequence see
    most keys, so
    program             | 5      4      3        | 2             | 1     0    the last run goes first; one of few
    queries ends at once.

Rows of a tile are (query, head of the group) pairs, so that all query heads of a KV head share each tile of keys. Tiles
of keys lie at absolute multiples of BLOCK_N, whatever the chunk; a tile in which a row sees nothing leaves that row's
sums untouched, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.attention.triton_codes import (
    Form,
    Held,
    add_values,
    kind_of,
    load_codes,
    of_head,
    scaled_scores,
    scales_of,
)
from headrace.kernels.build.launch import launchable
from headrace.kernels.inputs import AttentionInputs, Quantized

if TYPE_CHECKING:
    from headrace.kernels.attention.paged import Tiles

LOG2_E = tl.constexpr(1.4426950408889634)
# that the second dimension of a grid takes; heads of one run go side by side, for the sake of the cache
_MOST_RUNS = 65535
_MOST_LEFT = 4096  # parts of tokens that programs leave for each other: 64 MB for 32 heads of 128
MAX_WINDOW = 2**30  # in place of no window, for what is computed from it in vain


@triton.jit
def _sequence_of(run, query_start_ptr, sequences, QUERIES: tl.constexpr):
    """Sequence s owns the runs start[s] // QUERIES + s …: enough for any lengths, and found by halving, without a sum
    over those before."""
    low, high = sequences * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        begun = tl.load(query_start_ptr + middle) // QUERIES + middle <= run
        low, high = tl.where(begun, middle, low), tl.where(begun, high, middle)
    return low


@triton.jit
def _capped(score, cap):
    """cap · tanh(score / cap)."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (score / cap))))


class Rule(NamedTuple):
    """How keys count."""

    scale: Any
    soft_cap: Any
    window: Any


class Rows(NamedTuple):
    """Queries or results, with strides."""

    ptr: Any
    token: Any
    head: Any


class Parts(NamedTuple):
    """Sums that programs leave for each other: rows [.., BLOCK_D], and the peaks of rows."""

    ptr: Any
    peaks: Any


@triton.jit
def load_tile(held, tile, key, there, context, BULK: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Keys (or values) ``key`` of one head, [BLOCK_N, BLOCK_D]. MASKED: only those that are ``there``, zeros in place
    of others.

    Nothing is looked up beyond ``context``. BULK: the copy engine brings the tile, by a descriptor of rows [.., D];
    strides then count rows, and it brings what lies beyond a sequence in its last block too.
    """
    BLOCK_SIZE: tl.constexpr = FORM.BLOCK_SIZE
    element = tl.arange(0, FORM.BLOCK_D)
    first = tile * FORM.BLOCK_N
    if BULK:
        if MASKED:
            block = tl.load(held.table + first // BLOCK_SIZE, mask=first < context, other=0).to(tl.int64)
        else:
            block = tl.load(held.table + first // BLOCK_SIZE).to(tl.int64)
        return held.rows.load([(block * held.block + held.head).to(tl.int32) + first % BLOCK_SIZE, 0])
    if BLOCK_SIZE % FORM.BLOCK_N == 0:  # one block, wherever the tile lies
        block = tl.load(held.table + first // BLOCK_SIZE, mask=first < context, other=0).to(tl.int64)
        # so that what differs by thread stays the same
        corner = held.ptr + block * held.block + held.head + first % BLOCK_SIZE * held.row
        at = corner + (tl.arange(0, FORM.BLOCK_N)[:, None] * held.row + element[None, :])
    else:
        if MASKED:
            blocks = tl.load(held.table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        else:
            blocks = tl.load(held.table + key // BLOCK_SIZE).to(tl.int64)
        rows = blocks * held.block + held.head + (key % BLOCK_SIZE).to(tl.int64) * held.row
        at = held.ptr + rows[:, None] + element[None, :]
    if MASKED:
        return tl.load(at, mask=there[:, None] & (element < FORM.DIM)[None, :], other=0.0)
    if FORM.DIM != FORM.BLOCK_D:
        return tl.load(at, mask=(element < FORM.DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def load_held(held, tile, key, there, context, like, BULK: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr):
    """A tile as ``load_tile`` has it, or of codes (triton_codes.py); with their scales and lows."""
    if FORM.KV:
        return load_codes(held, tile, key, there, context, like, FORM)
    else:
        return load_tile(held, tile, key, there, context, BULK, MASKED, FORM), key, key  # no scales


@triton.jit
def scores(q, held, seen, rule, MASKED: tl.constexpr, FORM: tl.constexpr):
    """Of ``q`` [M, D] with a tile's keys ``held`` [N, D]: [M, N], not scaled yet where nothing caps them. MASKED: −inf
    but where ``seen``."""
    k, k_scale, k_low = held
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if FORM.KV:
        score = scaled_scores(score, q, k_scale, k_low, FORM.KV)
    if FORM.SOFT_CAP:
        score = _capped(score * rule.scale, rule.soft_cap)
    return tl.where(seen, score, float("-inf")) if MASKED else score


@triton.jit
def weigh(peak, q, held, seen, rule, MASKED: tl.constexpr, FORM: tl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein 2018): weights of a tile's keys [M, N], by how much to
    lower what was summed up so far [M], the new peak [M].

    ``peak`` [M] (float32, powers of 2), ``q`` [M, D], keys ``held`` [N, D]. MASKED: a row uses the keys that ``seen``
    [M, N] says.
    """
    factor = LOG2_E if FORM.SOFT_CAP else rule.scale * LOG2_E  # above 0
    score = scores(q, held, seen, rule, MASKED, FORM)
    higher = tl.maximum(peak, tl.max(score, 1) * factor)
    # −inf: a row that has seen nothing yet
    shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weight = tl.exp2(score * factor - shift[:, None])  # one instruction for the product and the difference
    return weight, tl.exp2(peak - shift), higher


@triton.jit
def accumulate(
    sums, q, position, keys, values, first_tile, end_tile, first_key, context, rule,
    BULK: tl.constexpr, MASKED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Absorbs tiles first_tile … end_tile - 1 of keys into ``sums``: values [M, D], peak and mass [M]. Keys before
    first_key or from context on are not used.

    Not MASKED: the caller knows that every row sees every key of these tiles.
    """
    total, peak, mass = sums
    for tile in range(first_tile, end_tile):
        key = tile * FORM.BLOCK_N + tl.arange(0, FORM.BLOCK_N)
        there = (key < context) & (key >= first_key)
        k = load_held(keys, tile, key, there, context, q, BULK, MASKED, FORM)
        v, v_scale, v_low = load_held(values, tile, key, there, context, q, BULK, MASKED, FORM)
        if BULK and MASKED:
            v = tl.where(there[:, None], v, 0.0)  # what lies beyond a sequence may be NaN, and NaN · 0 would be too
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if FORM.WINDOW:
            seen = seen & (key[None, :] > position[:, None] - rule.window)
        weight, keep, peak = weigh(peak, q, k, seen, rule, MASKED, FORM)
        mass = mass * keep + tl.sum(weight, 1)
        total = add_values(total * keep[:, None], weight, (v, v_scale, v_low), FORM)
    return total, peak, mass


@triton.jit
def nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sums before the first key."""
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return tl.zeros((BLOCK_M, BLOCK_D), tl.float32), peak, tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def _fold(sums, part):
    """What was found so far with one more part, each [M, D], [M], [M]. A part in which a row saw nothing leaves it
    untouched, to the bit."""
    total, peak, mass = sums
    found, part_peak, part_mass = part
    higher = tl.maximum(peak, part_peak)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    keep, weight = tl.exp2(peak - shift), tl.exp2(part_peak - shift)
    return tl.fma(found, weight[:, None], total * keep[:, None]), higher, tl.fma(part_mass, weight, mass * keep)


@triton.jit
def _fold_stored(sums, row, live, inside, parts_ptr, sums_ptr, first_part, end_part, BLOCK_D: tl.constexpr):
    """The same of parts that programs left in memory."""
    element = tl.arange(0, BLOCK_D)
    for part in range(first_part, end_part):
        at = row + part
        found = tl.load(
            parts_ptr + at[:, None] * BLOCK_D + element[None, :], mask=inside, other=0.0, cache_modifier=".cg"
        )
        its_peak = tl.load(sums_ptr + 2 * at, mask=live, other=float("-inf"), cache_modifier=".cg")
        its_mass = tl.load(sums_ptr + 2 * at + 1, mask=live, other=0.0, cache_modifier=".cg")
        sums = _fold(sums, (found, its_peak, its_mass))
    return sums


@launchable(
    do_not_specialize=[
        "table_ptr",
        "query_start_ptr",
        "context_ptr",
        "tokens",
        "sequences",
        "few",
        "window",
        "table_row",
        "shares",
        "most_parts",
    ]
)
def _prefill_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, k_map, v_map, table_ptr, query_start_ptr, context_ptr, parts_ptr, sums_ptr, ticket_ptr,
    lse_ptr, k_shared, v_shared, tokens, sequences, few, window, shares, most_parts,
    q_token, q_head, out_token, out_head, k_block, k_head, k_row, v_block, v_head, v_row, table_row, scale, soft_cap,
    BULK: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, KV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr, UNIFORM: tl.constexpr,
    MANY_RUNS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    RUNS: tl.constexpr = 0 if MANY_RUNS else 1  # the dimension of the grid
    kv_head = tl.program_id(1 - RUNS)
    run = tl.num_programs(RUNS) - 1 - tl.program_id(RUNS)  # the last queries see most: they go first
    sequence = _sequence_of(run, query_start_ptr, sequences, QUERIES)
    if UNIFORM:
        start = tl.load(query_start_ptr + sequence)
        queries = tl.load(query_start_ptr + sequence + 1) - start
    else:
        # by several threads, which the compiler then takes to diverge
        bounds = tl.load(query_start_ptr + sequence + tl.arange(0, 2))
        start = tl.min(bounds, 0)
        queries = tl.max(bounds, 0) - start
    context = tl.load(context_ptr + sequence)
    first = (run - start // QUERIES - sequence) * QUERIES
    lane = tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + lane % GROUP
    if (first < queries) & (queries > few):
        query = first + lane // GROUP
        live = (query < queries) & (lane < QUERIES * GROUP)
        token = (start + query).to(tl.int64)
        inside = live[:, None] & (element < DIM)[None, :]
        q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + element[None, :], mask=inside, other=0.0)
        position = context - queries + query
        sums = nothing(BLOCK_M, BLOCK_D)
        lowest = context - queries + first  # position of the first query here
        end = tl.minimum(context, lowest + QUERIES)
        first_key = 0
        whole = tl.maximum(lowest + 1, 0) // BLOCK_N  # tiles before this one are seen by every row
        if WINDOW:
            first_key = tl.maximum(lowest + 1 - window, 0)
            whole = 0
        past = tl.cdiv(end, BLOCK_N)
        table = sequence.to(tl.int64) * table_row
        keys = of_head(Held(k_ptr, k_map, k_shared, table_ptr, k_block, k_head, k_row), table, kv_head)
        values = of_head(Held(v_ptr, v_map, v_shared, table_ptr, v_block, v_head, v_row), table, kv_head)
        rule = Rule(scale, soft_cap, window)
        FORM: tl.constexpr = Form(KV, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, WINDOW, SOFT_CAP)
        writes = True
        # keys in parts of a fixed size, each from nothing, folded in their order: by this program, or dealt out to
        # several
        if PART:
            TILES: tl.constexpr = PART // BLOCK_N
            share = tl.program_id(2)
            first_part, end_part = first_key // PART, tl.cdiv(end, PART)
            row = (token * (tl.num_programs(1 - RUNS) * GROUP) + head) * most_parts
            for part in range(first_part + share, end_part, shares):
                begin, stop = part * TILES, (part + 1) * TILES
                found = nothing(BLOCK_M, BLOCK_D)
                if not WINDOW:
                    found = accumulate(
                        found, q, position, keys, values, begin, tl.minimum(whole, stop), 0, context, rule, BULK, False, FORM
                    )  # fmt: skip
                begin = tl.maximum(tl.maximum(whole, begin), first_key // BLOCK_N)
                found = accumulate(
                    found, q, position, keys, values, begin, tl.minimum(past, stop), first_key, context, rule, BULK, True, FORM
                )  # fmt: skip
                if shares == 1:
                    sums = _fold(sums, found)
                else:
                    tl.store(parts_ptr + (row + part)[:, None] * BLOCK_D + element[None, :], found[0], mask=inside)
                    tl.store(sums_ptr + 2 * (row + part), found[1], mask=live)
                    tl.store(sums_ptr + 2 * (row + part) + 1, found[2], mask=live)
            if shares > 1:
                tl.debug_barrier()  # parts of all threads before the ticket of one
                ticket = ticket_ptr + run * tl.num_programs(1 - RUNS) + kv_head
                writes = tl.atomic_add(ticket, 1, sem="acq_rel") == shares - 1
                if writes:
                    tl.store(ticket, 0)  # as the next launch wants it
                    sums = _fold_stored(sums, row, live, inside, parts_ptr, sums_ptr, first_part, end_part, BLOCK_D)
        else:
            if not WINDOW:
                sums = accumulate(sums, q, position, keys, values, 0, whole, 0, context, rule, BULK, False, FORM)
            begin = tl.maximum(whole, first_key // BLOCK_N)
            sums = accumulate(sums, q, position, keys, values, begin, past, first_key, context, rule, BULK, True, FORM)
        total, peak, mass = sums
        out = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        at_out = (token * out_token + head * out_head)[:, None] + element[None, :]
        tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=inside & writes)
        if LSE:
            heads = tl.num_programs(1 - RUNS) * GROUP
            tl.store(lse_ptr + token * heads + head, (peak + tl.log2(mass)) / LOG2_E, mask=live & writes)
    if run == tl.num_programs(RUNS) - 1:  # tokens of no sequence
        for token in range(tl.load(query_start_ptr + sequences), tokens):
            at = ((lane * 0 + token).to(tl.int64) * out_token + head * out_head)[:, None] + element[None, :]
            mask = (lane < GROUP)[:, None] & (element < DIM)[None, :]
            tl.store(out_ptr + at, tl.zeros((BLOCK_M, BLOCK_D), out_ptr.dtype.element_ty), mask=mask)


def padded(head_dim: int) -> int:
    """What a matrix instruction takes in place of ``head_dim``."""
    return max(16, 1 << (head_dim - 1).bit_length())


def bulk_keys(k_cache: Tensor, v_cache: Tensor) -> int:
    """The largest power of 2 of keys that the copy engine can bring at once: rows of one block, one after another; 0 if
    it cannot."""
    size, dim = k_cache.shape[2:]
    aligned = all(stride % dim == 0 for cache in (k_cache, v_cache) for stride in cache.stride()[:2])
    fits = aligned and k_cache.stride(2) == v_cache.stride(2) == dim and dim * k_cache.element_size() % 16 == 0
    fits = fits and max(_num_rows(k_cache), _num_rows(v_cache)) < 2**31  # it counts rows in 32 bits
    return size & -size if fits else 0


def cache_arguments(k_cache: Tensor, v_cache: Tensor, keys: int, *, bulk: bool) -> tuple[Any, ...]:
    """Both caches as ``load_tile`` wants them, then six strides: of block, head and row, in elements, or with ``bulk``
    in rows."""
    if not bulk:
        return k_cache, v_cache, *k_cache.stride()[:3], *v_cache.stride()[:3]
    dim = k_cache.shape[3]
    strides = (stride // dim for cache in (k_cache, v_cache) for stride in cache.stride()[:3])
    return _rows_map(k_cache, keys), _rows_map(v_cache, keys), *strides


def _rows_map(cache: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor of all rows from the first of ``cache`` to its last; those of other layers and of the other half lie
    between."""
    dim = cache.shape[3]
    return TensorDescriptor(cache, [_num_rows(cache), dim], [dim, 1], [keys, padded(dim)])


def _num_rows(cache: Tensor) -> int:
    (blocks, heads, size, dim), (block, head, row, _) = cache.shape, cache.stride()
    return ((blocks - 1) * block + (heads - 1) * head + (size - 1) * row) // dim + 1


class Attended(NamedTuple):
    """What PagedAttention is called with, and what it fills."""

    q: Tensor  # [T, Hq, D]
    out: Tensor  # [T, Hq, D]
    k_cache: Tensor  # [blocks, Hk, block_size, D]
    v_cache: Tensor  # [blocks, Hk, block_size, D]
    inputs: AttentionInputs
    scale: float
    window: int | None
    soft_cap: float | None
    quantized: Quantized | None = None
    lse: Tensor | None = None  # [T, Hq], float32

    @property
    def form(self) -> dict[str, Any]:
        """What each kernel is compiled for."""
        heads, dim = self.q.shape[1:]
        return {
            "GROUP": heads // self.k_cache.shape[1], "WINDOW": self.window is not None, "SOFT_CAP": self.soft_cap is not None,
            "KV": kind_of(self.quantized), "BLOCK_SIZE": self.inputs.block_size, "DIM": dim, "BLOCK_D": padded(dim),
        }  # fmt: skip


def attend(call: Attended, few: int, tiles: Tiles, bulk: bool, processors: int, tickets: Tensor) -> None:
    """Fills ``out`` for the sequences with more than ``few`` queries, and with zeros for tokens of no sequence. See
    PagedAttention.

    With ``tiles.part`` keys are absorbed in parts of so many, dealt out to several programs where runs of queries are
    fewer than processors. ``tickets`` [processors], int32, are zero between launches.
    """
    q, out, k_cache, v_cache, inputs, scale, window, soft_cap, quantized, lse = call
    shared = scales_of(k_cache, v_cache, quantized)
    (tokens, heads, dim), kv_heads, sequences = q.shape, k_cache.shape[1], inputs.context_len.shape[0]
    group = heads // kv_heads
    runs = tokens // (tiles.rows // group) + sequences
    keys, values, *strides = cache_arguments(k_cache, v_cache, tiles.keys, bulk=bulk)
    many, parts = runs > _MOST_RUNS, -(-inputs.max_context_len // tiles.part) if tiles.part else 1
    shares = max(1, min(parts, processors // (runs * kv_heads))) if tokens * parts <= _MOST_LEFT else 1
    left = torch.empty(
        (tokens, heads, parts, padded(dim)) if shares > 1 else (1,), dtype=torch.float32, device=q.device
    )
    sums = torch.empty((tokens, heads, parts, 2) if shares > 1 else (1,), dtype=torch.float32, device=q.device)
    _prefill_kernel[(*((runs, kv_heads) if many else (kv_heads, runs)), shares)](
        q, out, k_cache, v_cache, keys, values, inputs.block_table, inputs.query_start, inputs.context_len,
        left, sums, tickets, sums if lse is None else lse,
        *shared, tokens, sequences, few, window or MAX_WINDOW, shares, parts,
        *q.stride()[:2], *out.stride()[:2], *strides, inputs.block_table.stride(0), scale, soft_cap or 0.0,
        **call.form, BULK=bulk, BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, PART=tiles.part, UNIFORM=tiles.uniform, MANY_RUNS=many,
        LSE=lse is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
