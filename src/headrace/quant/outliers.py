"""Few weights apart from a matrix of few bits: whole columns whose inputs are outliers (LLM.int8(), Dettmers et al.
2022), or single weights that rounding would hurt most, as a sparse matrix beside the dense one (SpQR, Dettmers et al.
2023).

What lives here: those two. What may not: torch at import, choosing outliers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, FormatError, StoredTensor, Tensors
from headrace.quant.integers import PackedIntegers
from headrace.quant.scaled import ScaledWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutlierColumns(Format):
    """Inputs at ``outlier_index`` are not rounded, and meet weights that are not. ``share``: of all inputs."""

    inner: ScaledWeight
    share: float

    @property
    def label(self) -> str:
        return f"{self.inner.label}, {self.share:.2%} of the columns apart"

    def count(self, ins: int) -> int:
        return math.ceil(ins * self.share)

    @property
    def multiplies_inputs(self) -> bool:
        return False

    def problem(self, outs: int, ins: int) -> str | None:
        return self.inner.problem(outs, ins)

    def shares(self, *, by_inputs: bool) -> bool:
        return not by_inputs and self.inner.shares(by_inputs=False)

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        apart = self.count(ins)
        more = StoredTensor("outlier_index", (apart,), "int64"), StoredTensor("outlier_weight", (outs, apart))
        return *self.inner.tensors(outs, ins), *more

    def prepare(self, tensors: Tensors) -> Tensors:
        index, ins = tensors["outlier_index"], tensors["weight"].shape[1]
        if bool(((index < 0) | (index >= ins)).any()) or len(index.unique()) < len(index):
            raise FormatError(
                f"outlier_index names inputs from {int(index.min())} to {int(index.max())}, and there are {ins}, each once"
            )
        _check_finite(tensors["outlier_weight"], "outlier_weight")
        return self.inner.prepare(tensors)

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        return self.inner.dense(tensors, rows, dtype).index_copy_(
            1, tensors["outlier_index"], tensors["outlier_weight"][rows].to(dtype)
        )

    def activated(self, x: Tensor, tensors: Tensors) -> Tensor:
        index = tensors["outlier_index"]
        return self.inner.activated(x.index_fill(-1, index, 0), tensors).index_copy_(-1, index, x[..., index])

    def make_up(self, tensors: Tensors, seed: int) -> None:
        Format.make_up(self, tensors, seed)
        tensors["scale"].fill_(self.inner.unit_scale)
        index = tensors["outlier_index"]
        index.copy_(index.new_ones(len(index)).cumsum(0) - 1)


@dataclass(frozen=True, slots=True)
class SparseOutliers(Format):
    """w = inner + a sparse matrix: values of row r at ``outlier_columns`` from ``outlier_rows[r]`` to ``outlier_rows[r
    + 1]``.

    ``share``: of all weights, about.
    """

    inner: PackedIntegers
    share: float

    @property
    def label(self) -> str:
        return f"{self.inner.label}, {self.share:.2%} of the weights apart"

    @property
    def by_row(self) -> bool:
        return False

    @property
    def multiplies_inputs(self) -> bool:
        return False

    def problem(self, outs: int, ins: int) -> str | None:
        return self.inner.problem(outs, ins)

    def shares(self, *, by_inputs: bool) -> bool:
        return False

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        return (
            *self.inner.tensors(outs, ins),
            StoredTensor("outlier_rows", (outs + 1,), "int32"),
            StoredTensor("outlier_columns", (-1,), "int32"),
            StoredTensor("outlier_values", (-1,), "float32"),
        )

    def num_bytes(self, outs: int, ins: int, element_bytes: float) -> float:
        return self.inner.num_bytes(outs, ins, element_bytes) + 8 * self.share * outs * ins + 4 * (outs + 1)

    def prepare(self, tensors: Tensors) -> Tensors:
        tensors = self.inner.prepare(tensors)
        ends, columns, values = (tensors.pop(f"outlier_{name}", None) for name in ("rows", "columns", "values"))
        assert ends is not None
        columns = ends.new_zeros(0) if columns is None else columns
        values = ends.new_zeros(0).float() if values is None else values
        counts = ends.diff()
        if int(ends[0]) != 0 or bool((counts < 0).any()) or int(ends[-1]) > len(columns) or len(columns) != len(values):
            raise FormatError(
                f"outlier_rows ends at {int(ends[-1])}, and there are {len(columns)} columns and {len(values)} values"
            )
        ins = tensors["weight_packed"].shape[1] * 32 // self.inner.bits
        if bool(((columns < 0) | (columns >= ins)).any()):
            raise FormatError(
                f"outlier_columns names inputs from {int(columns.min())} to {int(columns.max())}, and there are {ins}"
            )
        _check_finite(values, "outlier_values")
        kept = int(ends[-1])  # what is behind pads experts to the longest
        rows = counts.new_ones(len(counts)).cumsum(0).sub(1).repeat_interleave(counts)
        return tensors | {"outlier_row": rows.int(), "outlier_column": columns[:kept], "outlier_value": values[:kept]}

    def apart(self, tensors: Tensors) -> tuple[Format, Tensors, Tensors]:
        import torch

        row, outs = tensors["outlier_row"], tensors["weight_packed"].shape[0]
        ends = torch.nn.functional.pad(row.bincount(minlength=outs).cumsum(0), (1, 0)).int()
        inner = {name: each for name, each in tensors.items() if not name.startswith("outlier")}
        beside = {
            "ends": ends,
            "columns": tensors["outlier_column"].contiguous(),
            "values": tensors["outlier_value"].contiguous(),
        }
        return self.inner, inner, beside

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        import torch

        dense = self.inner.dense(tensors, rows, torch.float32)
        first, last, _ = rows.indices(tensors["weight_packed"].shape[0])
        row = tensors["outlier_row"] - first
        mine = (row >= 0) & (row < last - first)  # of the others zeros are added: which they are, only the device knows
        at = torch.where(mine, row, 0), tensors["outlier_column"]
        return dense.index_put_(at, torch.where(mine, tensors["outlier_value"], 0.0), accumulate=True).to(dtype)

    def make_up(self, tensors: Tensors, seed: int) -> None:
        self.inner.make_up({name: each for name, each in tensors.items() if not name.startswith("outlier")}, seed)
        for name in ("rows", "columns", "values"):
            if f"outlier_{name}" in tensors:
                tensors[f"outlier_{name}"].zero_()


def _check_finite(tensor: Tensor, name: str) -> None:
    if not bool(tensor.isfinite().all()):
        raise FormatError(f"{name} holds NaN or infinity")
