"""Layers whose products of 65 rows and more the vendor's library computes by algorithms that were measured; long ones
with the residual sum inside.

What lives here: the callables, what is remembered of each number of rows. What may not: the library's calls
(cublaslt.py), the table.

A row of the table is [least rows, rows it was measured with, settings…]: from so many rows on the algorithm with these
settings computes the product; below, where there are none, and for other shapes, torch chooses.

Of a decode step's products the library's first proposal costs a few per cent more than the best one, for some numbers
of rows much more. A step of thousands of tokens is bound by the card's power: held for a second, what the library
offers differs by 5 to 10 %, and its first proposal, by how it would do in a short run, is not the best.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.candidate import CallSite, Declined, Empty, WeightFacts, plainly_empty
from headrace.kernels.linear.cublaslt import Algorithm, LtError, Operands, Products, Settings
from headrace.kernels.linear.measured import Measured, whole_numbers
from headrace.kernels.linear.reference import linear_into

_log = logging.getLogger(__name__)
_NOTHING = "nothing was measured to be better than torch's choice for this weight"
_MOST_SIZES = 256  # numbers of rows that are remembered
Found = tuple[Algorithm, Operands] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """From ``least`` rows on: the algorithm with these settings among those offered for ``measured`` rows; torch's
    choice for none."""

    least: int
    measured: int
    settings: Settings


def _choice(row: list[Any]) -> Choice:
    least, measured, *settings = whole_numbers(row)
    if len(settings) not in (0, 9):
        raise ValueError(f"{row} are not two counts of rows and nine settings or none")
    return Choice(least, measured, tuple(settings))


MEASURED = Measured("tuned", _choice, lambda each: (each.least, each.measured, *each.settings))


class Chooser:
    """Which algorithm computes so many rows of one shape of weight; asked once a number of rows. None: torch's own
    choice."""

    def __init__(self, products: Products, choices: tuple[Choice, ...]) -> None:
        self._products = products
        self._offered = [(each.least, _offered(products, each)) for each in choices]
        self._sizes: dict[int, Found] = {}

    @property
    def chooses(self) -> bool:
        """Whether there is a number of rows for which torch's choice is not taken."""
        return any(algorithm is not None for _, algorithm in self._offered)

    def find(self, tokens: int) -> Found:
        if tokens not in self._sizes:
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
            self._sizes[tokens] = self._look(tokens)
        return self._sizes[tokens]

    def _look(self, tokens: int) -> Found:
        algorithm = next((algorithm for least, algorithm in reversed(self._offered) if tokens >= least), None)
        if algorithm is None:
            return None
        products = self._products
        operands = Operands(tokens, products.outs, products.ins, products.dtype)
        return (algorithm, operands) if products.takes(algorithm, operands) else None


def _offered(products: Products, choice: Choice) -> Algorithm | None:
    if not choice.settings:
        return None
    return next(
        (algorithm for settings, algorithm in products.offers(choice.measured) if settings == choice.settings), None
    )


@dataclass(frozen=True, slots=True)
class TunedLinear:
    """y = x · Wᵀ (+ bias): ``x`` [..., in], ``weight`` [out, in], ``bias`` [out], bfloat16 or float16; float32 sums,
    one rounding."""

    weight: Tensor
    bias: Tensor | None
    products: Products
    chooser: Chooser
    others: Callable[[Tensor], Tensor]  # what torch chooses
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor) -> Tensor:
        found = self.found(x)
        if found is None:
            return self.others(x)
        y = self.empty((x.shape[0], self.weight.shape[0]), x.dtype, x.device)
        self.products.multiply(*found, x, self.weight, y, add=False)
        return y

    def found(self, x: Tensor) -> Found:
        if x.dim() != 2 or not x.is_contiguous() or self.bias is not None:
            return None
        return self.chooser.find(x.shape[0])


@dataclass(frozen=True, slots=True)
class TunedSum:
    """residual += x · Wᵀ (+ bias), in place, not rounded between the product and the sum; returns it. Shapes and types
    as the twin."""

    linear: TunedLinear

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        linear = self.linear
        found = linear.found(x) if residual.is_contiguous() else None
        if found is not None:
            linear.products.multiply(*found, x, linear.weight, residual, add=True)
            return residual
        residual.addmm_(x, linear.weight.t())
        return residual if linear.bias is None else residual.add_(linear.bias)


def _products(site: CallSite[WeightFacts]) -> Products | Declined:
    facts, device = site.facts, site.device
    try:
        return Products(
            facts.out_features,
            facts.in_features,
            facts.dtype,
            torch.cuda.current_device() if device.index is None else device.index,
        )
    except (LtError, OSError, AttributeError) as error:
        return Declined(f"cuBLASLt cannot be used: {error}")


def _choices(site: CallSite[WeightFacts]) -> tuple[Choice, ...]:
    return MEASURED.table(site.card.name).get(site.facts.laid, ())


def unmeasured(site: CallSite[WeightFacts]) -> str | None:
    return None if any(each.settings for each in _choices(site)) else _NOTHING


def _chooser(site: CallSite[WeightFacts], products: Products) -> Chooser:
    try:
        return Chooser(products, _choices(site))
    except LtError as error:
        _log.warning("cuBLASLt offers no algorithms: %s; torch chooses", error)
        return Chooser(products, ())


def create_linear(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], TunedLinear] | Declined:
    products = _products(site)
    if isinstance(products, Declined):
        return products
    chooser = _chooser(site, products)
    if not chooser.chooses:
        return Declined(_NOTHING)
    return partial(_tuned, products, chooser, site.empty)


def create_sum(site: CallSite[WeightFacts]) -> Callable[[Tensor, Tensor | None], TunedSum] | Declined:
    products = _products(site)
    if isinstance(products, Declined):
        return products
    chooser = _chooser(site, products)
    return lambda weight, bias: TunedSum(_tuned(products, chooser, site.empty, weight, bias))


def _tuned(products: Products, chooser: Chooser, empty: Empty, weight: Tensor, bias: Tensor | None) -> TunedLinear:
    weight = weight.contiguous()
    return TunedLinear(weight, bias, products, chooser, linear_into(weight, bias, empty), empty)
