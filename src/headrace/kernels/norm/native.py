"""The C kernels for norms and activations (elementwise.c) as torch functions.

What lives here: pointers, strides, and which call sites are accepted. What may not: compiling (build/), mathematics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import ACTIVATIONS, TYPES, function_of, rows_of
from headrace.kernels.candidate import CallSite, Empty, Facts, NormFacts
from headrace.kernels.norm import reference
from headrace.spec import Activation


def create_rms_norm(native: Native, site: CallSite[NormFacts]) -> Any:
    function, empty = function_of(native, "headrace_rms_norm", "iiqqPqPqPfPPi"), site.empty

    def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if weight.dtype not in (x.dtype, torch.float32) or (residual is not None and residual.dtype != x.dtype):
            return reference.rms_norm(x, weight, eps, residual)  # mixed types: the twin knows torch's promotion
        rows = rows_of(x)
        y = empty(x.shape, x.dtype, x.device)
        if residual is None:
            total, added, added_row, total_at = x, None, 0, None
        else:
            add, total = rows_of(residual), empty(x.shape, x.dtype, x.device)
            added, added_row, total_at = add.data_ptr(), add.stride(0), total.data_ptr()
        shape = rows.shape
        function(
            TYPES[x.dtype], TYPES[weight.dtype], shape[0], shape[1], rows.data_ptr(), rows.stride(0), added, added_row,
            weight.data_ptr(), eps, y.data_ptr(), total_at, torch.get_num_threads(),
        )  # fmt: skip
        return y, total

    return rms_norm


def create_gated_activation(native: Native, site: CallSite[Facts]) -> Any:
    return _elementwise(native, "headrace_gated_activation", 2, site.empty)


def create_activation(native: Native, site: CallSite[Facts]) -> Any:
    """torch's own computes the last elements of a tensor another way than those before, so that they show where a batch
    ends."""
    return _elementwise(native, "headrace_activation", 1, site.empty)


def _elementwise(native: Native, name: str, parts: int, empty: Empty) -> Any:
    """``parts`` elements of a row make one of the result."""
    function = function_of(native, name, "iqqPqiPi")

    def activation(x: Tensor, kind: Activation) -> Tensor:
        rows, width = rows_of(x), x.shape[-1] // parts
        y = empty((*x.shape[:-1], width), x.dtype, x.device)
        function(
            TYPES[x.dtype], rows.shape[0], width, rows.data_ptr(), rows.stride(0), ACTIVATIONS[kind], y.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        return y

    return activation
