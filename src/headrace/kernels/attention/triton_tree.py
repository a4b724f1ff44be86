# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Attention of tokens that form trees: a program for each of them and KV head, which reads all keys that it sees.

What lives here: that kernel. What may not: tokens one behind another, whose kernels write theirs before (paged.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.attention.triton_codes import Form, Held, add_values, of_head, scales_of
from headrace.kernels.attention.triton_prefill import MAX_WINDOW, Attended, Rule, load_held, nothing, weigh
from headrace.kernels.build.launch import launchable

_LONGEST = 64  # tokens of a tree: bits of an int64
_KEYS = 32


@triton.jit
def _ones(bits):
    """How many bits are set, of int64."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 0x7F).to(tl.int32)


@launchable(
    do_not_specialize=[
        "table_ptr",
        "query_start_ptr",
        "context_ptr",
        "first_ptr",
        "ancestors_ptr",
        "window",
        "table_row",
    ]
)
def _tree_kernel(
    q_ptr, out_ptr, k_ptr, v_ptr, table_ptr, query_start_ptr, context_ptr, first_ptr, ancestors_ptr, k_shared, v_shared, window,
    q_token, q_head, out_token, out_head, k_block, k_head, k_row, v_block, v_head, v_row, table_row, scale, soft_cap,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, KV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, kv_head = tl.program_id(0), tl.program_id(2)
    token = (tl.load(query_start_ptr + sequence) + tl.program_id(1)).to(tl.int64)
    if token < tl.load(query_start_ptr + sequence + 1):
        ancestors = tl.load(ancestors_ptr + token)
        if ancestors != 0:
            first, context = tl.load(first_ptr + sequence), tl.load(context_ptr + sequence)
            lane, element = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            inside = (lane < GROUP)[:, None] & (element < DIM)[None, :]
            head = (kv_head * GROUP + lane).to(tl.int64)
            q_at = (token * q_token + head * q_head)[:, None] + element[None, :]
            q = tl.load(q_ptr + q_at, mask=inside, other=0.0)
            table = sequence.to(tl.int64) * table_row
            keys = of_head(Held(k_ptr, k_ptr, k_shared, table_ptr, k_block, k_head, k_row), table, kv_head)
            values = of_head(Held(v_ptr, v_ptr, v_shared, table_ptr, v_block, v_head, v_row), table, kv_head)
            rule = Rule(scale, soft_cap, window)
            FORM: tl.constexpr = Form(KV, BLOCK_SIZE, DIM, BLOCK_D, BLOCK_N, WINDOW, SOFT_CAP)
            position = first + _ones(ancestors) - 1
            lowest = tl.maximum(first - window, 0) if WINDOW else 0
            total, peak, mass = nothing(BLOCK_M, BLOCK_D)
            for tile in range(lowest // BLOCK_N, (context + BLOCK_N - 1) // BLOCK_N):
                place = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                behind = tl.minimum(tl.maximum(place - first, 0), 62).to(tl.int64)
                seen = (place < first) | (((ancestors >> behind) & 1) != 0)
                seen = seen & (place < context)
                if WINDOW:  # a token of the tree stands where its ancestors end
                    before = _ones(ancestors & ((tl.full((BLOCK_N,), 2, tl.int64) << behind) - 1))
                    seen = seen & (tl.where(place < first, place, first + before - 1) > position - window)
                k = load_held(keys, tile, place, seen, context, q, False, True, FORM)
                v = load_held(values, tile, place, seen, context, q, False, True, FORM)
                seen = seen[None, :] & (lane < GROUP)[:, None]
                weight, keep, peak = weigh(peak, q, k, seen, rule, True, FORM)
                mass = mass * keep + tl.sum(weight, 1)
                total = add_values(total * keep[:, None], weight, v, FORM)
            result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
            out_at = (token * out_token + head * out_head)[:, None] + element[None, :]
            tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=inside)


def attend(call: Attended) -> None:
    """Fills ``out`` for the tokens of ``inputs.tree``. See PagedAttention."""
    q, out, k_cache, v_cache, inputs, scale, window, soft_cap, quantized, _ = call
    assert inputs.tree is not None
    form, kv_heads = call.form, k_cache.shape[1]
    grid = len(inputs.context_len), min(inputs.max_query_len, _LONGEST), kv_heads
    _tree_kernel[grid](
        q, out, k_cache, v_cache, inputs.block_table, inputs.query_start, inputs.context_len, inputs.tree.first, inputs.tree.ancestors,
        *scales_of(k_cache, v_cache, quantized), window or MAX_WINDOW, *q.stride()[:2], *out.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        inputs.block_table.stride(0), scale, soft_cap or 0.0,
        **form, BLOCK_M=max(16, triton.next_power_of_2(form["GROUP"])), BLOCK_N=_KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
