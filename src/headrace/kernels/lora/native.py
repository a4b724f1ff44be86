"""The C kernel for what adapters add (lora.c) as a torch function.

What lives here: pointers. What may not: compiling (build/), mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.native import TYPES, function_of, rows_of
from headrace.kernels.candidate import CallSite, Declined, DeltaFacts
from headrace.kernels.lora.inputs import AdapterRows
from headrace.kernels.lora.reference import add_deltas


def create_add_deltas(native: Native, site: CallSite[DeltaFacts]) -> Any:
    """Magnitudes, and norms that are still to be divided by, are left to the twin."""
    if not native.threads and torch.get_num_threads() > 1:
        return Declined("built without OpenMP (one thread only); torch's own products use them all")
    function = function_of(native, "headrace_add_deltas", "iqqqqqqPPPPqPPqPPPqPi")
    facts, threads = site.facts, torch.get_num_threads()
    ends, kind = torch.tensor(list(accumulate(facts.parts))), TYPES[facts.dtype]
    places, count, outs, ins, most = ends.data_ptr(), len(facts.parts), sum(facts.parts), facts.in_features, facts.rank

    def add(
        y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: AdapterRows,
        gains: Tensor | None = None, squares: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        """In place."""
        assert len(ends) == count  # it lives as long as this
        if gains is not None or squares is not None:
            return add_deltas(y, x, a, b, ranks, parts, rows, gains, squares, eps)
        if (grouped := rows.by_slot()) is None:
            return None
        inputs, found = rows_of(x), len(grouped.order)
        inner = torch.empty(found * count * most)
        function(
            kind, found, len(grouped.blocks) - 1, ins, outs, count, most, grouped.order.data_ptr(), grouped.slots.data_ptr(),
            grouped.blocks.data_ptr(), ranks.data_ptr(), ranks.stride(0), places, inputs.data_ptr(), inputs.stride(0), a.data_ptr(),
            b.data_ptr(), y.data_ptr(), y.stride(0), inner.data_ptr(), threads,
        )  # fmt: skip
        return None

    return add
