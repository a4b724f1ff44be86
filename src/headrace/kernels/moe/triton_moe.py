# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The sparse feed-forward: routing, two products grouped by expert, the weighted sum.

What lives here: the products, the sum, the sizes of tiles. What may not: the router's product, shared experts, routing
(triton_routing.py).

    route     token      → its top_k experts and their weights; each pair of token and choice in the list of its expert
    expand    pair       → act(gate · x) · (up · x)    a program takes BLOCK_N columns of one expert and BLOCK_M of its
    pairs
    contract  pair       → down · inner
    combine   token      → Σ weight · its pairs

How many pairs an expert has is known on the device alone, and a prompt may send all its tokens to a few of them. So a
launch has a program for every tile there can be; each finds from the counts which tile is its own, if any, and no
program has more work than another. Weights stand left in the matrix instruction, so that few pairs fill it: the last
tile of an expert is cut to the pairs that are left.

A few tokens take the two launches of triton_few.py instead. A pair's place in its list depends on timing; a row's bits
do not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.candidate import CallSite, Empty, ExpertFacts, plainly_empty
from headrace.kernels.linear.epilogue import PLAIN, Epilogue, Fused
from headrace.kernels.linear.triton_ends import Ends, _finish, ends_of
from headrace.kernels.moe.reference import FEW
from headrace.kernels.moe.triton_few import moe_few
from headrace.kernels.moe.triton_routing import _route_kernel
from headrace.kernels.norm.triton_activation import KINDS, act
from headrace.spec import Activation


@triton.jit
def _weights(map, ptr, row, k, there, WIDTH: tl.constexpr, BULK: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile [columns, depth] of a matrix that begins ``row`` rows into all experts' (int32). Columns that are not
    ``there`` may hold anything."""
    if BULK:
        return map.load([row, k])
    step = k + tl.arange(0, BLOCK_K)
    at = ptr + (row.to(tl.int64) + tl.arange(0, there.shape[0]))[:, None] * WIDTH + step[None, :]
    return tl.load(at, mask=there[:, None] & (step < WIDTH)[None, :], other=0.0)


@triton.jit
def _unit(counts_ptr, unit, ACROSS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its pairs, pairs of experts before it, tile of its pairs, tile of columns) of a program; no such expert:
    nothing to do.

    Tiles of one expert's columns stand side by side, so that its weights are read from memory once.
    """
    each = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + each, mask=each < EXPERTS, other=0)
    both = (tl.cdiv(counts, BLOCK_M).to(tl.int64) << 32) | counts.to(tl.int64)  # two sums in one
    ends = tl.cumsum(both, 0)
    expert = tl.sum(((ends >> 32).to(tl.int32) * ACROSS <= unit).to(tl.int32), 0)
    own = tl.sum(tl.where(each == expert, both, 0), 0)
    before = tl.sum(tl.where(each == expert, ends, 0), 0) - own
    tiles = tl.maximum((own >> 32).to(tl.int32), 1)
    within = unit - (before >> 32).to(tl.int32) * ACROSS
    return expert, (own & 0xFFFFFFFF).to(tl.int32), before & 0xFFFFFFFF, within % tiles, within // tiles


@triton.jit
def _takes(left, BLOCK_M: tl.constexpr, HALVING: tl.constexpr, HALVINGS: tl.constexpr):
    """Whether a tile halved so often is the smallest one for so many pairs, or for the first BLOCK_M of them."""
    rows: tl.constexpr = BLOCK_M >> HALVING
    least: tl.constexpr = 0 if HALVING == HALVINGS else rows // 2
    return (left > least) & ((left <= rows) | (HALVING == 0))


@launchable(do_not_specialize=["room"])
def _expand_kernel(
    x_ptr, weight_ptr, weight_map, inner_ptr, counts_ptr, listed_ptr, rstd_ptr, x_row, room,
    NORMED: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    KIND: tl.constexpr, BULK: tl.constexpr, BLOCK_M: tl.constexpr,
    HALVINGS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    across: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    expert, count, before, tile, strip = _unit(counts_ptr, tl.program_id(0), across, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        column, step = strip * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        row = expert * (2 * INNER) + strip * BLOCK_N
        for halving in tl.static_range(HALVINGS + 1):
            if _takes(count - tile * BLOCK_M, BLOCK_M, halving, HALVINGS):
                rows: tl.constexpr = BLOCK_M >> halving
                place = tile * BLOCK_M + tl.arange(0, rows)
                pair = tl.load(listed_ptr + expert.to(tl.int64) * room + place, mask=place < count, other=0)
                x_at = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_row + step[None, :]
                gate, up = tl.zeros((BLOCK_N, rows), tl.float32), tl.zeros((BLOCK_N, rows), tl.float32)
                for k in range(0, HIDDEN, BLOCK_K):
                    x = tl.load(x_at + k, mask=(place < count)[:, None] & (k + step < HIDDEN)[None, :], other=0.0)
                    weight = _weights(weight_map, weight_ptr, row, k, column < INNER, HIDDEN, BULK, BLOCK_K)
                    gate = tl.dot(weight, tl.trans(x), gate, input_precision="ieee")
                    weight = _weights(weight_map, weight_ptr, row + INNER, k, column < INNER, HIDDEN, BULK, BLOCK_K)
                    up = tl.dot(weight, tl.trans(x), up, input_precision="ieee")
                if NORMED:
                    rstd = tl.load(rstd_ptr + pair // TOP_K, mask=place < count, other=0.0)[None, :]
                    gate, up = gate * rstd, up * rstd
                kind = inner_ptr.dtype.element_ty
                y = (act(gate.to(kind).to(tl.float32), KIND) * up.to(kind).to(tl.float32)).to(kind)
                at = inner_ptr + (before + place)[:, None] * INNER + column[None, :]
                tl.store(at, tl.trans(y), mask=(place < count)[:, None] & (column < INNER)[None, :])
    if PDL:
        gdc_launch_dependents()


@launchable(do_not_specialize=["room"])
def _contract_kernel(
    inner_ptr, weight_ptr, weight_map, out_ptr, counts_ptr, listed_ptr, room, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, BULK: tl.constexpr, BLOCK_M: tl.constexpr, HALVINGS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    across: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    expert, count, before, tile, strip = _unit(counts_ptr, tl.program_id(0), across, EXPERTS, BLOCK_E, BLOCK_M)
    if expert < EXPERTS:
        column, step = strip * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        row = expert * HIDDEN + strip * BLOCK_N
        for halving in tl.static_range(HALVINGS + 1):
            if _takes(count - tile * BLOCK_M, BLOCK_M, halving, HALVINGS):
                rows: tl.constexpr = BLOCK_M >> halving
                place = tile * BLOCK_M + tl.arange(0, rows)
                x_at = inner_ptr + (before + place)[:, None] * INNER + step[None, :]
                total = tl.zeros((BLOCK_N, rows), tl.float32)
                for k in range(0, INNER, BLOCK_K):
                    x = tl.load(x_at + k, mask=(place < count)[:, None] & (k + step < INNER)[None, :], other=0.0)
                    weight = _weights(weight_map, weight_ptr, row, k, column < HIDDEN, INNER, BULK, BLOCK_K)
                    total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
                own_ptr = listed_ptr + expert.to(tl.int64) * room
                pair = tl.load(own_ptr + place, mask=place < count, other=0).to(tl.int64)
                at = out_ptr + pair[:, None] * HIDDEN + column[None, :]
                y = tl.trans(total.to(out_ptr.dtype.element_ty))
                tl.store(at, y, mask=(place < count)[:, None] & (column < HIDDEN)[None, :])
    if PDL:
        gdc_launch_dependents()


@launchable(do_not_specialize=["tokens"])
def _combine_kernel(
    pairs_ptr, weights_ptr, squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr, tokens,
    AROUND: tl.constexpr, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    token, column = row.to(tl.int64), tile * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        share = tl.load(weights_ptr + token * TOP_K + choice)
        mine = column < tl.where(share == -1.0, 0, HIDDEN)  # -1: another rank's pair, which nothing was written of
        x = tl.load(pairs_ptr + (token * TOP_K + choice) * HIDDEN + column, mask=mine, other=0.0).to(tl.float32)
        total += x * share
    y = total[:, None]
    ends = Ends(squares_ptr, bias_ptr, residual_ptr, scale_ptr, y_ptr, scaled_ptr, sums_ptr)
    _finish(y, y, y, tile, column, row + tl.arange(0, 1), ends, 0, tokens, HIDDEN, HIDDEN, 0.0, AROUND)
    if PDL:
        gdc_launch_dependents()


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a grouped product: pairs × columns, and how much of the inner sum at once. ``halvings`` of pairs are
    there for what is left."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    halvings: int = 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """Those of the two products."""

    expand: Tile
    contract: Tile


_EXACT = Tiles(Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2))  # float32
_SAME = Tiles(Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4))  # where bits must not depend on the number of pairs
# Up to so many pairs an expert in the mean; found by measurement on an H200. Tails are for experts that have fewer.
_TILES = (
    (8.0, Tiles(Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 3))),
    (48.0, Tiles(Tile(64, 64, 64, 4, 4, 2), Tile(64, 128, 64, 4, 4, 2))),
    (inf, Tiles(Tile(128, 128, 64, 8, 4, 3), Tile(128, 128, 64, 8, 3, 3))),
)


def tiles_for(dtype: torch.dtype, pairs: int, num_experts: int, *, invariant: bool) -> Tiles:
    """By the mean number of pairs an expert has; one choice for all where bits must not depend on it."""
    if dtype is torch.float32:
        return _EXACT
    return _SAME if invariant else next(tiles for mean, tiles in _TILES if pairs <= mean * num_experts)


@dataclass(frozen=True, slots=True)
class Moe:
    """out[t] = Σ over the top_k experts e of t: p[e] · down[e] (act(gate[e] x) · (up[e] x)) (Shazeer et al. 2017;
    MegaBlocks, Gale et al. 2022).

    ``x`` [T, H], ``router_logits`` [T, E], ``gate_up`` [E, 2I, H], ``down`` [E, H, I], one type of float32, bfloat16,
    float16 → [T, H]. p = softmax over all experts in float32, of equals the lower index first, divided by their sum
    with ``renormalize``. With ``places`` [turns, E], e are those of this rank, whose weights are in ``gate_up`` and
    ``down`` (reference.py, ``here``). ``bulk``: the device has a copy engine (compute capability 9), which brings the weights; it
    may read, but never uses, rows beside a column tile. The weights of other experts are not used.
    """

    invariant: bool
    bulk: bool = False
    empty: Empty = plainly_empty
    pdl: bool = False

    @classmethod
    def at(cls, site: CallSite[ExpertFacts]) -> Moe:
        return cls(site.invariant, site.card.capability[0] == 9, site.empty, site.pdl)

    def fused(
        self, x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool, kind: Activation, epilogue: Epilogue,
    ) -> Fused:  # fmt: skip
        """As its twin; rows one behind the other."""
        given = x, router_logits, gate_up, down, top_k, renormalize, kind
        if len(x) <= FEW:
            return moe_few(*given, None, self.empty, epilogue, pdl=self.pdl)
        tiles = tiles_for(x.dtype, len(x) * top_k, router_logits.shape[1], invariant=False)
        return moe_grouped(*given, tiles, self.bulk, None, self.empty, epilogue, pdl=self.pdl)

    def __call__(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        top_k: int,
        renormalize: bool,
        kind: Activation,
        places: Tensor | None = None,
    ) -> Tensor:
        x, router_logits = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (x, router_logits))
        gate_up, down = gate_up.contiguous(), down.contiguous()
        if x.shape[0] == 0:
            return torch.empty_like(x)
        if x.shape[0] <= FEW and not self.invariant:
            few = x, router_logits, gate_up, down, top_k, renormalize, kind, places, self.empty
            return moe_few(*few, pdl=self.pdl)[0]
        tiles = tiles_for(x.dtype, x.shape[0] * top_k, router_logits.shape[1], invariant=self.invariant)
        given = x, router_logits, gate_up, down, top_k, renormalize, kind, tiles, self.bulk, places, self.empty
        return moe_grouped(*given)[0]


def moe_grouped(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool,
    kind: Activation,
    tiles: Tiles,
    bulk: bool,
    places: Tensor | None = None,
    empty: Empty = plainly_empty,
    epilogue: Epilogue = PLAIN,
    *,
    pdl: bool = False,
) -> Fused:
    """As ``Moe``, with these tiles; with ``epilogue``, as reference.py has it."""
    (tokens, hidden), (num_experts, _, inner), device = x.shape, down.shape, x.device
    expanded = empty((tokens, top_k, inner), x.dtype, device)
    contracted = empty((tokens, top_k, hidden), x.dtype, device)
    weights, counts, listed, rstd = _routed(
        router_logits, top_k, renormalize, places, num_experts, epilogue, hidden, pdl=pdl
    )
    map_, product = _product(gate_up, tiles.expand, bulk)
    _expand_kernel[_grid(tokens * top_k, num_experts, tiles.expand.rows, triton.cdiv(inner, tiles.expand.columns))](
        x, gate_up, map_, expanded, counts, listed, rstd, x.stride(0), tokens, NORMED=epilogue.squares is not None, TOP_K=top_k, HIDDEN=hidden,
        INNER=inner, KIND=KINDS[kind], PDL=pdl, **product, **dependent(pdl),
    )  # fmt: skip
    map_, product = _product(down, tiles.contract, bulk)
    _contract_kernel[
        _grid(tokens * top_k, num_experts, tiles.contract.rows, triton.cdiv(hidden, tiles.contract.columns))
    ](
        expanded, down, map_, contracted, counts, listed, tokens, HIDDEN=hidden, INNER=inner, PDL=pdl, **product, **dependent(pdl)
    )  # fmt: skip
    return _combined(contracted, weights, empty, epilogue, pdl=pdl)


def _combined(
    contracted: Tensor, weights: Tensor, empty: Empty, epilogue: Epilogue = PLAIN, *, pdl: bool = False
) -> Fused:
    """The weighted sum of each token's experts, ``contracted`` [T, top_k, H], and what follows it."""
    tokens, top_k, hidden = contracted.shape
    block = min(1024, triton.next_power_of_2(hidden))
    y, tiles = empty((tokens, hidden), contracted.dtype, contracted.device), triton.cdiv(hidden, block)
    found, ends, _, made = ends_of(epilogue, None, y, tiles, empty, 0)
    _combine_kernel[(tokens, tiles)](
        contracted, weights, *ends, tokens, AROUND=made, TOP_K=top_k, HIDDEN=hidden, BLOCK=block, PDL=pdl, num_warps=4, **dependent(pdl)
    )  # fmt: skip
    return found


def _grid(pairs: int, experts: int, rows: int, across: int) -> tuple[int]:
    """As many programs as there are tiles at most, however the pairs are spread. ``rows``: pairs a tile; ``across``:
    tiles beside one another."""
    return ((pairs // rows + min(experts, pairs)) * across,)


def _product(weight: Tensor, tile: Tile, bulk: bool) -> tuple[Any, dict[str, Any]]:
    """How the copy engine finds tiles of ``weight`` [E, N, K] (the weight itself where it cannot), and the kernel's
    sizes."""
    num_experts, _, depth = weight.shape
    bulk = bulk and depth * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    map_ = TensorDescriptor.from_tensor(weight.view(-1, depth), [tile.columns, tile.depth]) if bulk else weight
    return map_, {
        "BULK": bulk,
        "EXPERTS": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": tile.rows,
        "HALVINGS": tile.halvings,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _routed(
    router_logits: Tensor, top_k: int, renormalize: bool, places: Tensor | None = None, held: int | None = None,
    epilogue: Epilogue = PLAIN, hidden: int = 1, *, pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Weights [T, top_k]; how many pairs each of the ``held`` experts has (None: of all); which ones [held, T], in any
    order; of a norm half done, what rows of ``hidden`` values are multiplied by, [T]."""
    (tokens, num_experts), device = router_logits.shape, router_logits.device
    held = held or num_experts
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    counts = torch.zeros(held, dtype=torch.int32, device=device)
    listed = torch.empty((held, tokens), dtype=torch.int32, device=device)
    table, turns = (counts, 1) if places is None else (places, len(places))
    normed = epilogue.squares is not None
    squares = weights if epilogue.squares is None else epilogue.squares
    rstd = torch.empty(tokens, dtype=torch.float32, device=device) if normed else weights
    _route_kernel[(tokens,)](
        router_logits, weights, counts, listed, table, squares, rstd, router_logits.stride(0), tokens, turns, tokens, len(squares), epilogue.eps,
        NORMED=normed, HIDDEN=hidden, EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts), TOP_K=top_k, BLOCK_K=triton.next_power_of_2(top_k), RENORMALIZE=renormalize,
        PLACED=places is not None, PDL=pdl, num_warps=1 if num_experts <= 256 else 4, **dependent(pdl),
    )  # fmt: skip
    return weights, counts, listed, rstd


create_moe = Moe.at
