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
from headrace.kernels.build.native import TYPES, function_of, native
from headrace.kernels.build.warm_ups import TOKENS
from headrace.kernels.candidate import Calls, CallSite, Declined, DeltaFacts, Sizes, rows_of
from headrace.kernels.inputs import AdapterRows, SlotFactors
from headrace.kernels.lora.reference import add_deltas
from headrace.spec import ADDRESS_UNIT


def create_add_deltas(native: Native, site: CallSite[DeltaFacts]) -> Any:
    """Magnitudes, and norms that are still to be divided by, are left to the twin."""
    if not native.threads and torch.get_num_threads() > 1:
        return Declined("built without OpenMP (one thread only); torch's own products use them all")
    function = function_of(native, "headrace_add_deltas", "iqqqqqqqqqPPPPPqPPPqPPqPi")
    facts, threads = site.facts, torch.get_num_threads()
    ends, kind = torch.tensor(list(accumulate(facts.parts))), TYPES[facts.dtype]
    places, count, outs, ins, most = ends.data_ptr(), len(facts.parts), sum(facts.parts), facts.in_features, facts.rank

    def add(
        y: Tensor, x: Tensor, factors: SlotFactors, parts: Sequence[int], rows: AdapterRows, squares: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:  # fmt: skip
        """In place."""
        assert len(ends) == count  # it lives as long as this
        if factors.gained or squares is not None:
            return add_deltas(y, x, factors, parts, rows, squares, eps)
        if (grouped := rows.by_slot()) is None:
            return None
        inputs, found = rows_of(x), len(grouped.order)
        inner = torch.empty(found * count * most)
        function(
            kind, found, len(grouped.blocks) - 1, ins, outs, count, most, *facts.chunks, facts.chunk, grouped.order.data_ptr(),
            grouped.slots.data_ptr(), grouped.blocks.data_ptr(), factors.ranks.data_ptr(), factors.a.data_ptr(), factors.ranks.stride(0),
            factors.b.data_ptr(), places, inputs.data_ptr(), inputs.stride(0), factors.pool.data_ptr(), y.data_ptr(), y.stride(0),
            inner.data_ptr(), threads,
        )  # fmt: skip
        return None

    return add


_MANY = 512  # rows, from which on tiles are tall


def _rows(site: CallSite[DeltaFacts], count: int) -> AdapterRows:
    return AdapterRows(site.zeros(count, dtype=torch.int32))


def _factors(site: CallSite[DeltaFacts], *, gained: bool = False) -> SlotFactors:
    """Of one slot, with addresses of nothing."""
    facts, ints, parts = site.facts, partial(site.zeros, dtype=torch.int32), len(site.facts.parts)
    (a, b), size = facts.chunks, facts.dtype.itemsize
    gains = -(-max(facts.parts) * 4 // (size * facts.chunk))
    addresses = ints(1, parts, facts.rank, a), ints(1, parts, facts.rank, b), ints(1, parts, 2, gains)
    return SlotFactors(site.zeros(ADDRESS_UNIT), ints(1, parts), *addresses, facts.chunk, gained)


def _adds(site: CallSite[DeltaFacts], run: Any, sizes: Sizes) -> Calls:
    facts = site.facts
    parts, most = facts.parts, facts.rank

    def add(count: int, gained: bool, squares: Callable[[], Tensor | None]) -> object:
        y, x = site.zeros(count, sum(parts)), site.zeros(count, facts.in_features)
        return run(y, x, _factors(site, gained=gained), parts, _rows(site, count), squares(), 1.0)

    squares = partial(site.zeros, 1, TOKENS, dtype=torch.float32)
    none: Callable[[], None] = lambda: None  # noqa: E731
    for name, call in (
        ("few", partial(add, TOKENS, False, none)),
        ("few, normed", partial(add, TOKENS, False, squares)),
        ("few, gains", partial(add, TOKENS, True, none)),
        ("many", partial(add, _MANY, False, none)),
        ("many, gains", partial(add, _MANY, True, none)),
    ):
        yield (
            f"{name}, {facts.in_features % 16}, {[each % 16 for each in parts]}, {most}, {min(8, -(-facts.in_features // 1024))}, {facts.chunks}",
            call,
        )


def _looks_up(site: CallSite[DeltaFacts], run: Any, sizes: Sizes) -> Calls:
    def look_up(count: int) -> object:
        ids = site.zeros(count, dtype=torch.int64)
        return run(site.zeros(count, site.facts.parts[0]), ids, _factors(site), 1.5, _rows(site, count))

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
