"""One bit a weight: which of the two levels of its group it is on.

What lives here: the format and its twin. What may not: torch at import, choosing levels (quantize/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, StoredTensor, Tensors, check_scale
from headrace.quant.codes import by_group, codes_of, coding_of, unpack

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.linear.packing import Codes, Coding


@dataclass(frozen=True, slots=True)
class TwoLevels(Format):
    """w = low + code · scale. ``group``: inputs that share both levels. Words of 32 codes, the first lowest."""

    group: int

    @property
    def label(self) -> str:
        return f"two levels of {self.group}"

    def problem(self, outs: int, ins: int) -> str | None:
        return f"{ins} inputs are no whole groups of {self.group}" if ins % self.group else None

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        groups = (outs, ins // self.group)
        return (
            StoredTensor("weight_packed", (outs, ins // 32), "int32"),
            StoredTensor("weight_scale", groups, "float16"),
            StoredTensor("weight_low", groups, "float16"),
        )

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "weight_scale", "weight_low", zeros=True)
        return tensors

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        codes, scale, low = self._parts(tensors, rows)
        ones = by_group(codes.float(), scale.float(), size=self.group)
        return (ones + low.float().repeat_interleave(self.group, -1)).to(dtype)

    @property
    def coding(self) -> Coding | None:
        return coding_of(1, self.group, shifts=True)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        codes, scale, low = self._parts(tensors, rows)
        return codes_of(codes.byte(), scale, self.group, low)

    def _parts(self, tensors: Tensors, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
        packed, scale, low = (tensors[f"weight_{name}"][rows] for name in ("packed", "scale", "low"))
        return unpack(packed, 1), scale, low

    @property
    def unit_scale(self) -> float:
        return 0.04
