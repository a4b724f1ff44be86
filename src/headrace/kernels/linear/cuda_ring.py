"""Products of up to 64 rows with what stands around them, whose weights are under way early (ring.cu): a layer's
callable, its launches.

What lives here: what the kernel is given, its machine code. What may not: which form is best (ring_forms.py), the
kernel.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from headrace.kernels.build import nvrtc
from headrace.kernels.build.driver import TensorMap, tensor_map
from headrace.kernels.build.variants import Variants
from headrace.kernels.candidate import Empty, Shape, plainly_empty
from headrace.kernels.linear.cuda_gated import instruction
from headrace.kernels.linear.epilogue import Epilogue, Fuse, Fused
from headrace.kernels.linear.packing import Packed
from headrace.kernels.linear.ring_forms import DEPTH, RingForm, RingForms, form_of
from headrace.kernels.norm.triton_activation import KINDS
from headrace.spec import Activation

_NAME = "ring"
_MOST_MAPS = 1024  # of inputs that are described at once


def machine_code(form: RingForm, gate: Activation | None, turned: bool = False) -> bytes:
    """Built, or kept from before. ``turned``: codes lie as a gate's do, whose columns are wanted side by side. Raises
    CompileError."""
    kind, coding = -1 if gate is None else KINDS[gate], form.coding
    sizes = {"ROWS": form.rows, "STAGES": form.stages, "WAYS": form.ways, "KIND": kind, "COLUMNS": form.columns} | (
        {"TURNS": form.turns} if form.turns > 1 else {}
    )
    if coding is not None:
        sizes |= {"BITS": coding.bits, "SETS": coding.sets, "ZEROS": int(coding.zeros), "FLOATS": int(coding.floats)}
        sizes |= {"SHIFTS": int(coding.shifts), "SCALES": coding.scales.value} | (
            {"SCALED_CODES": 1} if form.many else {}
        )
    kernel = "linear/packed_gemm.cu" if form.many else "linear/ring.cu"
    sources = (kernel,) if coding is None else ("linear/packed.cuh", kernel)
    text = nvrtc.source("build/matrix.cuh", "build/early.cuh", "build/activation.cuh")
    if turned:
        sizes["TURNED"] = 1
    if form.eight:
        sizes |= {"EIGHT": 2 if form.eight == "int8" else 1} | ({"BLOCKED": 1} if form.eight == "blocks" else {})
    kind_of = "fp8" if form.eight == "blocks" else form.eight
    text += instruction(form.rows, registers=coding is not None, eight=kind_of) + nvrtc.source(*sources)
    return nvrtc.build(text, ("-arch=sm_90a", *(f"-D{name}={value}" for name, value in sizes.items())))


class Kernels(Variants[tuple[RingForm, Activation | None, bool]]):
    """As machine_code takes them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, _NAME, lambda variant: machine_code(*variant), lambda variant: variant[0].shared_bytes)
        self._maps: dict[tuple[int, int, int, int], TensorMap] = {}

    def input_map(self, x: Tensor, rows: int) -> TensorMap:
        """Of rows [T, in], one behind the other."""
        place = (x.data_ptr(), *x.shape, rows)
        if place not in self._maps:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            self._maps[place] = tensor_map(x, rows, DEPTH)
        return self._maps[place]


@cache
def kernels_of(device: int) -> Kernels:
    return Kernels(torch.device("cuda", device))


@dataclass(frozen=True, slots=True)
class RingLinear:
    """As ``fused_linear``'s twin says; ``x`` [T, in] and all of ``epilogue`` in bfloat16 but squares (float32) and scale
    (that or float32).

    ``others`` computes what no form of the table serves. The result is not rounded between the product and what follows
    it.
    """

    weight: Tensor | Packed  # [out, in]; gated: [2 out, in]; of 8 bits: pairs of them, and so are inputs
    bias: Tensor | None
    shape: Shape
    forms: RingForms  # of the weight's coding, if it has one
    kernels: Kernels
    pdl: bool
    others: Fuse
    maps: dict[int, TensorMap]  # of the weight, by columns of a tile
    empty: Empty = plainly_empty
    # of 8 bits: scales of the weight's rows or blocks, float32; squares are those of inputs
    units: Tensor | None = None

    def __call__(self, x: Tensor, epilogue: Epilogue) -> Fused:
        form = form_of(self.forms, x.shape[0])
        return self.others(x, epilogue) if form is None else self.compute(x, epilogue, form)

    def compute(self, x: Tensor, epilogue: Epilogue, form: RingForm, into: Tensor | None = None) -> Fused:
        """``into``: columns of something larger that become the result; for few rows, without residual and scale."""
        x, outs, kernels = x.reshape(-1, x.shape[-1]).contiguous(), self.shape.outs, self.kernels
        tokens, ins = x.shape
        y = self.empty((tokens, outs), x.dtype, x.device) if into is None else into
        scaled = sums = None
        if epilogue.scale is not None:
            scaled = self.empty((tokens, outs), x.dtype, x.device)
            # the form decides how many: not planned
            sums = torch.empty((form.tiles(self.shape), tokens), dtype=torch.float32, device=x.device)
        pieces = 0 if epilogue.squares is None else epilogue.squares.shape[0]
        units = self.units if isinstance(self.weight, Tensor) else self.weight.factor
        turned = self.turned and epilogue.gate is None
        function = kernels.function((replace(form, late=False), epilogue.gate, turned))
        inputs = kernels.input_map(x, form.rows)
        size = (
            form.programs(self.shape, kernels.processors),
            form.threads,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
        if form.many:
            function.launch(
                *size, inputs, self._weights(form.columns), _at(units), _at(self.bias), _at(y),
                c_int(tokens), c_int(outs), c_int(ins), c_int(form.late), pdl=self.pdl, cluster=form.ways,
            )  # fmt: skip
            return y, None, None
        function.launch(
            *size, inputs, self._weights(form.columns), _at(epilogue.squares), _at(self.bias), _at(epilogue.residual),
            _at(epilogue.scale), c_int(0 if epilogue.scale is None else epilogue.scale.element_size()), _at(y), _at(scaled), _at(sums),
            c_int(pieces), c_int(tokens), c_int(outs), c_int(outs if into is None else into.stride(0)), c_int(ins), c_float(epilogue.eps),
            c_int(form.late),
            *(() if units is None else (_at(units),)), pdl=self.pdl, cluster=form.ways,
        )  # fmt: skip
        return y, scaled, sums

    @property
    def turned(self) -> bool:
        """Whether rows of the weight lie as a gate's do."""
        return not isinstance(self.weight, Tensor) and self.weight.gated

    def _weights(self, columns: int) -> TensorMap | c_void_p:
        if not isinstance(self.weight, Tensor):
            return _at(self.weight.blocks)
        if columns not in self.maps:
            self.maps[columns] = (
                _gated_map(self.weight, columns) if self.shape.gated else tensor_map(self.weight, columns, DEPTH)
            )
        return self.maps[columns]


def _gated_map(weight: Tensor, columns: int) -> TensorMap:
    """Eight rows of the gate and the eight that it gates in turn."""
    outs, ins = weight.shape[0] // 2, weight.shape[1]
    return tensor_map(weight.view(2, outs // 8, 8, ins).transpose(0, 1), columns // 16, 2, 8, DEPTH)


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())
