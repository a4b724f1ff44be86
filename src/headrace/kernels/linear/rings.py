"""Layers whose few rows the ring kernel multiplies (cuda_ring.py): with weights in bfloat16, in codes of few bits, or
in 8 bits as their inputs.

What lives here: what becomes of a layer's weights, and who computes what no form serves. What may not: the kernel,
which form is best (ring_forms.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from headrace.kernels.candidate import CallSite, Shape, WeightFacts
from headrace.kernels.linear import cuda_gated
from headrace.kernels.linear.coded import Coded, CodedFused, CodedLinear, CodedProduct
from headrace.kernels.linear.cuda_gated import EightBitGemm
from headrace.kernels.linear.cuda_ring import Kernels, RingLinear, kernels_of
from headrace.kernels.linear.eight_bits import Composed, Composing, EightBitLinear, Maker
from headrace.kernels.linear.epilogue import MOST_ROWS, PLAIN, Epilogue, Fuse, Fused
from headrace.kernels.linear.flat_linear import create_fused
from headrace.kernels.linear.packed import PackedMatrix, packed_linear
from headrace.kernels.linear.packing import Coding, Packed
from headrace.kernels.linear.ring_forms import RingForm, RingForms, form_of, forms_at
from headrace.spec import Activation


def _at(site: CallSite[WeightFacts], kind: str = "") -> tuple[RingForms, Kernels]:
    return forms_at(_shape(site), site.card.processors, site.card.name, None, kind), _kernels(site)


def _shape(site: CallSite[WeightFacts]) -> Shape:
    """Whole products of quantised weights multiply a gate as one matrix."""
    return site.facts.shape if site.op in ("fused_linear", "packed_fused_linear") else site.facts.laid


def _kernels(site: CallSite[WeightFacts]) -> Kernels:
    return kernels_of(torch.cuda.current_device() if site.device.index is None else site.device.index)


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


def create_ring_linear(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], ManyRing]:
    """``site``: as ``create_ring`` has it, of a GEMM with nothing around it: ranks' sums come before what follows."""
    others = site.behind()
    forms, kernels = _at(site)

    def make(weight: Tensor, bias: Tensor | None) -> ManyRing:
        weight, empty = weight.contiguous(), site.empty
        ring = RingLinear(weight, bias, site.facts.shape, forms, kernels, site.pdl, _nobody, {}, empty)
        return ManyRing(ring, others(weight, bias), 1)

    return make


@dataclass(frozen=True, slots=True)
class CodedRings:
    """Makes layers whose weights are codes (packed.cuh); of those that lie in another order than inputs, as ``coded``
    does. ``forms``: of each matrix that a layer is made of, by its coding and rows."""

    coded: Coded
    forms: dict[tuple[Coding, int], RingForms]
    kernels: Kernels

    @classmethod
    def at(cls, site: CallSite[WeightFacts]) -> CodedRings:
        card, facts, whole = site.card, site.facts, _shape(site)
        codings = [each for each in facts.codings if each is not None]
        apart = [
            (coding, sum(outs for _, outs in part))
            for coding, part in groupby(zip(codings, facts.parts, strict=False), key=itemgetter(0))
        ]
        shapes = {(each, outs): Shape(outs, whole.ins) for each, outs in apart} or {
            (codings[0], facts.laid.outs): whole
        }
        forms = {key: forms_at(shape, card.processors, card.name, key[0]) for key, shape in shapes.items()}
        return cls(Coded.at(site), forms, _kernels(site))

    def fused(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Fuse | None:
        """Of several matrices each takes the norm in; a gate has one."""
        parts = [self._ring(each, CodedFused(each)) for each in self.coded.products(pieces, bias)]
        if None in parts or not parts:
            return self.coded.fused(pieces, bias)
        rings = [each for each in parts if each is not None]
        if len(rings) > 1:
            return None if self.coded.site.facts.gated else RingsBelow(tuple(rings))
        return rings[0] if rings[0].shape.gated == rings[0].turned else None

    def linear(self, pieces: Sequence[PackedMatrix], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        products = self.coded.products(pieces, bias)
        parts = [(self._ring(each, _nobody), CodedLinear((each,))) for each in products]
        least = MOST_ROWS + 1 if self.coded.site.facts.fused else 1
        made = [others if ring is None else ManyRing(ring, others, least) for ring, others in parts]
        if len(made) == 1:
            return made[0]
        return Below(tuple(made)) if made else self.coded.linear(pieces, bias)

    def _ring(self, product: CodedProduct, others: Fuse) -> RingLinear | None:
        packed, site = product.packed, self.coded.site
        forms = self.forms.get((packed.coding, packed.outs))
        if packed.order is not None or forms is None:
            return None
        shape = _shape(site) if packed.outs == site.facts.laid.outs else Shape(packed.outs, packed.ins)
        return RingLinear(packed, product.bias, shape, forms, self.kernels, site.pdl, others, {}, site.empty)


def _nobody(x: Tensor, epilogue: Epilogue) -> Fused:
    raise AssertionError("what no form serves is not asked for")


@dataclass(frozen=True, slots=True)
class Below:
    """y = x · Wᵀ (+ bias), W matrices one below another."""

    parts: tuple[Callable[[Tensor], Tensor], ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


@dataclass(frozen=True, slots=True)
class RingsBelow:
    """As ``fused_linear``'s twin says, W matrices one below another, with nothing but a norm around them."""

    parts: tuple[RingLinear, ...]

    def __call__(self, x: Tensor, epilogue: Epilogue) -> Fused:
        widths = [each.shape.outs for each in self.parts]
        y = self.parts[0].empty((len(x), sum(widths)), x.dtype, x.device)
        for each, into in zip(self.parts, y.split(widths, 1), strict=True):
            form = form_of(each.forms, len(x))
            if form is None:
                into.copy_(each.others(x, epilogue)[0])
            else:
                each.compute(x, epilogue, form, into)
        return y, None, None


@dataclass(frozen=True, slots=True)
class ManyRing:
    """y = x · Wᵀ (+ bias), ``x`` [..., in]: ``least`` to as many rows as a form has; others as ``others``."""

    ring: RingLinear
    others: Callable[[Tensor], Tensor]
    least: int = MOST_ROWS + 1

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        form = form_of(self.ring.forms, len(rows)) if len(rows) >= self.least else None
        if form is None:
            return self.others(x)
        return self.ring.compute(rows, PLAIN, form)[0].view(*x.shape[:-1], -1)

    def gated(self, x: Tensor, kind: Activation) -> Tensor | None:  # [T, in] → [T, out / 2]
        """The first half of y, through the activation, times the second; None: no form takes that in."""
        ring, form = self.ring, form_of(self.ring.forms, len(x)) if len(x) > MOST_ROWS else None
        if form is None or form.ways > 1 or not (isinstance(ring.weight, Packed) and ring.weight.gated):
            return None
        half = Shape(ring.shape.outs // 2, ring.shape.ins, True)
        return replace(ring, shape=half).compute(x, Epilogue(gate=kind), form)[0]


@dataclass(frozen=True, slots=True)
class EightBitCut:
    """y = x · Wᵀ (+ bias), ``x`` [..., in]: 65 to as many rows as a form has; more by ``gemm``, if there is one; others
    as ``product``."""

    product: EightBitLinear
    ring: RingLinear
    gemm: EightBitGemm | None = None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.multiplied(*self.product.rounded(rows, PLAIN), x.dtype).view(*x.shape[:-1], self.ring.shape.outs)

    def multiplied(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        form = form_of(self.ring.forms, len(codes)) if len(codes) > MOST_ROWS else None
        if form is None and self.gemm is not None and len(codes) > MOST_ROWS:
            y = self.gemm(codes, scale)
            return y if self.product.bias is None else y.add_(self.product.bias)
        if form is None:
            return self.product.multiplied(codes, scale, dtype)
        return _multiplied(self.product, self.ring, codes, scale, PLAIN, form)[0]


def _multiplied(
    product: EightBitLinear, ring: RingLinear, codes: Tensor, scale: Tensor, epilogue: Epilogue, form: RingForm
) -> Fused:
    own = scale if product.eight.group else scale.view(1, -1)
    return ring.compute(codes.view(torch.bfloat16), replace(epilogue, squares=own), form)


@dataclass(frozen=True, slots=True)
class EightBitRing:
    """As ``EightBitLinear.fused``."""

    product: EightBitLinear
    ring: RingLinear

    def __call__(self, x: Tensor, epilogue: Epilogue) -> Fused:
        form = form_of(self.ring.forms, len(x))
        if form is None:
            return self.product.fused(x, epilogue)
        codes = self.product.rounded(x.reshape(-1, x.shape[-1]).contiguous(), epilogue)
        return _multiplied(self.product, self.ring, *codes, epilogue, form)


@dataclass(frozen=True, slots=True)
class EightBitRings(Composing):
    """Makes layers whose weights and inputs are of 8 bits."""

    maker: Maker
    forms: RingForms
    kernels: Kernels
    gemms: cuda_gated.Kernels

    @classmethod
    def at(cls, site: CallSite[WeightFacts]) -> EightBitRings:
        maker = Maker.at(site)
        return cls(maker, *_at(site, maker.eight.kind_of), cuda_gated.kernels_of(site.device))

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
        """The vendor's GEMM scales sums of FP8 itself."""
        site, eight = self.maker.site, self.maker.eight
        gemm = EightBitGemm(eight.kind, product.weight, product.scale, self.gemms, {}, site.empty)
        return EightBitCut(product, self._ring(product, site.facts.laid), gemm if eight.kind == "int8" else None)

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
