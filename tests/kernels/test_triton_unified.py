"""Decode attention whose scores become powers of 2 as they are: equal to the twin, and right where float32 does not
hold such powers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.attention import reference
from headrace.kernels.attention import triton_decode as decode
from headrace.kernels.attention.paged import PagedAttention
from tests.support.kernel_cases import PagedCase, assert_close

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums that overflow are what is tested
LENGTHS = [(1, 70), (1, 40), (2, 90), (1, 0), (1, 1), (1, 33)]  # queries, keys: rows 0, 1, 2 and 3, 4, 5, 6


def case_of(dtype: torch.dtype) -> PagedCase:
    case = PagedCase(LENGTHS, heads=4, kv_heads=2, dim=16, dtype=dtype, block_size=16)
    case.k_cache[..., 0] = 8.0  # so that a query can be far below all keys
    return case


def _lift(case: PagedCase) -> None:
    case.q[[0, 2]] *= 300.0


def _sink(case: PagedCase) -> None:
    case.q[[1, 6], :, 0] = -60.0


def _lift_a_part(case: PagedCase) -> None:
    case.k_cache[case.table[2, 3].long()] *= 200.0  # keys 48 to 63 of the third sequence


STATES: dict[str, Callable[[PagedCase], None]] = {"too high": _lift, "too low": _sink, "a part too high": _lift_a_part}


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each tile that is looked at with a running maximum."""
    tiles: list[int] = []
    stock = decode.weigh
    monkeypatch.setattr(decode, "weigh", lambda *each: (tiles.append(1), stock(*each))[1])
    return tiles


def check(
    case: PagedCase, processors: int, window: int | None = None, soft_cap: float | None = None, scores: float = 0.0
) -> None:
    case.poison(window)
    got = case.run(PagedAttention(16, 2, processors, False, unified=True), window, soft_cap)
    assert_close(got, case.run(reference.paged_attention, window, soft_cap), case.q.dtype, scores)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, 0.5)])
def test_ordinary_scores_need_no_maximum(repeated: list[int], window: int | None, soft_cap: float | None) -> None:
    check(case_of(torch.float32), 3, window, soft_cap)
    assert not repeated


def test_float16_keeps_its_maximum(repeated: list[int]) -> None:
    case = case_of(torch.float16)
    case.q[0] *= 8.0  # scores around 2⁶⁰: fine in float32, and no weight of float16
    check(case, 1)
    assert repeated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_rows_out_of_bounds_are_computed_again(repeated: list[int], state: str, dtype: torch.dtype) -> None:
    case = case_of(dtype)
    STATES[state](case)
    check(case, 3, scores=60 * 8 / 16**0.5 if state == "too low" else 0.0)
    assert repeated
