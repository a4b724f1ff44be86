"""Gate and what it gates as one product, for 65 rows and more (csrc/gated.cu, gated_turns.cu): a layer's callable, machine code, launches.

What lives here: what the kernel is given, which tile serves how many rows. What may not: measuring (bench/tune_gated.py), compiling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import c_int, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.candidate import Empty, Site, plainly_empty
from headrace.kernels.cuda import compiler
from headrace.kernels.cuda.driver import Function, Module, NotLoadable, TensorMap, tensor_map
from headrace.kernels.cuda.gated_measured import Tile, Tiles, measured_tiles
from headrace.kernels.triton.activation import KINDS
from headrace.spec import Activation

_NAME = "gated"
_ROWS, _DEPTH, _THREADS = 128, 64, 384  # as the sources have them
_SHARED = 232448 - 2048  # bytes of a processor, less what is aligned and the barriers


def stages_of(columns: int) -> int:
    """How deep the ring is: what fits."""
    return min(8, _SHARED // (2 * _DEPTH * (_ROWS + columns)))


def _shared_bytes(columns: int) -> int:
    stages = stages_of(columns)
    return 1024 + stages * (2 * _DEPTH * (_ROWS + columns) + 16)


def instruction(columns: int) -> str:
    """The matrix instruction for 64 rows and so many columns, as ``mma(sums, x, w, keep)``; without ``keep`` sums begin at zero."""
    count = columns // 2
    sums, held = ", ".join(f"%{i}" for i in range(count)), ", ".join(f'"+f"(c[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void mma(float (&c)[{count}], unsigned long long x, unsigned long long w, int keep) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}\\n"\n'
        f'    : {held} : "l"(x), "l"(w), "r"(keep));\n}}\n'
    )


def machine_code(tile: Tile, activation: Activation) -> bytes:
    """Built, or kept from before. Raises CompileError."""
    defined = (f"-DCOLUMNS={tile.columns}", f"-DSTAGES={stages_of(tile.columns)}", f"-DKIND={KINDS[activation]}")
    before, kernel = ("matrix.cuh", "activation.cuh", "gated_end.cuh"), "gated_turns.cu" if tile.turns else "gated.cu"
    return compiler.build(compiler.source(*before) + instruction(tile.columns) + compiler.source(kernel), ("-arch=sm_90a", *defined))


class Kernels:
    """The kernels of one device, each built at its first use, in whichever thread comes first."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.cuda.current_device() if device.index is None else device.index
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._functions: dict[tuple[Tile, Activation], Function] = {}
        self._lock = threading.Lock()

    def function(self, tile: Tile, activation: Activation) -> Function:
        """Raises CompileError, NotLoadable."""
        key = (tile, activation)
        found = self._functions.get(key)
        if found is None:
            code = machine_code(*key)  # several threads at once, each another one
            with self._lock:
                if key not in self._functions:
                    self._functions[key] = Module(code, self.device).function(_NAME, _shared_bytes(tile.columns))
                found = self._functions[key]
        return found


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """y = act(x · Wᵀ) ⊙ (x · Vᵀ): ``x`` [T, in] and the weight [2 out, in], W before V, in bfloat16; float32 sums, one rounding.

    ``tiles`` says for how many rows which tile is best; the others get None: product and activation apart are as quick.
    """

    weight: Tensor
    kernels: Kernels
    tiles: Tiles
    maps: dict[int, TensorMap]  # of the weight, by columns of a tile
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, activation: Activation) -> Tensor | None:
        tile = self.tile(x.shape[0])
        return self.compute(x, activation, tile) if tile else None

    def tile(self, tokens: int) -> Tile | None:
        """That serves so many rows; None: none does."""
        return next((tile for most, tile in self.tiles if tokens <= most), None)

    def compute(self, x: Tensor, activation: Activation, tile: Tile) -> Tensor:
        rows, outs, columns = x.contiguous(), self.weight.shape[0] // 2, tile.columns
        y = self.empty((rows.shape[0], outs), x.dtype, x.device)
        if columns not in self.maps:
            self.maps[columns] = tensor_map(self.weight, columns // 2, _DEPTH)
        cluster = 2 if tile.turns else 1  # programs with tiles below each other
        places = -(-rows.shape[0] // (_ROWS * cluster)) * -(-outs // (columns // 2))
        self.kernels.function(tile, activation).launch(
            min(places, self.kernels.processors // cluster) * cluster, _THREADS, torch.cuda.current_stream(x.device).cuda_stream,
            tensor_map(rows, _ROWS // 2, _DEPTH), self.maps[columns], c_void_p(y.data_ptr()),
            c_int(rows.shape[0]), c_int(outs), c_int(rows.shape[1]), cluster=cluster,
        )  # fmt: skip
        return y


def create_gated(site: Site) -> Callable[[Tensor, Tensor | None], GatedLinear]:
    kernels, shape = Kernels(site.device), (site.facts["out_features"] // 2, site.facts["in_features"])
    tiles = measured_tiles(torch.cuda.get_device_name(site.device)).get(shape, ())
    return lambda weight, bias: GatedLinear(weight.contiguous(), kernels, tiles, {}, site.empty)


def build_failure(error: Exception) -> str | None:
    """Why no kernel of ours can be built or loaded here; None: the error is about something else."""
    return str(error) if isinstance(error, (compiler.CompileError, NotLoadable)) else None
