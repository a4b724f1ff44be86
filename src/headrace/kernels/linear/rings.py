"""Layers whose few rows the ring kernel multiplies (cuda_ring.py): with weights in bfloat16, in codes of few bits, or in 8 bits as their inputs.

What lives here: what becomes of a layer's weights, and who computes what no form serves. What may not: the kernel, which form is best
(ring_forms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels.candidate import CallSite, WeightFacts
from headrace.kernels.linear import coded, eight_bits
from headrace.kernels.linear.around import Around, Fused
from headrace.kernels.linear.coded import Coded
from headrace.kernels.linear.cuda_ring import Kernels, RingLinear, kernels_of
from headrace.kernels.linear.eight_bits import EightBitLinear
from headrace.kernels.linear.flat_linear import create_fused
from headrace.kernels.linear.packed import PackedMatrix
from headrace.kernels.linear.ring_forms import RingForms, form_of, forms_at

Make = Callable[[Sequence[PackedMatrix], Tensor | None], Callable[[Tensor, Around], Fused] | None]


def _at(site: CallSite[WeightFacts], kind: str = "") -> tuple[RingForms, Kernels]:
    device = torch.device("cuda", torch.cuda.current_device() if site.device.index is None else site.device.index)
    kernels = kernels_of(device.index)
    coding = next((each for each in site.facts.codings if each is not None), None)
    return forms_at(site.facts.shape, kernels.processors, torch.cuda.get_device_name(device), coding, kind), kernels


def create_ring(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], RingLinear]:
    """``site``: one whose weight has measured forms."""
    others = create_fused(site)
    forms, kernels = _at(site)

    def make(weight: Tensor, bias: Tensor | None) -> RingLinear:
        weight = weight.contiguous()
        return RingLinear(weight, bias, site.facts.shape, forms, kernels, site.programmatic, others(weight, bias), {}, site.empty)

    return make


@dataclass(frozen=True, slots=True)
class CodedRings:
    """Makes layers whose weights are codes (packed.cuh); of those that are not one matrix, and in another order than inputs, as ``coded`` does."""

    coded: Coded
    forms: RingForms
    kernels: Kernels

    def fused(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor, Around], Fused] | None:
        others = self.coded.fused(pieces, bias)
        if others is None or others.product.packed.order is not None:
            return others
        site, product = self.coded.site, others.product
        return RingLinear(product.packed, bias, site.facts.shape, self.forms, self.kernels, site.programmatic, others, {}, site.empty)


@dataclass(frozen=True, slots=True)
class EightBitRing:
    """As ``EightBitLinear.fused``."""

    product: EightBitLinear
    ring: RingLinear

    def __call__(self, x: Tensor, around: Around) -> Fused:
        form = form_of(self.ring.forms, len(x))
        if form is None:
            return self.product.fused(x, around)
        codes, scale = self.product.rounded(x.reshape(-1, x.shape[-1]).contiguous(), around)
        scales = scale if self.product.eight.group else scale.view(1, -1)
        return self.ring.compute(codes.view(torch.bfloat16), replace(around, squares=scales), form)


@dataclass(frozen=True, slots=True)
class EightBitRings:
    """Makes layers whose weights and inputs are of 8 bits."""

    maker: eight_bits.Maker
    forms: RingForms
    kernels: Kernels

    def fused(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> EightBitRing | None:
        product = self.maker.made(pieces, bias)
        return None if product is None else self.of(product)

    def of(self, product: EightBitLinear) -> EightBitRing:
        site = self.maker.site
        none = lambda x, around: product.fused(x, around)  # noqa: E731
        weight = product.weight.view(torch.bfloat16)
        ring = RingLinear(weight, product.bias, site.facts.shape, self.forms, self.kernels, site.programmatic, none, {}, site.empty, product.scale)
        return EightBitRing(product, ring)


def create_codes(site: CallSite[WeightFacts]) -> Make:
    return CodedRings(coded.Coded.at(site), *_at(site)).fused


def create_eight(site: CallSite[WeightFacts]) -> Make:
    maker = eight_bits.Maker.at(site)
    return EightBitRings(maker, *_at(site, maker.eight.kind_of)).fused
