"""What adapters add, in Triton against its twins, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.inputs import AdapterRows
from headrace.kernels.lora import triton_joint, triton_lora
from headrace.kernels.lora.reference import add_deltas, look_up_deltas
from headrace.request import NO_SLOT
from tests.support.adapters import scattered

MIXED = [NO_SLOT, 2, 2, 0, NO_SLOT, 2, 3, 4] * 5  # of slot 1 no row has
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def rows(slots: list[int]) -> AdapterRows:
    return AdapterRows(torch.tensor(slots, dtype=torch.int32))


def drawn(
    parts: tuple[int, ...], ins: int, most: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and ranks of five slots; NaN where no rank reaches."""
    generator = torch.Generator().manual_seed(7)
    ranks = torch.tensor([[most, 1, 0], [most, most, most], [3, most, 2], [0, 0, 0], [0, 5, most]])[
        :, : len(parts)
    ].clamp(max=most)
    a = torch.randn(5, len(parts), most, ins, generator=generator) / ins**0.5
    b = torch.randn(5, most, sum(parts), generator=generator)
    firsts = np.cumsum([0, *parts])
    for slot in range(5):
        for part in range(len(parts)):
            rank = int(ranks[slot, part])
            a[slot, part, rank:] = float("nan")
            b[slot, rank:, firsts[part] : firsts[part + 1]] = float("nan")
    wide = torch.zeros(5, len(parts) + 2, dtype=torch.int32)  # ranks of all sites lie side by side
    wide[:, 1 : len(parts) + 1] = ranks
    return a.to(dtype), b.to(dtype), wide[:, 1 : len(parts) + 1]


@pytest.mark.parametrize(
    ("parts", "ins", "most"), [((40,), 72, 16), ((130, 24, 24), 1100, 5), ((24, 24), 72, 80), ((300, 24), 600, 16)]
)
@pytest.mark.parametrize("slots", [[2], MIXED])
@pytest.mark.parametrize(("chunk", "dtype"), [(2**20, torch.float32), (2**20, torch.bfloat16), (256, torch.bfloat16)])
def test_each_row_gets_what_its_adapter_adds(
    chunk: int, slots: list[int], parts: tuple[int, ...], ins: int, most: int, dtype: torch.dtype
) -> None:
    a, b, ranks = drawn(parts, ins, most, dtype)
    factors = scattered(a, b, ranks, parts, chunk=chunk)
    exact = scattered(a.float(), b.float(), ranks, parts, chunk=chunk)
    wide, y = torch.randn(len(slots), ins + 8).to(dtype), torch.randn(len(slots), sum(parts)).to(dtype)
    x, got, once, want = wide[:, :ins], y.clone(), y.clone(), y.float()
    triton_lora._adder(pdl=False, invariant=False)(got, x, factors, parts, rows(slots))
    add_deltas(want, x.float(), exact, parts, rows(slots))
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    untouched = [row for row, slot in enumerate(slots) if slot in (NO_SLOT, 3)]
    assert torch.equal(got[untouched], y[untouched])
    if ins > triton_lora._SHARE or most > triton_joint._RANKS:
        return  # in the interpreter programs come one after another: none may wait for the next
    tickets = torch.zeros(1024, dtype=torch.int32)
    rest = triton_lora._adder(pdl=False, invariant=False)
    triton_joint._joint(tickets, rest, pdl=False)(once, x, factors, parts, rows(slots))
    torch.testing.assert_close(once.float(), got.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("chunk", [2**20, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("invariant", [False, True])
def test_magnitudes_and_a_norm_that_is_still_to_be_divided(
    invariant: bool, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of few rows, and in tall ones."""
    monkeypatch.setattr(triton_lora, "_LEAST_TALL", 16)
    a, b, ranks = drawn((24, 40), 64, 8, dtype)
    x, y = torch.randn(len(MIXED), 64).to(dtype), torch.randn(len(MIXED), 64).to(dtype)
    gains = torch.rand(5, 2, 64) + 0.5
    factors = scattered(a, b, ranks, (24, 40), gains, chunk)
    got, want, squares = y.clone(), y.clone(), torch.rand(3, len(MIXED)) * 64
    triton_lora._adder(pdl=False, invariant=invariant)(got, x, factors, (24, 40), rows(MIXED), squares, 1e-5)
    add_deltas(want, x, factors, (24, 40), rows(MIXED), squares, 1e-5)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("chunk", [2**20, 256])
def test_rows_of_an_embedding(chunk: int, scale: float | None) -> None:
    a, b, ranks = (
        torch.randn(5, 600, 6),
        torch.randn(5, 6, 40),
        torch.tensor([[6], [6], [2], [0], [1]], dtype=torch.int32),
    )
    ids, y = torch.arange(len(MIXED)) * 71 % 600, torch.randn(len(MIXED), 40)
    got, want = y.clone(), y.clone()
    factors = scattered(a.transpose(1, 2)[:, None], b, ranks, (40,), chunk=chunk)
    triton_lora.look_up_deltas(got, ids, factors, scale, rows(MIXED))
    look_up_deltas(want, ids, factors, scale, rows(MIXED))
    for row, slot in enumerate(MIXED):
        if slot != NO_SLOT:
            rank = int(ranks[slot, 0])
            y[row] += (scale or 1.0) * a[slot, ids[row], :rank] @ b[slot, :rank]
    torch.testing.assert_close(want, y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_bits_of_a_row_are_its_own_where_that_is_asked_for() -> None:
    a, b, ranks = drawn((40,), 72, 16, torch.bfloat16)
    factors = scattered(a, b, ranks, (40,))
    x, y = torch.randn(len(MIXED), 72).bfloat16(), torch.randn(len(MIXED), 40).bfloat16()
    add, whole, lone = triton_lora._adder(pdl=False, invariant=True), y.clone(), y[1:2].clone()
    add(whole, x, factors, (40,), rows(MIXED))
    add(lone, x[1:2], factors, (40,), rows(MIXED[1:2]))
    assert torch.equal(whole[1:2], lone) and not torch.equal(lone, y[1:2])
