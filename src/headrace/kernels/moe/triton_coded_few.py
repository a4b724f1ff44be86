# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The sparse feed-forward of a few tokens over experts in codes of few bits: two launches, as triton_few.py has them.

What lives here: those kernels and their launches. What may not: tokens enough to share an expert's weights, laying
experts out (triton_coded.py), reading codes (linear/triton_codes.py).

    expand    (64 rows of gate and up in turns, pair)    routes the token again; act(gate · x) · (up · x)
    contract  (64 rows, pair)                            weight · (down · inner); a token's last program sums its experts

Where the format rounds inputs, each program rounds its own row again, which costs less than a launch before it, and
leaves it in memory for itself; others leave the same there. The second kernel begins while the first still reads
weights: from whom it is to read is known by then, but not promised, so it only asks for them to be brought nearer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import EightBits, Empty
from headrace.kernels.linear.coded import constants, views
from headrace.kernels.linear.coded_forms import stages_for
from headrace.kernels.linear.epilogue import PLAIN, Epilogue, Fused
from headrace.kernels.linear.packing import DEPTH, ROWS, Packed
from headrace.kernels.linear.triton_codes import BLOCK_BYTES, Blocks, _product, _split
from headrace.kernels.linear.triton_ends import Ends, _finish, _summed, ends_of
from headrace.kernels.moe.triton_routing import bring_nearer, choice_of, place_of, rstd_of
from headrace.kernels.norm.triton_activation import KINDS, act
from headrace.kernels.norm.triton_rounded import codes_of, scales_of
from headrace.spec import Activation

_TALL: tl.constexpr = tl.constexpr(ROWS)
_DEEP: tl.constexpr = tl.constexpr(DEPTH)
_PADDED: tl.constexpr = tl.constexpr(16)  # rows of x, of which the first is there


@triton.jit
def _rounded_again(x_ptr, rounded_ptr, rstd, WIDTH: tl.constexpr, EIGHT: tl.constexpr):
    """A row, times ``rstd``, as the format computes with it, at ``rounded_ptr``, where all threads of this program find
    it then.
    ``EIGHT``: whether there are 8 bits, elements of one scale (0: all), FP8 or int8, scales that are powers of two."""
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    SIZE: tl.constexpr = EIGHT[1] or BLOCK
    column = tl.arange(0, BLOCK)
    narrow = tl.load(x_ptr + column, mask=column < WIDTH, other=0.0)
    x = (narrow.to(tl.float32) * rstd).to(narrow.dtype).to(tl.float32).reshape(BLOCK // SIZE, SIZE)
    scale = scales_of(x, EIGHT[2], EIGHT[3])
    wide = (codes_of(x, scale, EIGHT[2]).to(tl.float32) * scale[:, None]).reshape(BLOCK)
    tl.store(rounded_ptr + column, wide.to(narrow.dtype), mask=column < WIDTH)
    tl.debug_barrier()


@launchable(do_not_specialize=["turns", "tiles", "tokens", "pieces"])
def _expand_coded_few_kernel(
    x_ptr, logits_ptr, squares_ptr, places_ptr, words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, rounded_ptr, inner_ptr, weights_ptr,
    experts_ptr, tickets_ptr, logits_row, turns, tiles, tokens, pieces, eps, NORMED: tl.constexpr,
    CODING: tl.constexpr, EIGHT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr, PLACED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    strip, pair = tl.program_id(0), tl.program_id(1)
    token, choice = (pair // TOP_K).to(tl.int64), pair % TOP_K
    if PDL:
        gdc_wait()
    expert, weight = choice_of(logits_ptr + token * logits_row, choice, EXPERTS, BLOCK_E, TOP_K, RENORMALIZE)
    if PLACED:
        expert = place_of(places_ptr, token, turns, expert, EXPERTS)
    if strip == 0:
        tl.store(weights_ptr + pair, weight)
        tl.store(experts_ptr + pair, expert)
        if choice == 0:
            SUMS: tl.constexpr = (HIDDEN + _TALL - 1) // _TALL
            each = tl.arange(0, triton.next_power_of_2(SUMS))
            tl.store(tickets_ptr + token * SUMS + each, 0, mask=each < SUMS)
    STEPS: tl.constexpr = (HIDDEN + _DEEP - 1) // _DEEP
    BYTES: tl.constexpr = STEPS * CODING[BLOCK_BYTES]
    end = tl.where(expert < 0, 0, STEPS) if PLACED else STEPS  # nothing to compute of another rank's pair
    block = tl.maximum(expert, 0).to(tl.int64) * tiles + strip
    if PDL:
        gdc_launch_dependents()
        if EIGHT[0]:
            bring_nearer(bytes_ptr + block * BYTES, BYTES)
    x_at, there = x_ptr + token * HIDDEN, tl.arange(0, _PADDED) == 0
    rstd = rstd_of(squares_ptr, token, tokens, pieces, eps, HIDDEN) if NORMED else 1.0
    if EIGHT[0]:
        _rounded_again(x_at, rounded_ptr + token * HIDDEN, rstd, HIDDEN, EIGHT)
        x_at = rounded_ptr + token * HIDDEN
    factor = tl.load(factor_ptr + block * _TALL + tl.arange(0, _TALL))
    total = _product(
        x_at + tl.zeros((_PADDED, 1), tl.int32), there, x_ptr, Blocks(words_ptr, shorts_ptr, bytes_ptr, table_ptr), factor,
        block * BYTES, 0, end, STEPS, HIDDEN, CODING, False, 1, _PADDED,
    )  # fmt: skip
    gate, up = _split(total, 1, _PADDED)
    gate, up = tl.sum(gate, 1), tl.sum(up, 1)
    if NORMED and not EIGHT[0]:
        gate, up = gate * rstd, up * rstd
    kind = inner_ptr.dtype.element_ty
    y = act(gate.to(kind).to(tl.float32), KIND) * up.to(kind).to(tl.float32)
    column = strip * (_TALL // 2) + tl.arange(0, _TALL // 2)
    tl.store(inner_ptr + pair.to(tl.int64) * INNER + column, y.to(kind), mask=column < INNER)


@launchable(do_not_specialize=["held", "tiles", "tokens"])
def _contract_coded_few_kernel(
    inner_ptr, words_ptr, shorts_ptr, bytes_ptr, factor_ptr, table_ptr, rounded_ptr, weights_ptr, experts_ptr, part_ptr, tickets_ptr,
    squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr, held, tiles, tokens,
    AROUND: tl.constexpr, CODING: tl.constexpr, EIGHT: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    PLACED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    strip, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    STEPS: tl.constexpr = (INNER + _DEEP - 1) // _DEEP
    BYTES: tl.constexpr = STEPS * CODING[BLOCK_BYTES]
    if PDL:
        guess = tl.load(experts_ptr + pair, volatile=True)
        guess = tl.where((guess >= 0) & (guess < held), guess, 0).to(tl.int64) * tiles + strip
        bring_nearer(bytes_ptr + guess * BYTES, BYTES)
        gdc_wait()
    expert, share = tl.load(experts_ptr + pair), tl.load(weights_ptr + pair)
    end = tl.where(expert < 0, 0, STEPS) if PLACED else STEPS
    block = tl.maximum(expert, 0).to(tl.int64) * tiles + strip
    factor = tl.load(factor_ptr + block * _TALL + tl.arange(0, _TALL))
    x_at, there = inner_ptr + pair * INNER, tl.arange(0, _PADDED) == 0
    if EIGHT[0]:
        _rounded_again(x_at, rounded_ptr + pair * INNER, 1.0, INNER, EIGHT)
        x_at = rounded_ptr + pair * INNER
    total = _product(
        x_at + tl.zeros((_PADDED, 1), tl.int32), there, inner_ptr, Blocks(words_ptr, shorts_ptr, bytes_ptr, table_ptr), factor,
        block * BYTES, 0, end, STEPS, INNER, CODING, False, 1, _PADDED,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    y = tl.sum(total, 1).to(y_ptr.dtype.element_ty).to(tl.float32)[:, None] * share
    token, column = (pair // TOP_K).to(tl.int32), strip * _TALL + tl.arange(0, _TALL)
    tile = token * ((HIDDEN + _TALL - 1) // _TALL) + strip
    complete, y = _summed(y, part_ptr, tickets_ptr, tile, pair % TOP_K, _TALL, 1, TOP_K)
    if complete:
        ends = Ends(squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr)
        _finish(y, y, y, strip, column, token + tl.arange(0, 1), ends, 0, tokens, HIDDEN, INNER, 0.0, AROUND)


def coded_few(
    x: Tensor, logits: Tensor, up: Packed, down: Packed, top_k: int, renormalize: bool, kind: Activation, places: Tensor | None,
    eights: tuple[EightBits | None, EightBits | None], held: int, empty: Empty, epilogue: Epilogue = PLAIN, *, pdl: bool,
) -> Fused:  # fmt: skip
    """As ``CodedMoe.computed``, with what stands ``epilogue`` it (reference.py). ``up``, ``down``: views of all ``held``
    experts. An expert's weights are read once for each token that takes it."""
    (tokens, hidden), num_experts, inner, x = x.shape, logits.shape[1], down.ins, x.contiguous()
    pairs, strips, first, second = tokens * top_k, triton.cdiv(hidden, ROWS), *eights
    y = empty((tokens, hidden), x.dtype, x.device)
    found, ends, _, made = ends_of(epilogue, None, y, strips, empty, 0)
    squares = ends[0] if epilogue.squares is None else epilogue.squares
    expanded = empty((tokens, top_k, inner), x.dtype, x.device)
    rounded, narrow = (
        behind if eight is None else empty(tuple(behind.shape), x.dtype, x.device)
        for eight, behind in ((first, x), (second, expanded))
    )
    parts, weights = (
        torch.empty(size, dtype=torch.float32, device=x.device) for size in (pairs * strips * ROWS, pairs)
    )
    experts, tickets = (torch.empty(size, dtype=torch.int32, device=x.device) for size in (pairs, tokens * strips))
    table, turns = (experts, 1) if places is None else (places, len(places))
    named = {"TOP_K": top_k, "HIDDEN": hidden, "INNER": inner, "PLACED": places is not None, "PDL": pdl}
    named |= {"num_warps": 4, **dependent(pdl)}
    _expand_coded_few_kernel[(triton.cdiv(inner, ROWS // 2), pairs)](
        x, logits, squares, table, *views(up), table_of(up), rounded, expanded, weights, experts, tickets, logits.stride(0), turns,
        len(up.blocks) // held, tokens, len(squares), epilogue.eps, NORMED=epilogue.squares is not None, **_coding(up, first), EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts), RENORMALIZE=renormalize, KIND=KINDS[kind], **named,
    )  # fmt: skip
    _contract_coded_few_kernel[(strips, pairs)](
        expanded, *views(down), table_of(down), narrow, weights, experts, parts, tickets, *ends, held, len(down.blocks) // held, tokens,
        AROUND=made, **_coding(down, second), **named,
    )  # fmt: skip
    return found


def table_of(packed: Packed) -> Tensor:
    return packed.factor if packed.table is None else packed.table


def _coding(packed: Packed, eight: EightBits | None) -> dict[str, Any]:
    rounds = (False, 0, False, False) if eight is None else (True, eight.group, eight.kind == "fp8", eight.powers)
    return {**constants(packed.coding), "EIGHT": rounds, "num_stages": stages_for(16, ROWS, packed.coding)}
