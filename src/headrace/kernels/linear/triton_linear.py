# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The linear layer whose bits do not depend on the batch.

What lives here: the product x · Wᵀ for ``--batch-invariant``, and its tiles. What may not: the ordinary product
(torch's), weight formats.

A library picks a kernel by the number of rows, and another kernel sums K in another order. Here one accumulator a
result runs through all of K in steps of 16, never split, whatever the tile: tiles differ in what is computed side by
side, not in what is added to what. That the two matrix instructions of an H200 (mma.sync in the tiles of 16 rows, wgmma
in the others) round alike is nobody's promise: it was measured, and tests/gpu holds it. Elsewhere one tile serves all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.build.launch import launchable
from headrace.kernels.candidate import CallSite, Empty, WeightFacts, plainly_empty

_BAND = 8  # tiles of rows that share a column of weights while it is in the second-level cache


@triton.jit
def _place(tokens, outs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """(first row, first column) of this program's tile: bands of BAND tiles of rows, column after column."""
    across, down = tl.cdiv(outs, BLOCK_N), tl.cdiv(tokens, BLOCK_M)
    band = tl.program_id(0) // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * across)
    return (band * BAND + within % height) * BLOCK_M, within // height * BLOCK_N


@launchable(do_not_specialize=("tokens",))
def _linear_kernel(
    x_ptr, x_map, weight_ptr, weight_map, bias_ptr, y_ptr, tokens, outs, ins, x_row,
    BULK: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    first_row, first_column = _place(tokens, outs, BLOCK_M, BLOCK_N, BAND)
    row, column, step = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    there, inside = row < tokens, column < outs
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row + step[None, :]
    weight_at = weight_ptr + column.to(tl.int64)[:, None] * ins + step[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, ins, BLOCK_K):
        if BULK:  # what lies beyond either matrix arrives as zeros
            x = x_map.load([first_row, k])
            weight = weight_map.load([first_column, k])
        else:
            left = (step < ins - k)[None, :]
            x = tl.load(x_at + k, mask=there[:, None] & left, other=0.0)
            weight = tl.load(weight_at + k, mask=inside[:, None] & left, other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + row.to(tl.int64)[:, None] * outs + column[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows × columns of the result a program computes, and how much of K it reads at once; found by measurement on an
    H200."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    rate: float = 1.0  # of the matrix instructions, a share of the best tile's


ONE = Tile(64, 64, 64, 4, 4)  # serves every number of rows where tiles may differ in the order of sums
LARGE = (
    Tile(256, 128, 64, 8, 4),
    Tile(128, 128, 64, 8, 4, 0.87),
    Tile(128, 64, 128, 4, 4, 0.75),
    Tile(64, 64, 64, 4, 6, 0.6),
)


def tile_for(dtype: torch.dtype, tokens: int, outs: int, *, processors: int, one_order: bool) -> Tile:
    """``one_order``: every tile here adds in the same order, so that the shape may choose."""
    if dtype is torch.float32:  # multiplied and added one by one, in the order of K, in any tile
        return Tile(16, 32, 64, 4, 3) if tokens <= 16 else Tile(64, 64, 16, 4, 3)
    if not one_order:
        return ONE
    if tokens > 64:
        return min(
            LARGE, key=lambda tile: _rounds(tile, tokens, outs, processors) * tile.rows * tile.columns / tile.rate
        )
    narrow, wide = outs <= 32 * processors, outs >= 128 * processors
    # half-empty tiles of 64 rows measured slower than full ones of 16, which find their weights in the cache
    if tokens > 48:
        return Tile(64, 32, 128, 4, 5) if narrow else Tile(64, 128, 64, 4, 5) if wide else Tile(64, 64, 128, 4, 4)
    return Tile(16, 32, 256, 4, 4) if narrow else Tile(16, 128, 128, 4, 4) if wide else Tile(16, 64, 128, 4, 5)


def _rounds(tile: Tile, tokens: int, outs: int, processors: int) -> int:
    """How often every processor computes a tile."""
    tiles = -(-tokens // tile.rows) * -(-outs // tile.columns)
    return -(-tiles // processors)


@dataclass(frozen=True, slots=True)
class InvariantLinear:
    """y = x · Wᵀ (+ bias), the bits of a row independent of the others and of its place ("Defeating Nondeterminism in
    LLM Inference", He 2025).

    ``x`` [..., K], ``weight`` [N, K], ``bias`` [N], one type of float32, bfloat16, float16 → [..., N]; float32 sums in
    the order of K, exact products (no TF32), the bias added before the one rounding. ``bulk``: the device has a copy
    engine (compute capability 9), used where rows begin at multiples of 16 bytes; what is added to what is the same
    with and without it.
    """

    weight: Tensor
    bias: Tensor | None
    processors: int
    one_order: bool
    bulk: bool
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor) -> Tensor:
        return self.compute(x, self.tile(x.numel() // x.shape[-1], self.weight.shape[0]))

    def tile(self, tokens: int, outs: int) -> Tile:
        """The tile for so many rows of a layer of so many columns."""
        return tile_for(self.weight.dtype, tokens, outs, processors=self.processors, one_order=self.one_order)

    def compute(self, x: Tensor, tile: Tile) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        y = self.empty((*x.shape[:-1], self.weight.shape[0]), x.dtype, x.device)
        if y.numel():
            launch(rows, self.weight, self.bias, y, tile, bulk=self.bulk and _aligned(rows) and _aligned(self.weight))
        return y


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, tile: Tile, *, bulk: bool) -> None:
    """Fills ``y`` [T, N] from ``x`` [T, K] with one tile. ``bulk``: by the copy engine."""
    (tokens, ins), outs = x.shape, weight.shape[0]
    x_map = TensorDescriptor(x, [tokens, ins], [x.stride(0), 1], [tile.rows, tile.depth]) if bulk else x
    weight_map = TensorDescriptor(weight, [outs, ins], [ins, 1], [tile.columns, tile.depth]) if bulk else weight
    _linear_kernel[(triton.cdiv(tokens, tile.rows) * triton.cdiv(outs, tile.columns),)](
        x, x_map, weight, weight_map, weight if bias is None else bias, y, tokens, outs, ins, x.stride(0),
        BULK=bulk, HAS_BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, BAND=_BAND,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _aligned(x: Tensor) -> bool:
    """Whether the copy engine can read rows of ``x``: they, and the distance between them, lie at multiples of 16
    bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 and x.stride(0) >= x.shape[1]


def create_linear(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]:
    hopper, processors = site.card.capability[0] == 9, site.card.processors

    def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return InvariantLinear(weight.contiguous(), bias, processors, one_order=hopper, bulk=hopper, empty=site.empty)

    return pack
