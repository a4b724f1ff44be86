"""Layers whose few rows the ring kernel multiplies (cuda_ring.py): with weights in bfloat16, in codes of few bits, or
in 8 bits as their inputs.

What lives here: what becomes of a layer's weights, and who computes what no form serves. What may not: the kernel,
which form is best (ring_forms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels.candidate import CallSite, Shape, WeightFacts
from headrace.kernels.linear.around import ALONE, MOST_ROWS, Around, Fuse, Fused
from headrace.kernels.linear.coded import Coded, CodedLinear
from headrace.kernels.linear.cuda_ring import Kernels, RingLinear, kernels_of
from headrace.kernels.linear.eight_bits import Composed, Composing, EightBitLinear, Maker
from headrace.kernels.linear.flat_linear import create_fused
from headrace.kernels.linear.packed import PackedMatrix, packed_linear
from headrace.kernels.linear.packing import Packed
from headrace.kernels.linear.ring_forms import RingForm, RingForms, form_of, forms_at
from headrace.spec import Activation


def _at(site: CallSite[WeightFacts], kind: str = "") -> tuple[RingForms, Kernels]:
    """Whole products of quantised weights multiply a gate as one matrix."""
    device = torch.device("cuda", torch.cuda.current_device() if site.device.index is None else site.device.index)
    kernels = kernels_of(device.index)
    coding = next((each for each in site.facts.codings if each is not None), None)
    shape = site.facts.shape if site.op in ("fused_linear", "packed_fused_linear") else site.facts.laid
    return forms_at(shape, site.card.processors, site.card.name, coding, kind), kernels


def create_ring(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], RingLinear]:
    """``site``: one whose weight has measured forms."""
    others = create_fused(site)
    forms, kernels = _at(site)

    def make(weight: Tensor, bias: Tensor | None) -> RingLinear:
        weight = weight.contiguous()
        return RingLinear(
            weight, bias, site.facts.shape, forms, kernels, site.pdl, others(weight, bias), {}, site.empty
        )

    return make


@dataclass(frozen=True, slots=True)
class CodedRings:
    """Makes layers whose weights are codes (packed.cuh); of those that are not one matrix, and in another order than
    inputs, as ``coded`` does."""

    coded: Coded
    forms: RingForms
    kernels: Kernels

    @classmethod
    def at(cls, site: CallSite[WeightFacts]) -> CodedRings:
        return cls(Coded.at(site), *_at(site))

    def fused(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Fuse | None:
        others = self.coded.fused(pieces, bias)
        if others is None or others.product.packed.order is not None:
            return others
        site, product = self.coded.site, others.product
        return RingLinear(
            product.packed, bias, site.facts.shape, self.forms, self.kernels, site.pdl, others, {}, site.empty
        )

    def linear(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        others, site, none = self.coded.linear(pieces, bias), self.coded.site, _nobody
        if (
            not isinstance(others, CodedLinear)
            or len(others.products) > 1
            or others.products[0].packed.order is not None
        ):
            return others
        packed = others.products[0].packed
        ring = RingLinear(packed, bias, site.facts.laid, self.forms, self.kernels, site.pdl, none, {}, site.empty)
        return ManyRing(ring, others)


def _nobody(x: Tensor, around: Around) -> Fused:
    raise AssertionError("what no form serves is not asked for")


@dataclass(frozen=True, slots=True)
class ManyRing:
    """y = x · Wᵀ (+ bias), ``x`` [..., in]: 65 to as many rows as a form has; others as ``others``."""

    ring: RingLinear
    others: CodedLinear

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        form = form_of(self.ring.forms, len(rows)) if len(rows) > MOST_ROWS else None
        if form is None:
            return self.others(x)
        return self.ring.compute(rows, ALONE, form)[0].view(*x.shape[:-1], -1)

    def gated(self, x: Tensor, kind: Activation) -> Tensor | None:  # [T, in] → [T, out / 2]
        """The first half of y, through the activation, times the second; None: no form takes that in."""
        ring, form = self.ring, form_of(self.ring.forms, len(x)) if len(x) > MOST_ROWS else None
        if form is None or form.ways > 1 or not (isinstance(ring.weight, Packed) and ring.weight.gated):
            return None
        half = Shape(ring.shape.outs // 2, ring.shape.ins, True)
        return replace(ring, shape=half).compute(x, Around(gate=kind), form)[0]


@dataclass(frozen=True, slots=True)
class EightBitCut:
    """y = x · Wᵀ (+ bias), ``x`` [..., in]: 65 to as many rows as a form has; others as ``product``."""

    product: EightBitLinear
    ring: RingLinear

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.multiplied(*self.product.rounded(rows, ALONE), x.dtype).view(*x.shape[:-1], self.ring.shape.outs)

    def multiplied(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        form = form_of(self.ring.forms, len(codes)) if len(codes) > MOST_ROWS else None
        if form is None:
            return self.product.multiplied(codes, scale, dtype)
        return _multiplied(self.product, self.ring, codes, scale, ALONE, form)[0]


def _multiplied(
    product: EightBitLinear, ring: RingLinear, codes: Tensor, scale: Tensor, around: Around, form: RingForm
) -> Fused:
    own = scale if product.eight.group else scale.view(1, -1)
    return ring.compute(codes.view(torch.bfloat16), replace(around, squares=own), form)


@dataclass(frozen=True, slots=True)
class EightBitRing:
    """As ``EightBitLinear.fused``."""

    product: EightBitLinear
    ring: RingLinear

    def __call__(self, x: Tensor, around: Around) -> Fused:
        form = form_of(self.ring.forms, len(x))
        if form is None:
            return self.product.fused(x, around)
        codes = self.product.rounded(x.reshape(-1, x.shape[-1]).contiguous(), around)
        return _multiplied(self.product, self.ring, *codes, around, form)


@dataclass(frozen=True, slots=True)
class EightBitRings(Composing):
    """Makes layers whose weights and inputs are of 8 bits."""

    maker: Maker
    forms: RingForms
    kernels: Kernels

    @classmethod
    def at(cls, site: CallSite[WeightFacts]) -> EightBitRings:
        maker = Maker.at(site)
        return cls(maker, *_at(site, maker.eight.kind_of))

    def fused(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> EightBitRing | None:
        product = self.maker.made(pieces, bias)
        return None if product is None else EightBitRing(product, self._ring(product, self.maker.site.facts.shape))

    def linear(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        product = self.maker.made(pieces, bias)
        return packed_linear(pieces, bias) if product is None else self._cut(product)

    def composed(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Composed | None:
        product = self.maker.made(pieces, bias)
        return None if product is None else Composed(product.rounding, self._cut(product).multiplied)

    def _cut(self, product: EightBitLinear) -> EightBitCut:
        return EightBitCut(product, self._ring(product, self.maker.site.facts.laid))

    def _ring(self, product: EightBitLinear, shape: Shape) -> RingLinear:
        site, weight = self.maker.site, product.weight.view(torch.bfloat16)
        return RingLinear(
            weight,
            product.bias,
            shape,
            self.forms,
            self.kernels,
            site.pdl,
            _nobody,
            {},
            site.empty,
            product.scale,
        )
