"""Products of 2 to 64 rows with what stands around them, whose weights are under way early (csrc/ring.cu): a layer's callable, its launches.

What lives here: what the kernel is given, its machine code. What may not: which form is best (ring_forms.py), the kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from headrace.kernels.around import Around, Fused
from headrace.kernels.candidate import Empty, Site, plainly_empty
from headrace.kernels.cuda import compiler
from headrace.kernels.cuda.driver import Function, Module, NotLoadable, TensorMap, tensor_map
from headrace.kernels.cuda.gated import instruction
from headrace.kernels.cuda.ring_forms import DEPTH, RingForm, RingForms, form_of, measured_forms
from headrace.kernels.triton.activation import KINDS
from headrace.kernels.triton.flat_forms import Shape
from headrace.kernels.triton.flat_linear import FusedLinear, create_fused
from headrace.spec import Activation

_NAME = "ring"
_MOST_MAPS = 1024  # of inputs that are described at once


def machine_code(form: RingForm, gate: Activation | None) -> bytes:
    """Built, or kept from before. Raises CompileError."""
    kind = -1 if gate is None else KINDS[gate]
    sizes = {"ROWS": form.rows, "GROUPS": form.columns // 64, "STAGES": form.stages, "WAYS": form.ways, "KIND": kind}
    text = compiler.source("matrix.cuh", "early.cuh", "activation.cuh") + instruction(form.rows) + compiler.source("ring.cu")
    return compiler.build(text, ("-arch=sm_90a", *(f"-D{name}={value}" for name, value in sizes.items())))


class Kernels:
    """The kernels of one device, each built at its first use, in whichever thread comes first."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._functions: dict[tuple[RingForm, Activation | None], Function] = {}
        self._maps: dict[tuple[int, int, int, int], TensorMap] = {}
        self._lock = threading.Lock()

    def function(self, form: RingForm, gate: Activation | None) -> Function:
        """Raises CompileError, NotLoadable."""
        key = (replace(form, late=False), gate)
        found = self._functions.get(key)
        if found is None:
            code = machine_code(*key)  # several threads at once, each another one
            with self._lock:
                if key not in self._functions:
                    self._functions[key] = Module(code, self.device).function(_NAME, form.shared_bytes)
                found = self._functions[key]
        return found

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
    return Kernels(device)


@dataclass(frozen=True, slots=True)
class RingLinear:
    """As ``fused_linear``'s twin says; ``x`` [T, in] and all of ``around`` in bfloat16 but squares (float32) and scale (that or float32).

    ``others`` computes what no form of the table serves. The result is not rounded between the product and what follows it.
    """

    weight: Tensor  # [out, in]; gated: [2 out, in]
    bias: Tensor | None
    shape: Shape
    forms: RingForms
    kernels: Kernels
    programmatic: bool
    others: FusedLinear
    maps: dict[int, TensorMap]  # of the weight, by columns of a tile
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, around: Around) -> Fused:
        form = form_of(self.forms, x.shape[0])
        return self.others(x, around) if form is None else self.compute(x, around, form)

    def compute(self, x: Tensor, around: Around, form: RingForm) -> Fused:
        x, outs, kernels = x.reshape(-1, x.shape[-1]).contiguous(), self.shape.outs, self.kernels
        tokens, ins = x.shape
        y = self.empty((tokens, outs), x.dtype, x.device)
        scaled = sums = None
        if around.scale is not None:
            scaled = self.empty((tokens, outs), x.dtype, x.device)
            sums = torch.empty((form.tiles(self.shape), tokens), dtype=torch.float32, device=x.device)  # the form decides how many: not planned
        pieces = 0 if around.squares is None else around.squares.shape[0]
        kernels.function(form, around.gate).launch(
            form.programs(self.shape, kernels.processors), 2 * form.columns + 32, torch.cuda.current_stream(x.device).cuda_stream,
            kernels.input_map(x, form.rows), self._weight_map(form.columns), _at(around.squares), _at(self.bias), _at(around.residual),
            _at(around.scale), c_int(0 if around.scale is None else around.scale.element_size()), _at(y), _at(scaled), _at(sums),
            c_int(pieces), c_int(tokens), c_int(outs), c_int(ins), c_float(around.eps), c_int(form.late),
            programmatic=self.programmatic, cluster=form.ways,
        )  # fmt: skip
        return y, scaled, sums

    def _weight_map(self, columns: int) -> TensorMap:
        if columns not in self.maps:
            self.maps[columns] = _gated_map(self.weight, columns) if self.shape.gated else tensor_map(self.weight, columns, DEPTH)
        return self.maps[columns]


def _gated_map(weight: Tensor, columns: int) -> TensorMap:
    """Eight rows of the gate and the eight that it gates in turn."""
    outs, ins = weight.shape[0] // 2, weight.shape[1]
    return tensor_map(weight.view(2, outs // 8, 8, ins).transpose(0, 1), columns // 16, 2, 8, DEPTH)


def _at(tensor: Tensor | None) -> c_void_p:
    return c_void_p(None if tensor is None else tensor.data_ptr())


def shape_of(site: Site) -> Shape:
    gated = bool(site.facts["gated"])
    return Shape(site.facts["out_features"] // (2 if gated else 1), site.facts["in_features"], gated)


def forms_at(shape: Shape, device: torch.device) -> RingForms:
    """What was measured for the weight, as far as it can be computed there."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    found = measured_forms(torch.cuda.get_device_name(device)).get(shape, ())
    return tuple((most, form if form is not None and form.fits(shape, processors) else None) for most, form in found)


def create_ring(site: Site) -> Callable[[Tensor, Tensor | None], RingLinear]:
    """``site``: one whose weight has measured forms."""
    shape, others = shape_of(site), create_fused(site)
    forms = forms_at(shape, site.device)
    kernels = kernels_of(torch.cuda.current_device() if site.device.index is None else site.device.index)

    def make(weight: Tensor, bias: Tensor | None) -> RingLinear:
        weight = weight.contiguous()
        return RingLinear(weight, bias, shape, forms, kernels, site.programmatic, others(weight, bias), {}, site.empty)

    return make


def build_failure(error: Exception) -> str | None:
    """Why no kernel of ours can be built or loaded here; None: the error is about something else."""
    return str(error) if isinstance(error, (compiler.CompileError, NotLoadable)) else None
