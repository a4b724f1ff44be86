"""Weights that lie apart, added beside a product in Triton's interpreter, against the twin."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401 - before any kernel: it fixes the mode
from headrace.kernels.linear import sparse, triton_sparse
from tests.support.kernel_cases import assert_close
from tests.support.sparse import entries


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 33, 100), (3, 40, 64), (11, 17, 200)])
def test_entries_are_added_as_the_twin_does(dtype: torch.dtype, rows: int, outs: int, ins: int) -> None:
    torch.manual_seed(rows)
    for share in (0.0, 0.02, 0.4):
        _, found = entries(outs, ins, share)
        x, y = torch.randn(rows, ins).to(dtype), torch.randn(rows, outs).to(dtype)
        want, got = y.clone(), y.clone()
        sparse.add_sparse(want, x, **found)
        triton_sparse.add_sparse(got, x, **found)
        assert_close(got, want, dtype)
    triton_sparse.add_sparse(y[:0], x[:0], **found)
