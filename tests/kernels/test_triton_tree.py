"""Attention over trees in Triton against its torch twin, in the interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.attention import reference
from headrace.kernels.attention.paged import PagedAttention
from tests.support.kernel_cases import PagedCase, assert_close
from tests.support.tree_cases import tree_inputs

MIXED = [(9, 70), (1, 30), (21, 50), (17, 17)]


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, 30.0), (40, None)])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 2, 64), torch.bfloat16), ((3, 1, 33), torch.float32)], ids=["bfloat16", "float32"]
)
def test_a_tree_beside_rows_equals_its_twin(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    heads, kv_heads, dim = shape
    case = PagedCase(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=16)
    given = case.q, case.k_cache, case.v_cache, tree_inputs(case, (True, False, False, True)), 0.3, window, soft_cap
    run = PagedAttention(dim, heads // kv_heads, 2, False)
    assert_close(run(*given), reference.paged_attention(*given), dtype)
