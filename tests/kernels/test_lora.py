"""What adapters add to a product: the twin against dense matrices, and the rows of a step by adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.candidate import DeltaFacts
from headrace.kernels.inputs import adapter_rows
from headrace.kernels.lora.reference import add_deltas
from headrace.kernels.operations import ADD_DELTAS
from headrace.request import NO_SLOT
from tests.support.adapters import scattered

CPU = torch.device("cpu")


def operands(
    parts: tuple[int, ...], ins: int, ranks: list[int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """a, b, ranks, with NaN where no rank reaches."""
    most, generator = max(ranks) + 2, torch.Generator().manual_seed(7)
    a = torch.randn(len(ranks), len(parts), most, ins, generator=generator)
    b = torch.randn(len(ranks), most, sum(parts), generator=generator)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:] = b[slot, rank:] = float("nan")
    return a.to(dtype), b.to(dtype), torch.tensor(ranks, dtype=torch.int32)[:, None].repeat(1, len(parts))


def dense(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: tuple[int, ...], slots: list[int]
) -> Tensor:
    """Row by row, in float64."""
    found, firsts = y.double().clone(), np.cumsum([0, *parts])
    for row, slot in enumerate(slots):
        for part, first in enumerate(firsts[:-1]) if slot != NO_SLOT else ():
            last, rank = firsts[part + 1], int(ranks[slot, part])
            found[row, first:last] += (x[row].double() @ a[slot, part, :rank].double().T) @ b[
                slot, :rank, first:last
            ].double()
    return found


@pytest.mark.parametrize("parts", [(24,), (16, 8, 8), (40, 40)])
@pytest.mark.parametrize("slots", [[0], [NO_SLOT, 2, 2, 0, NO_SLOT, 2, 0], [1, 1, 3], [3] * 40 + [0, NO_SLOT] * 9])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_each_row_gets_what_its_adapter_adds(parts: tuple[int, ...], slots: list[int], chunk: int) -> None:
    a, b, ranks = operands(parts, 33, [1, 0, 5, 16])
    factors = scattered(a, b, ranks, parts, chunk=chunk)
    x, y = torch.randn(len(slots), 33), torch.randn(len(slots), sum(parts))
    rows = adapter_rows(np.array(slots, dtype=np.int32), CPU)
    assert rows is not None
    found = y.clone()
    add_deltas(found, x, factors, parts, rows)
    torch.testing.assert_close(found.double(), dense(y, x, a, b, ranks, parts, slots), rtol=1e-5, atol=1e-4)
    untouched = [row for row, slot in enumerate(slots) if slot in (NO_SLOT, 1)]
    assert torch.equal(found[untouched], y[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [(24,), (16, 8, 40), (300, 7), (64, 64)])
@pytest.mark.parametrize("slots", [[0], [NO_SLOT, 2, 2, 0, NO_SLOT, 2, 0], [1, 1, 3], [3] * 40 + [0, NO_SLOT, 2] * 9])
@pytest.mark.parametrize("chunk", [1024, 32])
def test_the_kernel_adds_what_the_twin_adds(
    parts: tuple[int, ...], slots: list[int], dtype: torch.dtype, chunk: int
) -> None:
    """Few rows of a slot and many, each in one rounding; the bits of a row of few are its own."""
    kernels = Kernels(CPU)
    add = kernels.choose(ADD_DELTAS, DeltaFacts(dtype, 33, parts, 18, chunk))
    assert kernels.choices[-1].chosen == "native", kernels.choices[-1].declined
    a, b, ranks = operands(parts, 33, [1, 0, 5, 16], dtype)
    factors = scattered(a, b, ranks, parts, chunk=chunk)
    wide = torch.randn(len(slots), 50).to(dtype)
    x, y = wide[:, 3:36], torch.randn(len(slots), sum(parts)).to(dtype)
    rows = adapter_rows(np.array(slots, dtype=np.int32), CPU)
    assert rows is not None
    found, wanted = y.clone(), dense(y, x, a, b, ranks, parts, slots)
    add(found, x, factors, parts, rows)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=10 * tolerance)
    row = slots.index(next(slot for slot in slots if slot not in (NO_SLOT, 3)))
    lone, own = y[row : row + 1].clone(), adapter_rows(np.array(slots[row : row + 1], dtype=np.int32), CPU)
    assert own is not None
    add(lone, x[row : row + 1], factors, parts, own)
    assert torch.equal(lone[0], found[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1024, 16])
def test_gains_are_float32_beside_factors_of_any_type(dtype: torch.dtype, chunk: int) -> None:
    """Multiplied by the first, with the second added, where an adapter changes a part."""
    parts, slots = (24, 40), [0, 1, NO_SLOT, 2, 0]
    a, b, ranks = operands(parts, 33, [2, 0, 5], dtype)
    gains = torch.rand(3, 2, 64) + 0.5
    x, y = torch.randn(len(slots), 33).to(dtype), torch.randn(len(slots), 64).to(dtype)
    rows, found, wanted = adapter_rows(np.array(slots, dtype=np.int32), CPU), y.clone(), y.double()
    assert rows is not None
    for row, slot in enumerate(slots):
        if slot in (0, 2):
            wanted[row] = y[row].double() * gains[slot, 0] + gains[slot, 1]
    add_deltas(found, x, scattered(a, b, ranks, parts, gains, chunk), parts, rows)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(
        found.double(), dense(wanted, x, a, b, ranks, parts, slots), rtol=tolerance, atol=10 * tolerance
    )


def test_rows_lie_side_by_side_by_slot() -> None:
    assert adapter_rows(np.full(3, NO_SLOT, dtype=np.int32), CPU) is None
    rows = adapter_rows(np.array([2] * 33 + [NO_SLOT, 0], dtype=np.int32), CPU)
    assert rows is not None and rows.grouped is not None and rows.grouped.spans == ((0, 0, 1), (2, 1, 34))
    assert rows.grouped.order.tolist() == [34, *range(33)] and rows.grouped.slots.tolist() == [0] + [2] * 33
    assert rows.grouped.blocks.tolist() == [0, *range(1, 34, 4), 34]
