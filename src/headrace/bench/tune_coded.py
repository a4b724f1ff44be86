"""``headrace bench kernels --tune`` for a quantised model: which form multiplies by codes of few bits best.

What lives here: that kind of products, over random codes. What may not: timing and choosing (tune.py), forms (kernels/linear/coded_forms.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.bench.tune import Calls, Kind, Trial, random_inputs
from headrace.kernels.candidate import Shape
from headrace.kernels.linear import coded_forms
from headrace.kernels.linear.around import MOST_ROWS, Around
from headrace.kernels.linear.packing import DEPTH, Codes, Coding, Packed, Scales, pack
from headrace.sites import matrices
from headrace.spec import Activation, DecoderSpec


class CodedProducts(Kind):
    """Of up to 128 rows, beside a weight that is widened first."""

    def __init__(self, activation: Activation, coding: Coding) -> None:
        super().__init__(activation)
        self.coding, self.measured = replace(coding, ordered=False), coded_forms.measured(coding)
        self.name = self.measured.op

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        """As many as no cache holds, of fewer bits."""
        outs = shape.outs * (1 + shape.gated)
        packed = [random_packed(self.coding, outs, shape.ins, gated=shape.gated) for _ in range(2 * len(weights))]
        for rows in coded_forms.ROWS:
            x, around = random_inputs(rows, shape.ins), Around(gate=self.activation if shape.gated and rows <= MOST_ROWS else None)
            tried = coded_forms.candidate_forms(shape, outs, self.coding, rows)
            forms: dict[Any, Any] = {form: partial(_calls, form, x, around, packed) for form in tried}
            yield Trial(shape, rows, {None: partial(_widened, x, around, packed), **forms})


def coded_kinds(spec: DecoderSpec) -> tuple[CodedProducts, ...]:
    """One for every table that a quantised model's products are looked up in."""
    codings = (form.coding for site in matrices(spec) if site.moe is None for form in site.formats)
    kinds = [CodedProducts(spec.activation, each) for each in dict.fromkeys(codings) if each is not None]
    return tuple({kind.name: kind for kind in kinds}.values())


def random_packed(coding: Coding, outs: int, ins: int, *, gated: bool) -> Packed:
    """Codes and scales of any kind, that make entries of about unit gain."""
    group, device = DEPTH // coding.sets, torch.device("cuda")
    groups = -(-ins // group)
    kinds = {Scales.POWER: torch.uint8, Scales.FP8: torch.float8_e4m3fn, Scales.BYTE: torch.int8}

    def read(rows: slice) -> Codes:
        count = rows.stop - rows.start
        codes = torch.randint(0, 2**coding.bits, (count, ins), dtype=torch.uint8, device=device)
        codes = codes & 0xBF if coding.floats and coding.bits == 8 else codes  # never NaN
        scale = torch.full((count, groups), 120 if coding.scales is Scales.POWER else 1, device=device).to(kinds.get(coding.scales, torch.float16))
        beside = torch.ones_like(scale) if coding.zeros or coding.shifts else None
        large = tuple(torch.full((count, -(-ins // 256)), 0.01, device=device) for _ in range(1 + coding.shifts))
        table = torch.linspace(-1, 1, 16, device=device) if coding.table else None
        factor = torch.full((count,), ins**-0.5, device=device)
        return Codes(codes, scale, group, beside, factor, large if coding.scales is Scales.BYTE else (), 256, table)

    return pack(read, outs, coding, gated=gated)


def _calls(form: Any, x: Tensor, around: Around, packed: Sequence[Packed]) -> Calls:
    from headrace.kernels.linear.coded import CodedProduct
    from headrace.kernels.linear.flat_linear import make_scratch

    forms = ((len(x), form),)
    scratch = make_scratch(Shape(packed[0].outs, packed[0].ins), forms, x.device)
    products = [CodedProduct(each, None, forms, scratch, programmatic=True) for each in packed]
    return [partial(_first, product, form, x, around) for product in products]


def _first(product: Any, form: Any, x: Tensor, around: Around) -> Tensor:
    result: Tensor = product.launch(form, x, around)[0]
    return result


def _widened(x: Tensor, around: Around, packed: Sequence[Packed]) -> Calls:
    from headrace.kernels.linear.coded import CodedProduct
    from headrace.kernels.linear.flat_linear import make_scratch
    from headrace.kernels.norm.triton_activation import gated_activation

    products = [CodedProduct(each, None, (), make_scratch(Shape(1, 1), (), x.device), programmatic=False) for each in packed]

    def computed(product: CodedProduct) -> Tensor:
        y = product.widened(x)
        return y if around.gate is None else gated_activation(y, around.gate)

    return [partial(computed, product) for product in products]
