"""The mended interpreter itself: it is the judge of every Triton kernel where there is no GPU."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter

triton, tl = tests.support.triton_interpreter.triton, tests.support.triton_interpreter.tl


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = row * N + column
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), input_precision="ieee"))


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def _sum(x_ptr, y_ptr, total_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(x_ptr + at, tl.where(x > y, x * y + x, y))
    tl.store(total_ptr, tl.sum(x.to(tl.float32), 0))


@triton.jit
def _copy(x_ptr, y_ptr, count, N: tl.constexpr, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at, mask=at < count) if MASKED else tl.load(x_ptr + at)
    tl.store(y_ptr + at, x)


@triton.jit
def _loop(count_ptr, y_ptr):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(0, tl.load(count_ptr)):
        total += i
    tl.store(y_ptr, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dot_is_a_dot(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype)
    out = torch.empty(16, 16)
    _dot[(1,)](a, b, out, N=16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_casts_round_to_nearest_even_both_ways() -> None:
    x = torch.cat(
        (torch.randn(250) * 100, torch.tensor([1.00390625, 1.01171875, float("inf"), float("nan"), 3.4e38, -0.0]))
    )
    narrow, wide = torch.empty(256, dtype=torch.bfloat16), torch.empty(256)
    _cast[(1,)](x, narrow, N=256)
    torch.testing.assert_close(narrow, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    _cast[(1,)](narrow, wide, N=256)
    torch.testing.assert_close(wide, narrow.float(), rtol=0, atol=0, equal_nan=True)


def test_arithmetic_and_sums_of_bfloat16() -> None:
    x, y, total = torch.randn(64).bfloat16(), torch.randn(64).bfloat16(), torch.empty(1)
    want, before = torch.where(x > y, x * y + x, y), x.float().sum()
    _sum[(1,)](x, y, total, N=64)
    torch.testing.assert_close(x, want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(total[0], before)


def test_a_loop_may_run_to_a_loaded_number() -> None:
    out = torch.empty(1, dtype=torch.int32)
    _loop[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert int(out) == 10


def test_what_lies_outside_an_argument_is_not_read_or_written() -> None:
    memory = torch.zeros(64)
    with pytest.raises(Exception, match="out-of-bounds load"):
        _copy[(1,)](memory[:32], torch.empty(64), 64, N=64, MASKED=False)
    with pytest.raises(Exception, match="out-of-bounds store"):
        _copy[(1,)](torch.zeros(64), memory[:32], 64, N=64, MASKED=False)


def test_masked_lanes_without_a_value_hold_anything() -> None:
    out = torch.zeros(64)
    _copy[(1,)](torch.zeros(64), out, 8, N=64, MASKED=True)
    assert not out[:8].any() and out[8:].any()


def test_programs_are_counted() -> None:
    tests.support.triton_interpreter.PROGRAMS.clear()
    _loop[(7, 3)](torch.tensor([1], dtype=torch.int32), torch.empty(1, dtype=torch.int32))
    assert tests.support.triton_interpreter.PROGRAMS == [21]
