"""Products on a CPU: the C product of few rows (linear.c) as a torch function, oneDNN's over weights that are packed
once for it, and that of many rows over a weight as it lies.

What lives here: pointers, strides, who multiplies how many rows, and which call sites are accepted. What may not: compiling (build/), mathematics,
weights that we pack (panels.py).

oneDNN's two torch operations are private, so they are looked for, and declined without. One packed form serves every
number of rows: hints of none, 16 and 512 rows gave the same speed at 1, 16 and 512 rows; a hint of 1 costs float32 half
its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of
from headrace.kernels.candidate import CallSite, Declined, Empty, WeightFacts, plainly_empty, rows_of

FEW_ROWS = 40  # with more, a blocked product is quicker than this one, which reads the weight as it lies
_TILED_ROWS = 4  # as FEW_ROWS, of bfloat16 where the processor multiplies tiles of it (AMX)
_PART = 2**20  # elements of a weight that are widened at once: what the second cache holds


@dataclass(frozen=True, slots=True)
class Product:
    """y = x · weightᵀ for few rows, by C; ``weight`` [out, in] is read as it lies."""

    function: Any
    invariant: bool  # the bits of a row must not depend on how many there are
    empty: Empty = plainly_empty

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = rows_of(x)
        y = self.empty((*x.shape[:-1], weight.shape[0]), x.dtype, x.device)
        failed = self.function(
            TYPES[x.dtype], rows.shape[0], weight.shape[0], weight.shape[1], rows.data_ptr(), rows.stride(0), weight.data_ptr(), weight.stride(0),
            None if bias is None else bias.data_ptr(), y.data_ptr(), weight.shape[0], self.invariant, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory to widen {rows.shape[0]} rows of {rows.shape[1]} inputs")
        return y


def create_product(native: Native, invariant: bool, empty: Empty = plainly_empty) -> Product:
    return Product(function_of(native, "headrace_linear", "iqqqPqPqPPqii", c_int), invariant, empty)


def create_linear(native: Native, site: CallSite[WeightFacts]) -> Any:
    if not native.threads and torch.get_num_threads() > 1:
        return Declined("built without OpenMP (one thread only); torch's own product uses them all")
    product = create_product(native, site.invariant, site.empty)
    many_rows, few = linear_of_many_rows(site.facts.dtype), _few_rows(site.facts.dtype)

    def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()

        def linear(x: Tensor) -> Tensor:
            if not product.invariant and x.numel() > few * x.shape[-1]:
                return many_rows(x, weight, bias)
            return product(x, weight, bias)

        return linear

    return pack


def linear_of_many_rows(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """torch's own where it computes in ``dtype`` by blocks; where it does not, as bfloat16 without instructions for it,
    by float32's, over the weight widened part by part."""
    return F.linear if dtype is torch.float32 or _multiplies(dtype) else _widened_linear


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has instructions for it here."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return hasattr(torch.ops.mkldnn, name) and bool(getattr(torch.ops.mkldnn, name)())


def _few_rows(dtype: torch.dtype) -> int:
    return _TILED_ROWS if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported() else FEW_ROWS


def _widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outs, ins = weight.shape
    y, rows, step = x.new_empty(*x.shape[:-1], outs), x.float(), max(1, _PART // ins)
    for begin in range(0, outs, step):
        part = slice(begin, begin + step)
        y[..., part] = F.linear(rows, weight[part].float(), None if bias is None else bias[part].float())
    return y


def product_of_many_rows(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """What a layer multiplies many rows by ``weight`` [out, in] with, packed where oneDNN takes it."""
    if _unpacked(weight.dtype) is None:
        return pack_for_onednn(weight, None)
    linear = linear_of_many_rows(weight.dtype)
    return lambda x: linear(x, weight, None)


_ROWS_HINT = 512


def create_onednn(site: CallSite[WeightFacts]) -> Any:
    if (reason := _unpacked(site.facts.dtype)) is not None:
        return Declined(reason)
    if site.facts.shared:
        return Declined("the weight is another layer's too, and packing would keep a second copy of it")
    return pack_for_onednn


def _unpacked(dtype: torch.dtype) -> str | None:
    """Why oneDNN packs no weight of this type here."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"packs float32 and bfloat16, not {dtype}"
    if not (hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return "this torch has no mkldnn._reorder_linear_weight and mkldnn._linear_pointwise"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if (refusal := _refusal(dtype)) is not None:
        return f"oneDNN does not pack {dtype} on this CPU: {refusal}"
    return None


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
