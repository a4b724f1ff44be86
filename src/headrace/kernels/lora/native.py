"""The C kernel for what adapters add (lora.c) as a torch function.

What lives here: pointers, and how many rows of a slot go which way. What may not: compiling (build/), mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of, rows_of
from headrace.kernels.candidate import CallSite, Declined, DeltaFacts
from headrace.kernels.lora.inputs import AdapterRows, Grouped
from headrace.kernels.lora.reference import add_deltas

FEW_ROWS = 32  # of one slot; more are the vendor's products


def create_add_deltas(native: Native, site: CallSite[DeltaFacts]) -> Any:
    if not native.threads and torch.get_num_threads() > 1:
        return Declined("built without OpenMP (one thread only); torch's own products use them all")
    function = function_of(native, "headrace_add_deltas", "iqqqqqPPPqPPqPPPqPi")
    ends = torch.tensor(list(accumulate(site.facts.parts)))
    invariant = site.batch_invariant

    def few(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: Grouped) -> None:
        count, inputs = len(rows.order), rows_of(x)
        inner = torch.empty(count, len(parts), a.shape[2])
        function(
            TYPES[y.dtype], count, a.shape[3], y.shape[1], len(parts), a.shape[2], rows.order.data_ptr(), rows.slots.data_ptr(),
            ranks.data_ptr(), ranks.stride(0), ends.data_ptr(), inputs.data_ptr(), inputs.stride(0), a.data_ptr(), b.data_ptr(),
            y.data_ptr(), y.stride(0), inner.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def add(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: AdapterRows,
        gains: Tensor | None = None, squares: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """In place."""
        grouped = rows.by_slot()
        if gains is not None or squares is not None:
            return add_deltas(y, x, a, b, ranks, parts, rows, gains, squares, eps)
        if grouped is None:
            return None
        if invariant or all(end - begin <= FEW_ROWS for _, begin, end in grouped.spans):
            return few(y, x, a, b, ranks, parts, grouped)
        for span in grouped.spans:
            _, begin, end = span
            if end - begin > FEW_ROWS:
                add_deltas(y, x, a, b, ranks, parts, AdapterRows(rows.slots, replace(grouped, spans=(span,))))
            else:
                few(y, x, a, b, ranks, parts, Grouped(grouped.order[begin:end], grouped.slots[begin:end], (span,)))
        return None

    return add
