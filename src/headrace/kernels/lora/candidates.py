"""The candidates for what adapters add to a product and to an embedding, best first.

What lives here: the ordered lists, small calls that build each kernel a model will launch, and the C kernel (lora.c) as
a torch function. What may not: Triton, compiling (build/), mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.build.c_compiler import Native
from headrace.kernels.build.gpu import triton
from headrace.kernels.build.native import TYPES, function_of, native, rows_of
from headrace.kernels.build.rehearsals import TOKENS
from headrace.kernels.candidate import Calls, CallSite, Declined, DeltaFacts, Sizes
from headrace.kernels.inputs import AdapterRows
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


_MANY = 512  # rows, from which on tiles are tall


def _rows(site: CallSite[DeltaFacts], count: int) -> AdapterRows:
    return AdapterRows(site.zeros(count, dtype=torch.int32))


def _adds(site: CallSite[DeltaFacts], run: Any, sizes: Sizes) -> Calls:
    facts, ints = site.facts, partial(site.zeros, dtype=torch.int32)
    parts, most = facts.parts, facts.rank

    def add(count: int, of: Callable[[], Tensor | None], squares: Callable[[], Tensor | None]) -> object:
        a, b = site.zeros(1, len(parts), most, facts.in_features), site.zeros(1, most, sum(parts))
        y, x, ranks = site.zeros(count, sum(parts)), site.zeros(count, facts.in_features), ints(1, len(parts))
        return run(y, x, a, b, ranks, parts, _rows(site, count), of(), squares(), 1.0)

    gains = partial(site.zeros, 1, 2, sum(parts), dtype=torch.float32)
    squares = partial(site.zeros, 1, TOKENS, dtype=torch.float32)
    none: Callable[[], None] = lambda: None  # noqa: E731
    for name, call in (
        ("few", partial(add, TOKENS, none, none)),
        ("few, normed", partial(add, TOKENS, none, squares)),
        ("few, gains", partial(add, TOKENS, gains, none)),
        ("many", partial(add, _MANY, none, none)),
        ("many, gains", partial(add, _MANY, gains, none)),
    ):
        yield (
            f"{name}, {facts.in_features % 16}, {[each % 16 for each in parts]}, {most}, {min(8, -(-facts.in_features // 1024))}",
            call,
        )


def _looks_up(site: CallSite[DeltaFacts], run: Any, sizes: Sizes) -> Calls:
    def look_up(count: int) -> object:
        (outs,), most = site.facts.parts, site.facts.rank
        a, b = site.zeros(1, 1, most), site.zeros(1, most, outs)
        ids, ranks = site.zeros(count, dtype=torch.int64), site.zeros(1, 1, dtype=torch.int32)
        return run(site.zeros(count, outs), ids, a, b, ranks, 1.5, _rows(site, count))

    yield "tokens", partial(look_up, TOKENS)


ADD_DELTAS = (
    native(create_add_deltas),
    triton(
        "lora.triton_joint:create_joint_deltas", _adds,
        name="joint", techniques=frozenset({"joint_deltas"}), varies=True, optional=True,
    ),
    triton("lora.triton_lora:create_add_deltas", _adds),
)  # fmt: skip
LOOK_UP_DELTAS = (triton("lora.triton_lora:look_up_deltas", _looks_up),)
