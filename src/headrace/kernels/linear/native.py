"""Products on a CPU: the C product of few rows (linear.c) as a torch function, and oneDNN's over weights that are packed
once for it.

What lives here: pointers, strides, and which call sites are accepted. What may not: compiling (build/), mathematics,
weights that we pack (panels.py).

oneDNN's two torch operations are private, so they are looked for, and declined without. One packed form serves every
number of rows: hints of none, 16 and 512 rows gave the same speed at 1, 16 and 512 rows; a hint of 1 costs float32 half
its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of
from headrace.kernels.candidate import CallSite, Declined, Empty, WeightFacts, plainly_empty, rows_of

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
    product = create_product(native, site.invariant, site.empty)
    always = site.invariant or site.facts.dtype is torch.float16  # torch's float16 product is slower still

    def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()

        def linear(x: Tensor) -> Tensor:
            if not always and x.numel() > FEW_ROWS * x.shape[-1]:
                return F.linear(x, weight, bias)
            return product(x, weight, bias)

        return linear

    return pack


_ROWS_HINT = 512


def create_onednn(site: CallSite[WeightFacts]) -> Any:
    dtype = site.facts.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return Declined(f"packs float32 and bfloat16, not {dtype}")
    if not (hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return Declined("this torch has no mkldnn._reorder_linear_weight and mkldnn._linear_pointwise")
    if not torch.backends.mkldnn.is_available():
        return Declined("this torch was built without oneDNN")
    if (refusal := _refusal(dtype)) is not None:
        return Declined(f"oneDNN does not pack {dtype} on this CPU: {refusal}")
    if site.facts.shared:
        return Declined("the weight is another layer's too, and packing would keep a second copy of it")
    return pack_for_onednn


@cache
def _refusal(dtype: torch.dtype) -> str | None:
    """What it says to a small weight: which CPUs it takes depends on the element type."""
    try:
        pack_for_onednn(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(1, 16, dtype=dtype))
    except RuntimeError as error:
        return (str(error).splitlines() or [repr(error)])[0]
    return None


def pack_for_onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    apply = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        y: Tensor = apply(x, packed, bias, "none", [], "")
        return y

    return linear
