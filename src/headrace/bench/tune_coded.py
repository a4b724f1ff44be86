"""``headrace bench kernels --tune`` for a quantized model: which kernel form is best for GEMMs over low-bit codes.

What lives here: that kind of GEMMs, over random codes. What may not: timing and choosing (tune.py), forms
(kernels/linear/coded_forms.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.bench.tune import (
    Calls,
    Kind,
    RingProducts,
    Trial,
    Tuned,
    first,
    processors,
    random_inputs,
    ring_calls,
    wide_calls,
)
from headrace.kernels.candidate import EightBits, Shape
from headrace.kernels.linear import coded_forms, flat_forms, ring_forms
from headrace.kernels.linear.epilogue import MOST_ROWS, Epilogue
from headrace.kernels.linear.packing import DEPTH, Codes, Coding, Packed, Scales, pack
from headrace.layers import wide_copy
from headrace.sites import matrices
from headrace.spec import Activation, DecoderSpec

LEAD = Shape(4096, 4096)  # of what goes before each: attention's output in an 8B model
COPY_ROWS = (96, 128, 192, 256)  # for which codes and a copy are compared


class CodedProducts(Kind):
    """GEMMs of up to 128 rows, compared with dequantizing the weight first."""

    def __init__(self, activation: Activation, coding: Coding) -> None:
        super().__init__(activation)
        self.coding, self.measured = replace(coding, ordered=False), coded_forms.measured(coding)
        self.name = self.measured.op

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        """Over as many low-bit weights as exceed every cache."""
        packed = _random(self.coding, shape, 2 * len(weights))
        for rows in coded_forms.ROWS:
            x = random_inputs(rows, shape.ins)
            epilogue = Epilogue(gate=self.activation if shape.gated and rows <= MOST_ROWS else None)
            tried = coded_forms.candidate_forms(shape, packed[0].outs, self.coding, rows)
            forms: dict[Any, Any] = {form: partial(_calls, form, x, epilogue, packed) for form in tried}
            yield Trial(shape, rows, {None: partial(_widened, x, epilogue, packed), **forms})


class _Rings(RingProducts):
    """Of codes, or of 8 bits, beside the forms of Triton. In a decode step something else goes before each, while which
    a ring is filled and Triton's kernels wait; alone, these would win."""

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """A gate as one matrix, too, which more rows are multiplied by."""
        fit = tuple(shape for shape in shapes if shape.outs < flat_forms.LARGE and shape.outs % 8 == 0)
        return (*fit, *(Shape(2 * shape.outs, shape.ins) for shape in fit if shape.gated))

    def rows(self, shape: Shape) -> tuple[int, ...]:
        return ring_forms.row_classes(shape, self.coding, "" if self.eight is None else self.eight.kind_of)

    def table(self, tuned: Sequence[Tuned]) -> dict[Any, Any]:
        """A single row, too."""
        return Kind.table(self, tuned)


class CodedRings(_Rings):
    def __init__(self, activation: Activation, coding: Coding) -> None:
        super().__init__(activation)
        self.coding = replace(coding, ordered=False)
        self.measured = ring_forms.measured(self.coding)
        self.name = self.measured.op

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        assert self.coding is not None, "of codes"
        packed, before = (_random(self.coding, each, 2 * len(weights)) for each in (shape, LEAD))
        for rows in self.rows(shape):
            x, epilogue = random_inputs(rows, shape.ins), Epilogue(gate=self.activation if shape.gated else None)
            others = partial(_triton_calls, self.coding, shape, x, epilogue, packed)
            lead = partial(_ring_or_others, self.coding, LEAD, random_inputs(rows, LEAD.ins), before)
            yield self.trial(shape, rows, others, (x, epilogue, packed), lead=lead)


class EightBitRings(_Rings):
    def __init__(self, activation: Activation, eight: EightBits) -> None:
        super().__init__(activation)
        self.eight = eight
        self.measured = ring_forms.measured(None, eight.kind_of)
        self.name = self.measured.op

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        """The products alone: what rounds inputs is the same whoever multiplies."""
        eight, outs = self.eight, shape.outs * (1 + shape.gated)
        assert eight is not None, "of 8 bits"
        kind = torch.int8 if eight.kind == "int8" else torch.float8_e4m3fn

        def codes(*size: int) -> Tensor:
            made = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda")
            return (made if eight.kind == "int8" else made & 0xBF).view(kind)

        own = [codes(outs, shape.ins) for _ in range(2 * len(weights))]
        grid = (-(-outs // 128), -(-shape.ins // 128)) if eight.group else (outs,)
        scale = torch.full(grid, shape.ins**-0.5, device="cuda")
        for rows in self.rows(shape):
            x, epilogue = codes(rows, shape.ins), Epilogue(gate=self.activation if shape.gated else None)
            squares = torch.ones((rows, -(-shape.ins // 128)) if eight.group else (1, rows), device="cuda")
            beside = replace(epilogue, squares=squares)
            pairs, laid = x.view(torch.bfloat16), [each.view(torch.bfloat16) for each in own]
            others = partial(_eight_calls, eight, shape, x, squares.view(rows, -1), epilogue, own, scale)
            lead = partial(_roundings, eight, random_inputs(rows, shape.ins))
            yield self.trial(shape, rows, others, (pairs, beside, laid, scale), lead=lead)


class Copies(Kind):
    """GEMMs of more rows than are fused, by codes and by a widened copy."""

    def __init__(self, activation: Activation, coding: Coding) -> None:
        super().__init__(activation)
        self.coding, self.measured = replace(coding, ordered=False), wide_copy.measured(coding)
        self.name = self.measured.op

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        return tuple(shape for shape in shapes if shape.outs < flat_forms.LARGE)

    def trials(self, shape: Shape, weights: Sequence[Tensor]) -> Iterator[Trial]:
        packed = _random(self.coding, shape, 2 * len(weights))
        laid = Shape(packed[0].outs, shape.ins)
        wide = [_product(each).widen(0, laid.outs, torch.bfloat16) for each in packed[: len(weights)]]
        for rows in COPY_ROWS:
            x, kind = random_inputs(rows, shape.ins), self.activation if shape.gated else None
            codes = partial(_ring_or_others, self.coding, laid, x, packed, kind)
            yield Trial(shape, rows, {None: codes, "copy": partial(wide_calls, shape, x, wide, kind)})

    def table(self, tuned: Sequence[Tuned]) -> dict[Any, Any]:
        """Beyond the last number of rows for which codes are quicker."""
        found: dict[Any, Any] = {}
        for each in tuned:
            laid = Shape(each.shape.outs * (1 + each.shape.gated), each.shape.ins)
            found.setdefault(laid, (MOST_ROWS + 1,))
            if each.form is None:
                found[laid] = (each.rows + 1,)
        return found


def coded_kinds(spec: DecoderSpec) -> tuple[Kind, ...]:
    """One for each table in which a quantized model's GEMMs are looked up."""
    formats = [form for site in matrices(spec) if site.moe is None for form in site.formats]
    codings = [
        each for each in dict.fromkeys(form.coding for form in formats if form.eight is None) if each is not None
    ]
    eights = [each for each in dict.fromkeys(form.eight for form in formats if form.coding is None) if each is not None]
    kinds: list[Kind] = [CodedProducts(spec.activation, each) for each in codings]
    kinds += [CodedRings(spec.activation, each) for each in codings if each.ring]
    kinds += [EightBitRings(spec.activation, each) for each in eights]
    kinds += [Copies(spec.activation, each) for each in codings if not each.rotation]
    return tuple({kind.name: kind for kind in kinds}.values())


def _random(coding: Coding, shape: Shape, count: int) -> list[Packed]:
    outs = shape.outs * (1 + shape.gated)
    return [random_packed(coding, outs, shape.ins, gated=shape.gated) for _ in range(count)]


def random_packed(coding: Coding, outs: int, ins: int, *, gated: bool) -> Packed:
    """Codes and scales of any kind, with entries of about unit gain."""
    group, device = DEPTH // coding.sets, torch.device("cuda")
    groups = -(-ins // group)
    kinds = {Scales.POWER: torch.uint8, Scales.FP8: torch.float8_e4m3fn, Scales.BYTE: torch.int8}

    def read(rows: slice) -> Codes:
        count = rows.stop - rows.start
        codes = torch.randint(0, 2**coding.bits, (count, ins), dtype=torch.uint8, device=device)
        codes = codes & 0xBF if coding.floats and coding.bits == 8 else codes  # never NaN
        scale = torch.full((count, groups), 120 if coding.scales is Scales.POWER else 1, device=device).to(
            kinds.get(coding.scales, torch.float16)
        )
        beside = torch.ones_like(scale) if coding.zeros or coding.shifts else None
        large = tuple(torch.full((count, -(-ins // 256)), 0.01, device=device) for _ in range(1 + coding.shifts))
        table = torch.linspace(-1, 1, 16, device=device) if coding.table else None
        factor = torch.full((count,), ins**-0.5, device=device)
        return Codes(codes, scale, group, beside, factor, large if coding.scales is Scales.BYTE else (), 256, table)

    return pack(read, outs, coding, gated=gated)


def _calls(form: Any, x: Tensor, epilogue: Epilogue, packed: Sequence[Packed]) -> Calls:
    from headrace.kernels.linear.coded import CodedProduct
    from headrace.kernels.linear.triton_ends import make_scratch

    forms = ((len(x), form),)
    scratch = make_scratch(Shape(packed[0].outs, packed[0].ins), forms, x.device)
    products = [CodedProduct(each, None, forms, scratch, pdl=True) for each in packed]
    return [partial(first, product.launch, form, x, epilogue) for product in products]


def _triton_calls(coding: Coding, shape: Shape, x: Tensor, epilogue: Epilogue, packed: Sequence[Packed]) -> Calls:
    """As an engine without rings would compute them."""
    known = coded_forms.measured(coding).table(torch.cuda.get_device_name())
    own = coded_forms.forms_for(shape, packed[0].outs, coding, processors(), known)
    form = next((form for most, form in own if len(x) <= most), None)
    return _widened(x, epilogue, packed) if form is None else _calls(form, x, epilogue, packed)


def _ring_or_others(
    coding: Coding, laid: Shape, x: Tensor, packed: Sequence[Packed], kind: Activation | None = None
) -> Calls:
    """As an engine would compute them, and a gate's activation behind them."""
    from headrace.kernels.norm.triton_activation import gated_activation

    known = ring_forms.forms_at(laid, processors(), torch.cuda.get_device_name(), coding) if coding.ring else ()
    form = ring_forms.form_of(known, len(x))
    if form is not None and kind is not None and form.ways == 1:  # it takes the gate in
        return ring_calls(Shape(laid.outs // 2, laid.ins, True), form, x, Epilogue(gate=kind), packed)
    calls = (
        ring_calls(laid, form, x, Epilogue(), packed) if form else _triton_calls(coding, laid, x, Epilogue(), packed)
    )
    return calls if kind is None else [partial(lambda call: gated_activation(call(), kind), each) for each in calls]


def _roundings(eight: EightBits, x: Tensor) -> Calls:
    from headrace.kernels.norm.triton_rounded import Rounding

    static = torch.ones((), device=x.device) if eight.static else None
    return [partial(Rounding(eight, static).rows, x, None, 0.0, pdl=True)]


def _eight_calls(
    eight: EightBits, shape: Shape, x: Tensor, own: Tensor, epilogue: Epilogue, weights: Sequence[Tensor], scale: Tensor
) -> Calls:
    from headrace.kernels.linear.eight_bits import TALL, EightBitLinear, forms_for
    from headrace.kernels.linear.triton_ends import make_scratch

    forms = (*forms_for(shape.outs, shape.ins, 132, blocked=bool(eight.group)), (len(x), TALL))
    scratch = make_scratch(shape, forms, x.device)
    form = next(form for most, form in forms if len(x) <= most)
    layers = [EightBitLinear(each, scale, None, None, eight, forms, scratch, pdl=True) for each in weights]
    return [partial(first, layer.launch, form, x, own, epilogue, torch.bfloat16) for layer in layers]


def _widened(x: Tensor, epilogue: Epilogue, packed: Sequence[Packed]) -> Calls:
    from headrace.kernels.norm.triton_activation import gated_activation

    products = [_product(each) for each in packed]

    def computed(product: Any) -> Tensor:
        y = product.widened(x)
        return y if epilogue.gate is None else gated_activation(y, epilogue.gate)

    return [partial(computed, product) for product in products]


def _product(packed: Packed) -> Any:
    """Without forms."""
    from headrace.kernels.linear.coded import CodedProduct
    from headrace.kernels.linear.triton_ends import make_scratch

    return CodedProduct(packed, None, (), make_scratch(Shape(1, 1), (), packed.blocks.device), pdl=False)
