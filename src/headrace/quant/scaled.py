"""Weights of 8 bits with a scale: FP8 and int8, of the whole tensor, an output channel, a group of inputs, or a block.

What lives here: what FP8 checkpoints (Micikevicius et al. 2022; blocks as DeepSeek-V3 publishes them),
compressed-tensors' unpacked ones and bitsandbytes' int8 have in common. What may not: configs (config.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, FormatError, StoredTensor, Tensors, check_scale
from headrace.quant.codes import Activations, by_group, codes_of, coding_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.candidate import EightBits
    from headrace.kernels.linear.packing import Codes, Coding

WHOLE = 0  # of a block: as long as the matrix


@dataclass(frozen=True, slots=True)
class ScaledWeight(Format):
    """w = (code - zero) · scale · ``factor``. ``block``: outputs and inputs that share a scale."""

    dtype: str  # "float8_e4m3fn" or "int8"
    block: tuple[int, int]
    scale: tuple[str, ...] = ("weight_scale", "weight_scale_inv")  # suffixes on disk
    factor: float = 1.0
    zero: bool = False
    activations: Activations | None = None

    @property
    def label(self) -> str:
        rows, columns = self.block
        by = {(WHOLE, WHOLE): "by tensor", (1, WHOLE): "by channel"}.get(self.block)
        kind = "FP8" if self.dtype == "float8_e4m3fn" else "int8"
        return f"{kind}, scales {by or f'of {rows} x {columns}'}" + (
            f", {self.activations.label}" if self.activations else ""
        )

    def problem(self, outs: int, ins: int) -> str | None:
        group = self.activations.group if self.activations else 0
        return (
            f"{ins} inputs are no whole groups of {group}, by which they are rounded" if group and ins % group else None
        )

    def _grid(self, outs: int, ins: int) -> tuple[int, ...]:
        rows, columns = (size or whole for size, whole in zip(self.block, (outs, ins), strict=True))
        return () if self.block == (WHOLE, WHOLE) else (-(-outs // rows), -(-ins // columns))

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        grid = self._grid(outs, ins)
        found = [StoredTensor("weight", (outs, ins), self.dtype), StoredTensor("scale", grid, "float32", self.scale)]
        if self.zero:
            found.append(StoredTensor("zero", grid, "int8", ("weight_zero_point",)))
        if self.activations is not None and self.activations.static:
            found.append(StoredTensor("input_scale", (), "float32", ("input_scale", "activation_scale")))
        return tuple(found)

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "scale", "input_scale")
        if self.dtype != "int8" and bool(tensors["weight"].isnan().any()):
            raise FormatError("weight holds NaN")
        return tensors

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        zero = self._of_rows(tensors["zero"].float(), rows) if self.zero else None
        wide = by_group(
            tensors["weight"][rows].float(), self._of_rows(tensors["scale"], rows), zero, size=self.block[1]
        )
        return (wide if self.factor == 1.0 else wide * self.factor).to(dtype)

    @property
    def coding(self) -> Coding | None:
        return self.rounded_coding if self.activations is None else None

    @property
    def rounded_coding(self) -> Coding | None:
        return coding_of(8, self.block[1], zeros=self.zero, floats=self.dtype != "int8")

    @property
    def eight(self) -> EightBits | None:
        from headrace.kernels.candidate import EightBits

        inputs, kind = self.activations, "int8" if self.dtype == "int8" else "fp8"
        if inputs is None or inputs.kind != kind or self.zero or self.factor != 1.0:
            return None
        blocked = self.block == (128, 128) and inputs.group == 128
        by_row = self.block[1] == WHOLE and self.block[0] in (1, WHOLE) and not inputs.group
        return EightBits(kind, inputs.group, inputs.powers, inputs.static) if blocked or by_row else None

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        import torch

        weight, scale = tensors["weight"][rows], self._of_rows(tensors["scale"], rows) * self.factor
        scale = scale.expand(len(weight), -1)
        if self.dtype != "int8":
            return codes_of(weight.view(torch.uint8), scale, self.block[1])
        zero = self._of_rows(tensors["zero"].int(), rows).expand_as(scale) + 128 if self.zero else None
        return codes_of((weight.int() + 128).to(torch.uint8), scale, self.block[1], zero)

    def _of_rows(self, grid: Tensor, rows: Any) -> Tensor:
        """[rows, groups]"""
        if grid.dim() == 0:
            return grid.view(1, 1)
        return (grid if self.block[0] == 1 else grid.repeat_interleave(self.block[0], 0))[rows]

    @property
    def unit_scale(self) -> float:
        return 0.02 / (1.0 if self.dtype != "int8" else 74.0 * self.factor)
