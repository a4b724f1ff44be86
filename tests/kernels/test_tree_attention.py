"""Attention over trees of tokens: the C kernel against its twin, and to the bit as if each branch stood in a row."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.attention import reference
from tests.support.kernel_cases import DTYPES, PagedCase, assert_close, native
from tests.support.tree_cases import alone, tree_inputs

MIXED = [(9, 70), (1, 30), (37, 100), (17, 17), (13, 140)]
TREES = (True, False, False, True, True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, 30.0), (70, None)])
@pytest.mark.parametrize("shape", [(4, 2, 64), (6, 1, 33)])
def test_a_tree_beside_rows_equals_its_twin(
    shape: tuple[int, int, int], window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    case = PagedCase(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=8)
    run = native("paged_attention", dtype=dtype, head_dim=dim, num_heads=heads, num_kv_heads=kv_heads)
    given = case.q, case.k_cache, case.v_cache, tree_inputs(case, TREES), 0.3, window, soft_cap
    assert_close(run(*given), reference.paged_attention(*given), dtype)


@pytest.mark.parametrize("window", [None, 7, 80])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_branch_has_the_bits_that_it_has_in_a_row(window: int | None, threads: int) -> None:
    """With two threads a long sequence is computed in splits."""
    lengths = [(13, 1040)] if threads == 2 else [*MIXED, (60, 1040)]
    case = PagedCase(lengths, heads=4, kv_heads=1, dim=32, dtype=torch.bfloat16, block_size=1)
    inputs = tree_inputs(case, [True] if threads == 2 else [*TREES, True])
    run = native("paged_attention", dtype=torch.bfloat16, head_dim=32, num_heads=4, num_kv_heads=1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    whole = run(case.q, case.k_cache, case.v_cache, inputs, 0.3, window, None)
    torch.set_num_threads(before)
    for token, one in alone(case, inputs):
        row = run(case.q[token : token + 1], case.k_cache, case.v_cache, one, 0.3, window, None)
        assert torch.equal(row[0], whole[token]), token
