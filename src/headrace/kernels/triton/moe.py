# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The sparse feed-forward: routing, the pairs of token and expert put in order of experts, two grouped products, the weighted sum.

What lives here: its five kernels. What may not: the router's product, shared experts.

    route     token      → its top_k experts, their weights; each pair's rank among the pairs of its expert
    place     pair       → its place in the order of experts
    expand    place      → act(x · gateᵀ) · (x · upᵀ)      tiles of BLOCK_M places of one expert; how many there are is known on the
    contract  place      → inner · downᵀ, at its pair      device alone, the launch has room for any split of the pairs
    combine   token      → Σ weight · its pairs

The rank within an expert depends on timing; a row's bits do not depend on its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.candidate import Site
from headrace.kernels.triton.activation import KINDS, act
from headrace.spec import Activation


@triton.jit
def _route_kernel(
    logits_ptr, weights_ptr, experts_ptr, ranks_ptr, counts_ptr, row_stride, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    expert, choice = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
    logits = tl.load(logits_ptr + token.to(tl.int64) * row_stride + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    shares = tl.where(expert < EXPERTS, shares / tl.sum(shares, 0), -1.0)
    weights, chosen = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(shares, 0)
        taken = tl.min(tl.where(shares == best, expert, BLOCK_E - 1), 0)  # of equals the lower index
        weights, chosen = tl.where(choice == place, best, weights), tl.where(choice == place, taken, chosen)
        shares = tl.where(expert == taken, -1.0, shares)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    pair = token * TOP_K + choice
    tl.store(weights_ptr + pair, weights, mask=choice < TOP_K)
    tl.store(experts_ptr + pair, chosen, mask=choice < TOP_K)
    tl.store(ranks_ptr + pair, tl.atomic_add(counts_ptr + chosen, 1, mask=choice < TOP_K, sem="relaxed"), mask=choice < TOP_K)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _place_kernel(
    experts_ptr, ranks_ptr, counts_ptr, starts_ptr, pairs_ptr, pairs,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, BLOCK_E)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    counts = tl.load(counts_ptr + expert, mask=expert < EXPERTS, other=0)
    starts = tl.cumsum(counts, 0) - counts
    tl.store(starts_ptr + expert, starts, mask=expert < EXPERTS)  # every program writes the same
    tl.debug_barrier()
    own = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    place = tl.load(starts_ptr + own, mask=pair < pairs, other=0) + tl.load(ranks_ptr + pair, mask=pair < pairs, other=0)
    tl.store(pairs_ptr + place, pair, mask=pair < pairs)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _tile_of(counts_ptr, starts_ptr, tile, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first place, places) of a tile; no places where there are fewer tiles."""
    every = tl.arange(0, BLOCK_E)
    tiles = tl.cdiv(tl.load(counts_ptr + every, mask=every < EXPERTS, other=0), BLOCK_M)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    within = (tile - tl.sum(tl.where(every < expert, tiles, 0), 0)) * BLOCK_M
    own = tl.minimum(expert, EXPERTS - 1)
    places = tl.where(expert < EXPERTS, tl.load(counts_ptr + own) - within, 0)
    return own, tl.load(starts_ptr + own) + within, places


@triton.jit
def _expand_kernel(
    x_ptr, weight_ptr, inner_ptr, counts_ptr, starts_ptr, pairs_ptr, x_row, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    expert, start, places = _tile_of(counts_ptr, starts_ptr, tl.program_id(1), EXPERTS, BLOCK_E, BLOCK_M)
    if places > 0:
        lane, column, step = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        token = tl.load(pairs_ptr + start + lane, mask=lane < places, other=0) // TOP_K
        x_at = x_ptr + token.to(tl.int64)[:, None] * x_row + step[None, :]
        gate_at = weight_ptr + expert.to(tl.int64) * (2 * INNER * HIDDEN) + column.to(tl.int64)[:, None] * HIDDEN + step[None, :]
        gate, up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, HIDDEN, BLOCK_K):
            inside = (k + step < HIDDEN)[None, :]
            x = tl.load(x_at + k, mask=inside & (lane < places)[:, None], other=0.0)
            there = inside & (column < INNER)[:, None]
            gate = tl.dot(x, tl.trans(tl.load(gate_at + k, mask=there, other=0.0)), gate, input_precision="ieee")
            up = tl.dot(x, tl.trans(tl.load(gate_at + INNER * HIDDEN + k, mask=there, other=0.0)), up, input_precision="ieee")
        kind = inner_ptr.dtype.element_ty
        y = act(gate.to(kind).to(tl.float32), KIND) * up.to(kind).to(tl.float32)
        at = (start + lane).to(tl.int64)[:, None] * INNER + column[None, :]
        tl.store(inner_ptr + at, y.to(kind), mask=(lane < places)[:, None] & (column < INNER)[None, :])
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _contract_kernel(
    inner_ptr, weight_ptr, out_ptr, counts_ptr, starts_ptr, pairs_ptr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    expert, start, places = _tile_of(counts_ptr, starts_ptr, tl.program_id(1), EXPERTS, BLOCK_E, BLOCK_M)
    if places > 0:
        lane, column, step = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        x_at = inner_ptr + (start + lane).to(tl.int64)[:, None] * INNER + step[None, :]
        weight_at = weight_ptr + expert.to(tl.int64) * (HIDDEN * INNER) + column.to(tl.int64)[:, None] * INNER + step[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, INNER, BLOCK_K):
            inside = (k + step < INNER)[None, :]
            x = tl.load(x_at + k, mask=inside & (lane < places)[:, None], other=0.0)
            weight = tl.load(weight_at + k, mask=inside & (column < HIDDEN)[:, None], other=0.0)
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        pair = tl.load(pairs_ptr + start + lane, mask=lane < places, other=0)
        at = pair.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(lane < places)[:, None] & (column < HIDDEN)[None, :])
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _combine_kernel(pairs_ptr, weights_ptr, out_ptr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        x = tl.load(pairs_ptr + (token * TOP_K + choice) * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
        total += x * tl.load(weights_ptr + token * TOP_K + choice)
    tl.store(out_ptr + token * HIDDEN + column, total.to(out_ptr.dtype.element_ty), mask=column < HIDDEN)
    if PDL:
        gdc_launch_dependents()


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of the grouped products: places × columns, and how much of the inner sum at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(dtype: torch.dtype, pairs: int, num_experts: int, *, invariant: bool) -> Tile:
    """By the mean number of pairs an expert has; one for all where bits must not depend on it."""
    if dtype is torch.float32:
        return Tile(16, 32, 32, 4, 2)
    mean = 0.0 if invariant else pairs / num_experts
    if mean <= 12:
        return Tile(16, 32, 128, 4, 4)
    return Tile(64, 64, 64, 4, 3) if mean <= 96 else Tile(128, 128, 64, 8, 3)


@dataclass(frozen=True, slots=True)
class Moe:
    """out[t] = Σ over the top_k experts e of t: p[e] · down[e] (act(gate[e] x) · (up[e] x)) (Shazeer et al. 2017; MegaBlocks, Gale et al. 2022).

    ``x`` [T, H], ``router_logits`` [T, E], ``gate_up`` [E, 2I, H], ``down`` [E, H, I], one type of float32, bfloat16, float16 → [T, H].
    p = softmax over all experts in float32, of equals the lower index first, divided by their sum with ``renormalize``. Other experts are not read.
    """

    batch_invariant: bool

    def __call__(
        self, x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation
    ) -> Tensor:
        (tokens, hidden), (num_experts, _, inner), device = x.shape, down.shape, x.device
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=device)
        if tokens == 0:
            return out
        x, gate_up, down = x if x.stride(1) == 1 else x.contiguous(), gate_up.contiguous(), down.contiguous()
        pairs, experts = tokens * top_k, {"EXPERTS": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts)}
        weights, counts, starts, order = _ordered(router_logits, top_k, renormalize, experts)
        tile = tile_for(x.dtype, pairs, num_experts, invariant=self.batch_invariant)
        tiles = pairs // tile.rows + min(pairs, num_experts)
        product = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "num_warps": tile.warps, "num_stages": tile.stages}
        expanded = torch.empty((pairs, inner), dtype=x.dtype, device=device)
        contracted = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
        _expand_kernel[(triton.cdiv(inner, tile.columns), tiles)](
            x, gate_up, expanded, counts, starts, order, x.stride(0),
            TOP_K=top_k, HIDDEN=hidden, INNER=inner, KIND=KINDS[kind], PDL=False, **experts, **product,
        )  # fmt: skip
        _contract_kernel[(triton.cdiv(hidden, tile.columns), tiles)](
            expanded, down, contracted, counts, starts, order, HIDDEN=hidden, INNER=inner, PDL=False, **experts, **product
        )
        block = min(1024, triton.next_power_of_2(hidden))
        _combine_kernel[(tokens, triton.cdiv(hidden, block))](
            contracted, weights, out, TOP_K=top_k, HIDDEN=hidden, BLOCK=block, PDL=False, num_warps=4
        )
        return out


def _ordered(router_logits: Tensor, top_k: int, renormalize: bool, experts: dict[str, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights [T, top_k]; pairs of each expert and the first place of each [E]; the pair at each place [T · top_k]."""
    tokens, num_experts, device = router_logits.shape[0], router_logits.shape[1], router_logits.device
    router_logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    chosen, ranks, order = torch.empty((3, tokens * top_k), dtype=torch.int32, device=device)
    counts, starts = torch.zeros((2, num_experts), dtype=torch.int32, device=device)
    _route_kernel[(tokens,)](
        router_logits, weights, chosen, ranks, counts, router_logits.stride(0), TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize, PDL=False, num_warps=1 if num_experts <= 256 else 4, **experts,
    )  # fmt: skip
    _place_kernel[(triton.cdiv(tokens * top_k, 1024),)](
        chosen, ranks, counts, starts, order, tokens * top_k, BLOCK=1024, PDL=False, num_warps=4, **experts
    )
    return weights, counts, starts, order


def create_moe(site: Site) -> Callable[..., Tensor]:
    return Moe(site.batch_invariant)
