# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The sparse feed-forward of a few tokens: two launches, matrix-vector products at the speed of memory.

What lives here: those kernels and their launches. What may not: tokens enough to share an expert's weights
(triton_moe.py).

    expand    (columns, pair)    routes the token again in every program, which costs less than a launch before it;
    act(gate · x) · (up · x)
    contract  (columns, token)   Σ weight · (down · inner) over the token's experts, in float32

Both may take in what stands around them: a norm that is half done before, the sum and the next norm's half behind
(triton_ends.py). Nothing of the second's weights is asked for while the first reads its own: that was slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import Empty, plainly_empty
from headrace.kernels.linear.epilogue import PLAIN, Epilogue, Fused
from headrace.kernels.linear.triton_ends import Ends, _finish, ends_of
from headrace.kernels.moe.triton_routing import choice_of, place_of, rstd_of
from headrace.kernels.norm.triton_activation import KINDS, act
from headrace.spec import Activation


@launchable(do_not_specialize=["turns", "tokens", "pieces"])
def _expand_few_kernel(
    x_ptr, logits_ptr, squares_ptr, weight_ptr, inner_ptr, weights_ptr, experts_ptr, places_ptr, x_row, logits_row, turns, tokens, pieces, eps,
    NORMED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PLACED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    token, choice = (pair // TOP_K).to(tl.int64), pair % TOP_K
    if PDL:
        gdc_wait()
    rstd = rstd_of(squares_ptr, token, tokens, pieces, eps, HIDDEN) if NORMED else 1.0
    expert, weight = choice_of(logits_ptr + token * logits_row, choice, EXPERTS, BLOCK_E, TOP_K, RENORMALIZE)
    if PLACED:
        expert = place_of(places_ptr, token, turns, expert, EXPERTS)
    if tl.program_id(0) == 0:
        tl.store(weights_ptr + pair, weight)
        tl.store(experts_ptr + pair, expert)
    column, step = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    end = tl.where(expert < 0, 0, HIDDEN) if PLACED else HIDDEN  # nothing to compute of another rank's pair
    gate_at = weight_ptr + expert.to(tl.int64) * (2 * INNER * HIDDEN) + column[:, None] * HIDDEN + step[None, :]
    gate, up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32), tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in tl.range(0, end, BLOCK_K, num_stages=4):
        there = (column < INNER)[:, None] & (k + step < HIDDEN)[None, :]
        x = tl.load(x_ptr + token * x_row + k + step, mask=k + step < HIDDEN, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gate_at + k, mask=there, other=0.0).to(tl.float32) * x
        up += tl.load(gate_at + INNER * HIDDEN + k, mask=there, other=0.0).to(tl.float32) * x
    if PDL:
        gdc_launch_dependents()
    gate, up = tl.sum(gate, 1) * rstd, tl.sum(up, 1) * rstd
    kind = inner_ptr.dtype.element_ty
    y = act(gate.to(kind).to(tl.float32), KIND) * up.to(kind).to(tl.float32)
    tl.store(inner_ptr + pair * INNER + column, y.to(kind), mask=column < INNER)


@launchable(do_not_specialize=["tokens"])
def _contract_few_kernel(
    inner_ptr, weight_ptr, weights_ptr, experts_ptr, squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr, tokens,
    AROUND: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile, token = tl.program_id(0), tl.program_id(1)
    column, step = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        expert, share = tl.load(experts_ptr + pair).to(tl.int64), tl.load(weights_ptr + pair)
        weight_at = weight_ptr + expert * (HIDDEN * INNER) + column[:, None] * INNER + step[None, :]
        for k in tl.static_range(0, INNER, BLOCK_K):
            there = (column < HIDDEN)[:, None] & (k + step < INNER)[None, :] & (expert >= 0)
            x = tl.load(inner_ptr + pair * INNER + k + step, mask=k + step < INNER, other=0.0).to(tl.float32)
            total += tl.load(weight_at + k, mask=there, other=0.0).to(tl.float32) * (x * share)[None, :]
    if PDL:
        gdc_launch_dependents()
    y, row = tl.sum(total, 1)[:, None], token + tl.arange(0, 1)
    ends = Ends(squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr)
    _finish(y, y, y, tile, column, row, ends, 0, tokens, HIDDEN, INNER, 0.0, AROUND)


def moe_few(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool,
    kind: Activation,
    places: Tensor | None = None,
    empty: Empty = plainly_empty,
    epilogue: Epilogue = PLAIN,
    *,
    pdl: bool = False,
) -> Fused:
    """The sparse feed-forward as triton_moe.py defines it; with ``epilogue``, as reference.py does. An expert's weights are
    read once for each token that takes it."""
    (tokens, hidden), num_experts, inner, device = x.shape, router_logits.shape[1], down.shape[2], x.device
    pairs = tokens * top_k
    y, tiles = empty((tokens, hidden), x.dtype, device), triton.cdiv(hidden, 2)
    found, ends, _, made = ends_of(epilogue, None, y, tiles, empty, 0)
    squares = ends[0] if epilogue.squares is None else epilogue.squares
    expanded = empty((tokens, top_k, inner), x.dtype, device)
    weights = torch.empty(pairs, dtype=torch.float32, device=device)
    experts = torch.empty(pairs, dtype=torch.int32, device=device)
    table, turns = (experts, 1) if places is None else (places, len(places))
    _expand_few_kernel[(triton.cdiv(inner, 8), pairs)](
        x, router_logits, squares, gate_up, expanded, weights, experts, table, x.stride(0), router_logits.stride(0), turns, tokens, len(squares),
        epilogue.eps, NORMED=epilogue.squares is not None, EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), TOP_K=top_k,
        RENORMALIZE=renormalize, HIDDEN=hidden, INNER=inner, KIND=KINDS[kind], BLOCK_N=8, BLOCK_K=min(128, triton.next_power_of_2(hidden)),
        PLACED=places is not None, PDL=pdl, num_warps=1, **dependent(pdl),
    )  # fmt: skip
    _contract_few_kernel[(tiles, tokens)](
        expanded, down, weights, experts, *ends, tokens, AROUND=made, TOP_K=top_k, HIDDEN=hidden, INNER=inner,
        BLOCK_N=2, BLOCK_K=min(256, triton.next_power_of_2(inner)), PDL=pdl, num_warps=1, **dependent(pdl),
    )  # fmt: skip
    return found
