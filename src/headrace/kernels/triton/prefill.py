# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Attention of sequences with many queries: one program for a run of queries and one KV head.

What lives here: the kernel, and ``accumulate``, the online softmax over tiles of keys that decode.py shares.
What may not: choosing tiles or kernels (attention.py).

Rows of a tile are (query, head of the group) pairs, so that all query heads of a KV head share each tile of keys. Tiles of keys lie at
absolute multiples of BLOCK_N, whatever the chunk; a tile in which a row sees nothing leaves that row's sums untouched, to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.layers.inputs import AttentionInputs

if TYPE_CHECKING:
    from headrace.kernels.triton.attention import Tiles

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(score, cap):
    """cap · tanh(score / cap)."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * (score / cap))))


@triton.jit
def accumulate(
    total, peak, mass, q, position,
    k_ptr, v_ptr, k_map, v_map, table_ptr, k_block, k_head, k_row, v_block, v_head, v_row,
    first_tile, end_tile, first_key, context, scale, soft_cap,
    BULK: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the keys of tiles first_tile … end_tile - 1 to the sums of each row (online softmax, Milakov and Gimelshein 2018).

    ``total`` [M, D], ``peak`` and ``mass`` [M] (float32; powers of 2), ``q`` [M, D], ``position`` [M]. Keys before first_key
    or from context on are not used. Not MASKED: the caller knows that every row sees every key of these tiles.
    ``k_head`` and ``v_head`` are offsets of the KV head. BULK: a tile lies in one block, and the copy engine brings it whole, by the
    descriptors ``k_map`` and ``v_map`` of rows [rows of all blocks and heads, D]; strides then count rows.
    """
    element = tl.arange(0, BLOCK_D)
    factor = LOG2_E if SOFT_CAP else scale * LOG2_E  # above 0
    for tile in range(first_tile, end_tile):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if MASKED:
            there = (key < context) & (key >= first_key)
        if BULK:
            block = tl.load(table_ptr + tile * BLOCK_N // BLOCK_SIZE).to(tl.int64)
            row = tile * BLOCK_N % BLOCK_SIZE
            k = k_map.load([(block * k_block + k_head).to(tl.int32) + row, 0])
            v = v_map.load([(block * v_block + v_head).to(tl.int32) + row, 0])
            if MASKED:
                v = tl.where(there[:, None], v, 0.0)  # what lies beyond a sequence may be NaN, and NaN · 0 would be too
        else:
            row = (key % BLOCK_SIZE).to(tl.int64)
            if MASKED:
                block = tl.load(table_ptr + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            else:
                block = tl.load(table_ptr + key // BLOCK_SIZE).to(tl.int64)
            k_at = k_ptr + (block * k_block + k_head + row * k_row)[:, None] + element[None, :]
            v_at = v_ptr + (block * v_block + v_head + row * v_row)[:, None] + element[None, :]
            if MASKED:
                k = tl.load(k_at, mask=there[:, None] & (element < DIM)[None, :], other=0.0)
                v = tl.load(v_at, mask=there[:, None] & (element < DIM)[None, :], other=0.0)
            elif DIM != BLOCK_D:
                k = tl.load(k_at, mask=(element < DIM)[None, :], other=0.0)
                v = tl.load(v_at, mask=(element < DIM)[None, :], other=0.0)
            else:
                k = tl.load(k_at)
                v = tl.load(v_at)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP:
            score = _capped(score * scale, soft_cap)
        if MASKED:
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * factor)
        shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher  # −inf: a row that has seen nothing yet
        weight = tl.exp2(score * factor - shift[:, None])  # one instruction for the product and the difference
        keep = tl.exp2(peak - shift)
        mass = mass * keep + tl.sum(weight, 1)
        total = tl.dot(weight.to(v.dtype), v, total * keep[:, None], input_precision=PRECISION)
        peak = higher
    return total, peak, mass


@triton.jit
def _prefill_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, k_map, v_map, table_ptr, query_start_ptr, context_ptr,
    tokens, sequences, q_token, q_head, out_token, out_head, k_block, k_head, k_row, v_block, v_head, v_row, table_row, scale, soft_cap,
    BULK: tl.constexpr, FEW: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    run = tl.num_programs(1) - 1 - tl.program_id(1)  # the last queries see most: they go first
    if PDL:
        gdc_wait()
    # Sequence s owns the runs start[s] // QUERIES + s …: enough for any lengths, and found without a table of runs.
    every = tl.arange(0, BLOCK_S)
    starts = tl.load(query_start_ptr + every, mask=every < sequences, other=0)
    sequence = tl.sum(((starts // QUERIES + every <= run) & (every < sequences)).to(tl.int32), 0) - 1
    start = tl.load(query_start_ptr + sequence)
    queries = tl.load(query_start_ptr + sequence + 1) - start
    context = tl.load(context_ptr + sequence)
    first = (run - start // QUERIES - sequence) * QUERIES
    lane = tl.arange(0, BLOCK_M)
    element = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + lane % GROUP
    if (first < queries) & (queries > FEW):
        query = first + lane // GROUP
        live = (query < queries) & (lane < QUERIES * GROUP)
        token = (start + query).to(tl.int64)
        inside = live[:, None] & (element < DIM)[None, :]
        q = tl.load(q_ptr + (token * q_token + head * q_head)[:, None] + element[None, :], mask=inside, other=0.0)
        position = context - queries + query
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_M,), tl.float32)
        lowest = context - queries + first  # position of the first query here
        end = tl.minimum(context, lowest + QUERIES)
        first_key = 0
        whole = tl.maximum(lowest + 1, 0) // BLOCK_N  # tiles before this one are seen by every row
        if WINDOW > 0:
            first_key = tl.maximum(lowest + 1 - WINDOW, 0)
            whole = 0
        k_head_at, v_head_at = kv_head.to(tl.int64) * k_head, kv_head.to(tl.int64) * v_head
        table = table_ptr + sequence.to(tl.int64) * table_row
        if WINDOW == 0:
            total, peak, mass = accumulate(
                total, peak, mass, q, position, k_ptr, v_ptr, k_map, v_map, table, k_block, k_head_at, k_row, v_block, v_head_at, v_row,
                0, whole, 0, context, scale, soft_cap,
                BULK, False, WINDOW, SOFT_CAP, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, PRECISION,
            )  # fmt: skip
        total, peak, mass = accumulate(
            total, peak, mass, q, position, k_ptr, v_ptr, k_map, v_map, table, k_block, k_head_at, k_row, v_block, v_head_at, v_row,
            tl.maximum(whole, first_key // BLOCK_N), tl.cdiv(end, BLOCK_N), first_key, context, scale, soft_cap,
            BULK, True, WINDOW, SOFT_CAP, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
        out = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(out_ptr + (token * out_token + head * out_head)[:, None] + element[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    if run == tl.num_programs(1) - 1:  # tokens of no sequence
        for token in range(tl.load(query_start_ptr + sequences), tokens):
            at = ((lane * 0 + token).to(tl.int64) * out_token + head * out_head)[:, None] + element[None, :]
            mask = (lane < GROUP)[:, None] & (element < DIM)[None, :]
            tl.store(out_ptr + at, tl.zeros((BLOCK_M, BLOCK_D), out_ptr.dtype.element_ty), mask=mask)
    if PDL:
        gdc_launch_dependents()


def padded(head_dim: int) -> int:
    """What a matrix instruction takes in place of ``head_dim``."""
    return max(16, 1 << (head_dim - 1).bit_length())


def bulk_keys(k_cache: Tensor, v_cache: Tensor) -> int:
    """The largest power of 2 of keys that the copy engine can bring at once: rows of one block, one after another; 0 if it cannot."""
    size, dim = k_cache.shape[2:]
    aligned = all(stride % dim == 0 for cache in (k_cache, v_cache) for stride in cache.stride()[:2])
    fits = aligned and k_cache.stride(2) == v_cache.stride(2) == dim and dim * k_cache.element_size() % 16 == 0
    return size & -size if fits else 0


def cache_arguments(k_cache: Tensor, v_cache: Tensor, keys: int, *, bulk: bool) -> tuple[Any, ...]:
    """Both caches as ``accumulate`` wants them, then six strides: of block, head and row, in elements, or with ``bulk`` in rows."""
    if not bulk:
        return k_cache, v_cache, *k_cache.stride()[:3], *v_cache.stride()[:3]
    dim = k_cache.shape[3]
    strides = (stride // dim for cache in (k_cache, v_cache) for stride in cache.stride()[:3])
    return _rows_map(k_cache, keys), _rows_map(v_cache, keys), *strides


def _rows_map(cache: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor of all rows from the first of ``cache`` to its last; those of other layers and of the other half lie between."""
    (blocks, heads, size, dim), (block, head, row, _) = cache.shape, cache.stride()
    rows = ((blocks - 1) * block + (heads - 1) * head + (size - 1) * row) // dim + 1
    return TensorDescriptor(cache, [rows, dim], [dim, 1], [keys, padded(dim)])


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
    tiles: Tiles,
    bulk: bool,
) -> None:
    """Fills ``out`` for the sequences with more than ``few`` queries, and with zeros for tokens of no sequence. See PagedAttention."""
    (tokens, heads, dim), kv_heads, sequences = q.shape, k_cache.shape[1], inputs.context_len.shape[0]
    runs = tokens // (tiles.rows // (heads // kv_heads)) + sequences
    keys, values, *strides = cache_arguments(k_cache, v_cache, tiles.keys, bulk=bulk)
    _prefill_kernel[(kv_heads, runs)](
        q, out, k_cache, v_cache, keys, values, inputs.block_table, inputs.query_start, inputs.context_len,
        tokens, sequences, *q.stride()[:2], *out.stride()[:2], *strides, inputs.block_table.stride(0),
        scale, soft_cap or 0.0,
        BULK=bulk, FEW=few, GROUP=heads // kv_heads, WINDOW=window or 0, SOFT_CAP=soft_cap is not None, BLOCK_SIZE=inputs.block_size, DIM=dim,
        BLOCK_D=padded(dim), BLOCK_M=tiles.rows, BLOCK_N=tiles.keys, BLOCK_S=triton.next_power_of_2(sequences),
        PRECISION="ieee", PDL=False, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
