"""The C product of few rows (linear.c) as a torch function.

What lives here: pointers, strides, and which call sites are accepted. What may not: compiling (build/), mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of, rows_of
from headrace.kernels.candidate import CallSite, Declined, Empty, WeightFacts, plainly_empty

FEW_ROWS = 40  # with more, torch's blocked product is quicker than this one, which reads the weight as it lies


@dataclass(frozen=True, slots=True)
class Product:
    """y = x · weightᵀ for few rows, by C; ``weight`` [out, in] is read as it lies."""

    function: Any
    invariant: bool  # the bits of a row must not depend on how many there are
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = rows_of(x)
        y = self.empty((*x.shape[:-1], weight.shape[0]), x.dtype, x.device)
        self.function(
            TYPES[x.dtype], rows.shape[0], weight.shape[0], weight.shape[1], rows.data_ptr(), rows.stride(0), weight.data_ptr(), weight.stride(0),
            None if bias is None else bias.data_ptr(), y.data_ptr(), weight.shape[0], self.invariant, torch.get_num_threads(),
        )  # fmt: skip
        return y


def create_product(native: Native, invariant: bool, empty: Empty = plainly_empty) -> Product:
    return Product(function_of(native, "headrace_linear", "iqqqPqPqPPqii"), invariant, empty)


def create_linear(native: Native, site: CallSite[WeightFacts]) -> Any:
    if not native.threads and torch.get_num_threads() > 1:
        return Declined("built without OpenMP (one thread only); torch's own product uses them all")
    product = create_product(native, site.batch_invariant, site.empty)
    always = site.batch_invariant or site.facts.dtype is torch.float16  # torch's float16 product is slower still

    def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()

        def linear(x: Tensor) -> Tensor:
            if not always and x.numel() > FEW_ROWS * x.shape[-1]:
                return F.linear(x, weight, bias)
            return product(x, weight, bias)

        return linear

    return pack
