"""A few weights that lie apart, beside a product over the others: the twin, and the C kernel (linear.c) as a torch
function.

What lives here: y += x · Sᵀ of a sparse matrix S whose entries lie row by row. What may not: formats (quant/), the
product beside it.
"""

from __future__ import annotations

from ctypes import c_int
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of
from headrace.kernels.candidate import CallSite, Facts, rows_of

_PRODUCTS = 2**24  # of the twin, at once


def add_sparse(y: Tensor, x: Tensor, ends: Tensor, columns: Tensor, values: Tensor) -> None:
    """y += x · Sᵀ, in float32 and rounded once. ``y`` [T, outs], ``x`` [T, ins]; entries of row r of S are those from
    ``ends[r]`` [outs + 1] to ``ends[r + 1]`` of ``columns``, int32, and ``values``, float32.
    """
    counts = ends.diff()
    rows = torch.arange(len(counts), device=y.device).repeat_interleave(counts)
    step = max(1, _PRODUCTS // max(1, len(columns)))
    for first in range(0, len(y), step):
        some = slice(first, first + step)
        products = x[some].index_select(1, columns).float() * values
        y[some] = y[some].float().index_add_(1, rows, products).to(y.dtype)


def create_native(native: Native, site: CallSite[Facts]) -> Any:
    function = function_of(native, "headrace_add_sparse", "iqqqPqPPPPqi", c_int)

    def add(y: Tensor, x: Tensor, ends: Tensor, columns: Tensor, values: Tensor) -> None:
        x = rows_of(x)
        assert y.stride(1) == 1, "results of products lie row by row"
        failed = function(
            TYPES[y.dtype], y.shape[0], y.shape[1], x.shape[1], x.data_ptr(), x.stride(0), ends.data_ptr(), columns.data_ptr(),
            values.data_ptr(), y.data_ptr(), y.stride(0), torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError(f"no memory for {x.shape[1]} inputs of some rows")

    return add
