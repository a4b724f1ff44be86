"""Gate and what it gates as one product, for 65 rows and more (gated*.cu), and products of numbers of 8 bits: a layer's
callable, machine code, launches.

What lives here: what the kernel is given, which tile serves how many rows. What may not: measuring (bench/tune.py),
compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import TensorMap, tensor_map
from headrace.kernels.build.variants import Variants
from headrace.kernels.candidate import CallSite, Empty, Shape, WeightFacts, plainly_empty
from headrace.kernels.linear.gated_tiles import EIGHT_TILES, WIDEST_ROWS, Form, Tile, Tiles, measured_tiles
from headrace.kernels.norm.triton_activation import KINDS
from headrace.spec import Activation

_NAME = "gated"
_DEPTH, _THREADS = 64, 384  # as the sources have them
_SHARED = 232448 - 2048  # bytes of a processor, less what is aligned and the barriers
_SOURCES = {Form.ONE: "linear/gated.cu", Form.TURNS: "linear/gated_turns.cu", Form.TALL: "linear/gated_tall.cu"}


def _stage_bytes(tile: Tile) -> int:
    return 2 * _DEPTH * (tile.rows + tile.columns)


def stages_of(tile: Tile) -> int:
    """How deep the ring is: what fits."""
    return min(8, _SHARED // _stage_bytes(tile))


def _shared_bytes(tile: Tile) -> int:
    return 1024 + stages_of(tile) * (_stage_bytes(tile) + 16)


def places(tile: Tile, rows: int, outs: int) -> int:
    """Tiles that the programs of a cluster take at once, in all."""
    if tile.form is Form.TALL:  # side by side; the others lie below each other
        return -(-rows // tile.rows) * -(-outs // tile.columns)
    return -(-rows // (tile.rows * tile.cluster)) * -(-outs // (tile.columns // 2))


def instruction(columns: int, *, registers: bool = False, eight: str = "") -> str:
    """The matrix instruction for 64 rows and so many columns, as ``mma(sums, x, w, keep)``; without ``keep`` sums begin
    at zero.

    ``registers``: x is what a thread holds of the 64 rows, four pairs of bfloat16; else both are descriptors of shared
    memory. ``eight``: both are "fp8" or "int8", whose sums are whole numbers; else bfloat16.
    """
    count, whole = columns // 2, eight == "int8"
    sums = ", ".join(f"%{i}" for i in range(count))
    held = ", ".join(f'"+{"r" if whole else "f"}"(c[{i}])' for i in range(count))
    kinds, behind = {
        "": ("k16.f32.bf16.bf16", ", 1, 1, 0, 0"),
        "fp8": ("k32.f32.e4m3.e4m3", ", 1, 1"),
        "int8": ("k32.s32.s8.s8", ""),
    }[eight]
    x, taken, given = "unsigned long long x", 1, '"l"(x)'
    if registers:
        x, taken, given, behind = "const unsigned (&x)[4]", 4, ", ".join(f'"r"(x[{i}])' for i in range(4)), ", 1, 1, 0"
    left = ", ".join(f"%{count + i}" for i in range(taken))
    left = f"{{{left}}}" if registers else left
    return (
        f"__device__ __forceinline__ void mma({'int' if whole else 'float'} (&c)[{count}], {x}, unsigned long long w, int keep) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + taken + 1}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}{kinds} {{{sums}}}, {left}, %{count + taken}, p{behind};\\n}}\\n"\n'
        f'    : {held} : {given}, "l"(w), "r"(keep));\n}}\n'
    )


def machine_code(tile: Tile, activation: Activation | str, thin: int) -> bytes:
    """Built, or kept from before. ``thin``: as ``Tile.thin`` has it. In place of the activation "fp8" or "int8": a
    product alone. Raises CompileError."""
    eight = "" if isinstance(activation, Activation) else activation
    defined = {"COLUMNS": tile.columns, "STAGES": stages_of(tile)}
    defined |= {"EIGHT": 2 if eight == "int8" else 1} if eight else {}
    defined["KIND"] = KINDS[activation] if isinstance(activation, Activation) else -1
    if tile.form is Form.TALL:
        defined["THIN"] = thin
    instructions = "".join(
        instruction(each, eight=eight) for each in ((tile.columns, thin) if thin else (tile.columns,))
    )
    text = (
        nvrtc.source("build/matrix.cuh", "build/activation.cuh", "linear/gated_end.cuh")
        + instructions
        + nvrtc.source(_SOURCES[tile.form])
    )
    return nvrtc.build(text, ("-arch=sm_90a", *(f"-D{name}={value}" for name, value in defined.items())))


Kernels = Variants[tuple[Tile, Activation | str, int]]  # as machine_code takes them


def kernels_of(device: torch.device) -> Kernels:
    return Kernels(device, _NAME, lambda variant: machine_code(*variant), lambda variant: _shared_bytes(variant[0]))


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """y = act(x · Wᵀ) ⊙ (x · Vᵀ): ``x`` [T, in] and the weight [2 out, in], W before V, in bfloat16; float32 sums, one
    rounding.

    ``tiles`` says for how many rows which tile is best; the others get None: product and activation apart are as quick.
    """

    weight: Tensor
    kernels: Kernels
    tiles: Tiles
    maps: dict[int, TensorMap]  # of the weight, by rows of a box
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, activation: Activation) -> Tensor | None:
        tile = self.tile(x.shape[0])
        return self.compute(x, activation, tile) if tile else None

    def tile(self, tokens: int) -> Tile | None:
        """That serves so many rows; None: none does."""
        return next((tile for most, tile in self.tiles if tokens <= most), None)

    def compute(self, x: Tensor, activation: Activation, tile: Tile) -> Tensor:
        rows, outs = x.contiguous(), self.weight.shape[0] // 2
        y = self.empty((rows.shape[0], outs), x.dtype, x.device)
        clusters = min(places(tile, rows.shape[0], outs), self.kernels.processors // tile.cluster)
        self.kernels.function((tile, activation, tile.thin(outs))).launch(
            clusters * tile.cluster, _THREADS, torch.cuda.current_stream(x.device).cuda_stream,
            tensor_map(rows, tile.rows // 2, _DEPTH), *self._weight_maps(tile, outs), c_void_p(y.data_ptr()),
            c_int(rows.shape[0]), c_int(outs), c_int(rows.shape[1]), cluster=tile.cluster,
        )  # fmt: skip
        return y

    def _weight_maps(self, tile: Tile, outs: int) -> list[TensorMap]:
        """As the kernel takes them: tall tiles may leave columns to thin ones."""
        widths = [tile.columns, *[tile.thin(outs) or tile.columns] * (tile.form is Form.TALL)]
        for rows in {columns // 2 for columns in widths} - self.maps.keys():
            self.maps[rows] = tensor_map(self.weight, rows, _DEPTH)
        return [self.maps[columns // 2] for columns in widths]


@dataclass(frozen=True, slots=True)
class EightBitGemm:
    """y = (x · s)(W · u)ᵀ of many rows: x [T, in] and W [out, in] of "fp8" or "int8", s [T, 1] and u [out] float32,
    y [T, out] bfloat16, rounded once. in and out multiples of 16."""

    kind: str
    weight: Tensor
    units: Tensor
    kernels: Kernels
    maps: dict[int, TensorMap]  # of the weight, by rows of a box
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.compute(x, scale, self.tile(len(x)))

    def tile(self, tokens: int) -> Tile:
        """The one whose last wave leaves least undone."""
        outs, clusters = len(self.weight), self.kernels.processors // 2

        def cost(tile: Tile) -> float:
            return -(-places(tile, tokens, outs // 2) // clusters) * tile.columns * EIGHT_TILES[tile]

        return next(iter(EIGHT_TILES)) if tokens > WIDEST_ROWS else min(EIGHT_TILES, key=cost)

    def compute(self, x: Tensor, scale: Tensor, tile: Tile) -> Tensor:
        (tokens, ins), outs, half = x.shape, len(self.weight), tile.columns // 2
        y = self.empty((tokens, outs), torch.bfloat16, x.device)
        if half not in self.maps:
            self.maps[half] = tensor_map(self.weight.view(torch.bfloat16), half, _DEPTH)
        clusters = min(places(tile, tokens, outs // 2), self.kernels.processors // 2)
        self.kernels.function((tile, self.kind, 0)).launch(
            2 * clusters, _THREADS, torch.cuda.current_stream(x.device).cuda_stream,
            tensor_map(x.view(torch.bfloat16), tile.rows // 2, _DEPTH), self.maps[half], c_void_p(y.data_ptr()),
            c_int(tokens), c_int(outs), c_int(ins // 2), c_void_p(scale.data_ptr()), c_void_p(self.units.data_ptr()), cluster=2,
        )  # fmt: skip
        return y


def create_gated(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], GatedLinear]:
    kernels, shape = kernels_of(site.device), Shape(site.facts.out_features // 2, site.facts.in_features)
    tiles = measured_tiles(site.card.name).get(shape, ())
    return lambda weight, bias: GatedLinear(weight.contiguous(), kernels, tiles, {}, site.empty)
