# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The sparse feed-forward: routing, two products grouped by expert, the weighted sum.

What lives here: the products, the sum, the sizes of tiles. What may not: the router's product, shared experts, routing (moe_routing.py).

    route     token      → its top_k experts and their weights; each pair of token and choice in the list of its expert
    expand    pair       → act(gate · x) · (up · x)    a program takes BLOCK_N columns of one expert and every so many runs of BLOCK_M of
    contract  pair       → down · inner                its pairs; weights stand left in the matrix instruction, so that few pairs fill it
    combine   token      → Σ weight · its pairs

A few tokens take the two launches of moe_few.py instead. A pair's place in its list depends on timing; a row's bits do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.candidate import Site
from headrace.kernels.triton.activation import KINDS, act
from headrace.kernels.triton.launch import launchable
from headrace.kernels.triton.moe_few import moe_few
from headrace.kernels.triton.moe_routing import _route_kernel
from headrace.spec import Activation

_FEW = 4  # tokens


@triton.jit
def _weights(map, ptr, row, k, there, WIDTH: tl.constexpr, BULK: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [columns, depth] of a matrix that begins ``row`` rows into all experts' (int32). Columns that are not ``there`` may hold anything."""
    if BULK:
        return map.load([row, k])
    step = k + tl.arange(0, BLOCK_K)
    at = ptr + (row.to(tl.int64) + tl.arange(0, there.shape[0]))[:, None] * WIDTH + step[None, :]
    return tl.load(at, mask=there[:, None] & (step < WIDTH)[None, :], other=0.0)


@launchable(do_not_specialize=["room"])
def _expand_kernel(
    x_ptr, weight_ptr, weight_map, inner_ptr, counts_ptr, listed_ptr, x_row, room, TOP_K: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, KIND: tl.constexpr, BULK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    column, step = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = expert * (2 * INNER) + tl.program_id(0) * BLOCK_N
    if PDL:
        gdc_wait()
    count = tl.load(counts_ptr + expert)
    for first in range(tl.program_id(1) * BLOCK_M, count, tl.num_programs(1) * BLOCK_M):
        place = first + tl.arange(0, BLOCK_M)
        pair = tl.load(listed_ptr + expert.to(tl.int64) * room + place, mask=place < count, other=0)
        x_at = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_row + step[None, :]
        gate, up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, HIDDEN, BLOCK_K):
            x = tl.load(x_at + k, mask=(place < count)[:, None] & (k + step < HIDDEN)[None, :], other=0.0)
            weight = _weights(weight_map, weight_ptr, row, k, column < INNER, HIDDEN, BULK, BLOCK_K)
            gate = tl.dot(weight, tl.trans(x), gate, input_precision="ieee")
            weight = _weights(weight_map, weight_ptr, row + INNER, k, column < INNER, HIDDEN, BULK, BLOCK_K)
            up = tl.dot(weight, tl.trans(x), up, input_precision="ieee")
        kind = inner_ptr.dtype.element_ty
        y = (act(gate.to(kind).to(tl.float32), KIND) * up.to(kind).to(tl.float32)).to(kind)
        at = inner_ptr + pair.to(tl.int64)[:, None] * INNER + column[None, :]
        tl.store(at, tl.trans(y), mask=(place < count)[:, None] & (column < INNER)[None, :])
    if PDL:
        gdc_launch_dependents()


@launchable(do_not_specialize=["room"])
def _contract_kernel(
    inner_ptr, weight_ptr, weight_map, out_ptr, counts_ptr, listed_ptr, room, HIDDEN: tl.constexpr, INNER: tl.constexpr, BULK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    column, step = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = expert * HIDDEN + tl.program_id(0) * BLOCK_N
    if PDL:
        gdc_wait()
    count = tl.load(counts_ptr + expert)
    for first in range(tl.program_id(1) * BLOCK_M, count, tl.num_programs(1) * BLOCK_M):
        place = first + tl.arange(0, BLOCK_M)
        pair = tl.load(listed_ptr + expert.to(tl.int64) * room + place, mask=place < count, other=0).to(tl.int64)
        x_at = inner_ptr + pair[:, None] * INNER + step[None, :]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, INNER, BLOCK_K):
            x = tl.load(x_at + k, mask=(place < count)[:, None] & (k + step < INNER)[None, :], other=0.0)
            weight = _weights(weight_map, weight_ptr, row, k, column < HIDDEN, INNER, BULK, BLOCK_K)
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        at = out_ptr + pair[:, None] * HIDDEN + column[None, :]
        y = total.to(out_ptr.dtype.element_ty)
        tl.store(at, tl.trans(y), mask=(place < count)[:, None] & (column < HIDDEN)[None, :])
    if PDL:
        gdc_launch_dependents()


@launchable()
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
    """Sizes of a grouped product: pairs × columns, and how much of the inner sum at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Both products take runs of the same number of pairs."""

    expand: Tile
    contract: Tile


def tiles_for(dtype: torch.dtype, pairs: int, num_experts: int, *, invariant: bool) -> Tiles:
    """By the mean number of pairs an expert has; one choice for all where bits must not depend on it."""
    if dtype is torch.float32:
        return Tiles(Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))
    mean = 32.0 if invariant else pairs / num_experts
    if mean <= 8:
        return Tiles(Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 3))
    if mean <= 24:
        return Tiles(Tile(32, 64, 64, 4, 5), Tile(32, 64, 128, 4, 3))
    if mean <= 48:
        return Tiles(Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4))
    return Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3))


@dataclass(frozen=True, slots=True)
class Moe:
    """out[t] = Σ over the top_k experts e of t: p[e] · down[e] (act(gate[e] x) · (up[e] x)) (Shazeer et al. 2017; MegaBlocks, Gale et al. 2022).

    ``x`` [T, H], ``router_logits`` [T, E], ``gate_up`` [E, 2I, H], ``down`` [E, H, I], one type of float32, bfloat16, float16 → [T, H].
    p = softmax over all experts in float32, of equals the lower index first, divided by their sum with ``renormalize``.
    ``bulk``: the device has a copy engine (compute capability 9), which brings the weights; it may read, but never uses, rows beside a
    column tile. The weights of other experts are not used.
    """

    batch_invariant: bool
    bulk: bool = False

    def __call__(self, x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation) -> Tensor:
        x, router_logits = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (x, router_logits))
        gate_up, down = gate_up.contiguous(), down.contiguous()
        if x.shape[0] == 0:
            return torch.empty_like(x)
        if x.shape[0] <= _FEW and not self.batch_invariant:
            return moe_few(x, router_logits, gate_up, down, top_k, renormalize, kind)
        tiles = tiles_for(x.dtype, x.shape[0] * top_k, down.shape[0], invariant=self.batch_invariant)
        return moe_grouped(x, router_logits, gate_up, down, top_k, renormalize, kind, tiles, self.bulk)


def moe_grouped(
    x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation, tiles: Tiles, bulk: bool
) -> Tensor:
    """As ``Moe``, with these tiles."""
    (tokens, hidden), (num_experts, _, inner), device = x.shape, down.shape, x.device
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=device)
    expanded = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=device)
    contracted = torch.empty((tokens * top_k, hidden), dtype=x.dtype, device=device)
    weights, counts, listed = _routed(router_logits, top_k, renormalize)
    runs = triton.cdiv(5 * tokens * top_k, 4 * num_experts * tiles.expand.rows)  # a quarter more than the mean; longer lists are looped over
    map_, product = _product(gate_up, tiles.expand, bulk)
    _expand_kernel[(triton.cdiv(inner, tiles.expand.columns), runs, num_experts)](
        x, gate_up, map_, expanded, counts, listed, x.stride(0), tokens, TOP_K=top_k, HIDDEN=hidden, INNER=inner, KIND=KINDS[kind], PDL=False,
        **product,
    )  # fmt: skip
    map_, product = _product(down, tiles.contract, bulk)
    _contract_kernel[(triton.cdiv(hidden, tiles.contract.columns), runs, num_experts)](
        expanded, down, map_, contracted, counts, listed, tokens, HIDDEN=hidden, INNER=inner, PDL=False, **product
    )
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](contracted, weights, out, TOP_K=top_k, HIDDEN=hidden, BLOCK=block, PDL=False, num_warps=4)
    return out


def _product(weight: Tensor, tile: Tile, bulk: bool) -> tuple[Any, dict[str, Any]]:
    """How the copy engine finds tiles of ``weight`` [E, N, K] (the weight itself where it cannot), and the kernel's sizes."""
    rows = weight.view(-1, weight.shape[2])
    bulk = bulk and weight.shape[2] * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    map_ = TensorDescriptor.from_tensor(rows, [tile.columns, tile.depth]) if bulk else weight
    sizes = {"BULK": bulk, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    return map_, {**sizes, "num_warps": tile.warps, "num_stages": tile.stages}


def _routed(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [T, top_k]; how many pairs each expert has [E]; which ones [E, T], in any order."""
    (tokens, num_experts), device = router_logits.shape, router_logits.device
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    listed = torch.empty((num_experts, tokens), dtype=torch.int32, device=device)
    _route_kernel[(tokens,)](
        router_logits, weights, counts, listed, router_logits.stride(0), tokens, EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts), TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k), RENORMALIZE=renormalize,
        PDL=False, num_warps=1 if num_experts <= 256 else 4,
    )  # fmt: skip
    return weights, counts, listed


def create_moe(site: Site) -> Callable[..., Tensor]:
    return Moe(site.batch_invariant, torch.cuda.get_device_capability(site.device)[0] == 9)
