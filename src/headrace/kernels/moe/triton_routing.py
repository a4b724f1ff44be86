# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Routing of the sparse feed-forward: which experts a token takes, with which weights.

What lives here: the choice as device functions for other kernels, and the kernel that lists each expert's pairs of
token and choice. What may not: expert products (triton_moe.py, triton_few.py).

Experts are compared by one integer each: the bits of the share, which is not negative, then the index from behind, so
that all differ and of equal shares the lower index is the larger.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import launchable

_PIECES: tl.constexpr = tl.constexpr(512)  # of a row's squares, loaded at once


@triton.jit
def order_of(logits_ptr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """What to compare the experts of one token by: int64 [BLOCK_E], below 0 where there is no expert."""
    expert = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    bits = (shares / tl.sum(shares, 0)).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(expert < EXPERTS, bits * BLOCK_E + (BLOCK_E - 1 - expert), -1)


@triton.jit
def share_of(order, BLOCK_E: tl.constexpr):
    """The softmax share behind a value of ``order_of``."""
    return (order // BLOCK_E).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def choice_of(
    logits_ptr, choice, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr
):
    """(expert, weight) of one choice of a token."""
    order = order_of(logits_ptr, EXPERTS, BLOCK_E)
    own, total = tl.max(order, 0) * 0, 0.0
    for place in tl.static_range(TOP_K):
        best = tl.max(order, 0)
        own, total = tl.where(place == choice, best, own), total + share_of(best, BLOCK_E)
        order = tl.where(order == best, -1, order)
    weight = share_of(own, BLOCK_E)
    return (BLOCK_E - 1 - own % BLOCK_E).to(tl.int32), weight / total if RENORMALIZE else weight


@triton.jit
def place_of(places_ptr, token, turns, expert, EXPERTS: tl.constexpr):
    """Where its expert lies on this rank, below 0: on another (reference.py, ``here``)."""
    return tl.load(places_ptr + (token % turns) * EXPERTS + expert)


@triton.jit
def rstd_of(squares_ptr, token, tokens, pieces, eps, WIDTH: tl.constexpr):
    """What a row of so many values, half normed, is multiplied by; of partial sums of squares, [pieces, tokens]."""
    total = tl.zeros((_PIECES,), tl.float32)
    for first in range(0, pieces, _PIECES):
        piece = first + tl.arange(0, _PIECES)
        total += tl.load(squares_ptr + piece * tokens + token, mask=piece < pieces, other=0.0)
    return tl.rsqrt(tl.sum(total, 0) / WIDTH + eps)


@triton.jit
def bring_nearer(at, BYTES: tl.constexpr):
    """Asks for ``BYTES`` from here on, up to 64 KiB, to be brought into the second-level cache. A wrong guess costs
    time, no more."""
    LINES: tl.constexpr = min(512, triton.next_power_of_2((BYTES + 127) // 128))
    line = at + tl.minimum(tl.arange(0, LINES) * 128, BYTES - 1)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1)


@launchable(do_not_specialize=["room", "turns", "tokens", "pieces"])
def _route_kernel(
    logits_ptr, weights_ptr, counts_ptr, listed_ptr, places_ptr, squares_ptr, rstd_ptr, row_stride, room, turns, tokens, pieces, eps,
    NORMED: tl.constexpr, HIDDEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, RENORMALIZE: tl.constexpr, PLACED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight of a pair that is another rank's is -1. NORMED: what the token's row is multiplied by, too."""
    token, choice = tl.program_id(0), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
    if NORMED:
        tl.store(rstd_ptr + token, rstd_of(squares_ptr, token, tokens, pieces, eps, HIDDEN))
    order = order_of(logits_ptr + token.to(tl.int64) * row_stride, EXPERTS, BLOCK_E)
    weights, chosen = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(order, 0)
        weights = tl.where(choice == place, share_of(best, BLOCK_E), weights)
        chosen = tl.where(choice == place, BLOCK_E - 1 - (best % BLOCK_E).to(tl.int32), chosen)
        order = tl.where(order == best, -1, order)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    pair, mine = token * TOP_K + choice, choice < TOP_K
    if PLACED:
        chosen = place_of(places_ptr, token, turns, chosen, EXPERTS)
        mine &= chosen >= 0
        weights = tl.where(chosen >= 0, weights, -1.0)
    tl.store(weights_ptr + pair, weights, mask=choice < TOP_K)
    rank = tl.atomic_add(counts_ptr + chosen, 1, mask=mine, sem="relaxed")
    tl.store(listed_ptr + chosen.to(tl.int64) * room + rank, pair, mask=mine)
    if PDL:
        gdc_launch_dependents()
