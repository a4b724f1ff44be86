"""A few weights apart, beside a product over the others: the C kernel and the layer against the whole matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.linear.sparse import add_sparse
from headrace.quant.integers import PackedIntegers
from headrace.quant.outliers import SparseOutliers
from tests.support.kernel_cases import assert_close, native
from tests.support.sparse import entries

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 33, 100), (5, 64, 64), (70, 17, 200)])
def test_entries_are_added_as_the_matrix_would_be(dtype: torch.dtype, rows: int, outs: int, ins: int) -> None:
    """By the twin and by C; rows without entries, all of them in one row, none at all; strided inputs."""
    for share in (0.0, 0.02, 0.5):
        dense, sparse = entries(outs, ins, share)
        x, y = torch.randn(rows, ins + 8).to(dtype)[:, :ins], torch.randn(rows, outs).to(dtype)
        want = y.float() + x.float() @ dense.T
        for add in (add_sparse, native("add_sparse", dtype=dtype)):
            got = y.clone()
            add(got, x, **sparse)
            assert_close(got, want.to(dtype), dtype)
            if not share:
                assert torch.equal(got, y)


def test_one_row_that_is_no_number_does_not_touch_others() -> None:
    dense, sparse = entries(64, 64, 0.1)
    x, y = torch.randn(3, 64), torch.zeros(3, 64)
    x[1] = float("nan")
    native("add_sparse", dtype=torch.float32)(y, x, **sparse)
    assert y[1].isnan().any() and y[[0, 2]].isfinite().all()
    assert_close(y[[0, 2]], x[[0, 2]] @ dense.T, torch.float32)


def test_rows_have_the_same_bits_in_any_company() -> None:
    _, sparse = entries(50, 300, 0.1)
    add, x = native("add_sparse", dtype=torch.float32), torch.randn(37, 300)
    together = torch.randn(37, 50)
    y = together.clone()
    add(together, x, **sparse)
    for first, end in ((0, 1), (3, 5), (0, 20), (36, 37)):
        alone = y[first:end].clone()
        add(alone, x[first:end], **sparse)
        assert torch.equal(alone, together[first:end])


def test_a_format_is_the_sum_of_both_to_the_last_bit() -> None:
    """As its own dense matrix, in float32."""
    form = SparseOutliers(PackedIntegers(3, 64, zero=False), 0.01)
    dense, sparse = entries(32, 128, 0.05)
    made: dict[str, Tensor] = {
        each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype))
        for each in form.inner.tensors(32, 128)
        if not each.optional
    }
    form.inner.make_up(made | {"weight_shape": torch.zeros(2, dtype=torch.int64)}, 3)
    whole: dict[str, Any] = made | {
        "outlier_rows": sparse["ends"], "outlier_columns": sparse["columns"], "outlier_values": sparse["values"],
    }  # fmt: skip
    tensors = form.prepare(dict(whole))
    inner, own, beside = form.apart(tensors)
    assert all(torch.equal(beside[name], each) for name, each in sparse.items())
    want = form.dense(tensors, slice(0, 32), torch.float32)
    assert torch.equal(want, inner.dense(own, slice(0, 32), torch.float32) + dense)
