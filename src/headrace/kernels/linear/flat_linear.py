"""Linear layers for few rows: the product alone, and the product with what stands around it.

What lives here: the callables, launches. What may not: kernels (triton_flat.py), which form is
best (flat_forms.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.build.launch import dependent
from headrace.kernels.candidate import CallSite, Empty, Shape, WeightFacts, plainly_empty
from headrace.kernels.linear.epilogue import PLAIN, Epilogue, Fused
from headrace.kernels.linear.flat_forms import MEASURED, forms_for, without_vendor
from headrace.kernels.linear.forms import FLAT, VECTOR, Form, Forms
from headrace.kernels.linear.triton_ends import Scratch, ends_of, make_scratch
from headrace.kernels.linear.triton_flat import _flat_kernel, _vector_kernel

_PIECES = {VECTOR: 1024, FLAT: 64}  # partial sums of squares that are loaded early


@dataclass(frozen=True, slots=True)
class Product:
    """One layer's weight and how it is multiplied. Calls of products that share scratch memory must follow each other
    on the device."""

    weight: Tensor  # [out, in]; gated: [2 out, in]
    bias: Tensor | None
    shape: Shape
    forms: Forms
    scratch: Scratch
    pdl: bool
    empty: Empty = plainly_empty

    def form(self, tokens: int) -> Form | None:
        return next((form for most, form in self.forms if tokens <= most), None)

    def launch(self, form: Form, x: Tensor, epilogue: Epilogue) -> Fused:  # x [T, in], rows one behind the other
        (tokens, ins), weight, outs = x.shape, self.weight, self.shape.outs
        y, tiles = self.empty((tokens, outs), x.dtype, x.device), triton.cdiv(outs, form.columns)
        found, pointers, pieces, made = ends_of(epilogue, self.bias, y, tiles, self.empty, _PIECES[form.kind])
        named: dict[str, Any] = {"AROUND": made, "BLOCK_N": form.columns, "BLOCK_K": form.depth, "LATE": form.late}
        named |= {"PDL": self.pdl, "num_warps": form.warps, **dependent(self.pdl)}
        if form.kind == VECTOR:
            _vector_kernel[(tiles,)](
                x, weight, *pointers, pieces, tokens, outs, ins, epilogue.eps, AHEAD=form.ways, **named
            )
            return found
        x_map = TensorDescriptor(x, [tokens, ins], [ins, 1], [form.rows, form.depth])
        weight_map = TensorDescriptor(weight, list(weight.shape), [ins, 1], [form.columns, form.depth])
        share = triton.cdiv(ins, form.ways * form.depth) * form.depth
        _flat_kernel[(tiles * form.ways,)](
            x_map, weight_map, self.scratch.parts, self.scratch.tickets, *pointers, pieces, tokens, outs, ins, share, epilogue.eps,
            BLOCK_M=form.rows, WAYS=form.ways, num_stages=form.stages, **named,
        )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class FlatLinear:
    """y = x · Wᵀ (+ bias). ``x`` [..., in], ``weight`` [out, in], ``bias`` [out], bfloat16 or float16; float32 sums,
    one rounding.

    Where the table says so, and beyond its last row, who stands behind it: the vendor's product.
    """

    product: Product
    behind: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        tokens = x.numel() // max(x.shape[-1], 1)
        form = self.product.form(tokens) if tokens else None
        if form is None:
            return self.behind(x)
        return self.compute(x, form)

    def compute(self, x: Tensor, form: Form) -> Tensor:
        return self.product.launch(form, _rows(x), PLAIN)[0].view(*x.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """As the twin says; ``x`` [T, in] and all of ``epilogue`` in bfloat16 but squares (float32) and scale (any float
    type).

    For up to MOST_ROWS rows. The result is not rounded between the product and what follows it.
    """

    product: Product

    def __call__(self, x: Tensor, epilogue: Epilogue) -> Fused:
        form = self.product.form(x.shape[0])
        assert form is not None, f"{x.shape[0]} rows are more than a fused product takes"
        return self.compute(x, epilogue, form)

    def compute(self, x: Tensor, epilogue: Epilogue, form: Form) -> Fused:
        return self.product.launch(form, _rows(x), epilogue)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _products(site: CallSite[WeightFacts], *, fused: bool) -> Callable[[Tensor, Tensor | None], Product]:
    shape, processors = site.facts.shape, site.card.processors
    forms = forms_for(shape, processors, MEASURED.table(site.card.name))
    forms = without_vendor(forms, shape, processors) if fused else forms
    scratch = make_scratch(shape, forms, site.device)
    return lambda weight, bias: Product(weight.contiguous(), bias, shape, forms, scratch, site.pdl, site.empty)


def create_linear(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], FlatLinear]:
    make, behind = _products(site, fused=False), site.behind()

    def linear(weight: Tensor, bias: Tensor | None) -> FlatLinear:
        product = make(weight, bias)
        return FlatLinear(product, behind(product.weight, bias))

    return linear


def create_fused(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], FusedLinear]:
    make = _products(site, fused=True)
    return lambda weight, bias: FusedLinear(make(weight, bias))
