"""Inputs that are rotated in small blocks before they are multiplied, by weights that have been rotated, too: what is
large in one channel is shared by many (block-wise Hadamard rotations, as MR-GPTQ has them: Egiazarian et al. 2025).

What lives here: the rotation, and a format whose weights were rotated. What may not: torch at import, where rotations
stand in a config (config.py), choosing codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, StoredTensor, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.linear.packing import Codes, Coding


def rotated(x: Tensor, size: int) -> Tensor:
    """x · H / √size in blocks of ``size`` (a power of two) of the last dimension; H is Sylvester's Hadamard matrix,
    which is symmetric, so this is its own inverse. float32.
    """
    y: Tensor = x.float().unflatten(-1, (-1, size))
    half = 1
    while half < size:
        pairs = y.unflatten(-1, (-1, 2, half))
        low, high = pairs.unbind(-2)
        y = pairs.new_empty(pairs.shape)
        y[..., 0, :], y[..., 1, :] = low + high, low - high
        y, half = y.flatten(-3), 2 * half
    return y.flatten(-2).mul_(size**-0.5)


@dataclass(frozen=True, slots=True)
class Rotated(Format):
    """y = rotated(x) · innerᵀ."""

    inner: Format
    size: int

    @property
    def label(self) -> str:
        return f"{self.inner.label}, inputs rotated by {self.size}"

    @property
    def merges(self) -> bool:
        return self.inner.merges

    @property
    def by_row(self) -> bool:
        return self.inner.by_row

    @property
    def unit_scale(self) -> float:
        return self.inner.unit_scale

    @property
    def multiplies_inputs(self) -> bool:
        return False

    def problem(self, outs: int, ins: int) -> str | None:
        if ins % self.size:
            return f"{ins} inputs are no whole blocks of {self.size}"
        return self.inner.problem(outs, ins)

    def shares(self, *, by_inputs: bool) -> bool:
        return self.inner.shares(by_inputs=by_inputs)

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        return self.inner.tensors(outs, ins)

    def prepare(self, tensors: Tensors) -> Tensors:
        return self.inner.prepare(tensors)

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        return self.inner.dense(tensors, rows, dtype)

    def dequantized(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return rotated(self.inner.dequantized(tensors, dtype), self.size).to(dtype)

    @property
    def coding(self) -> Coding | None:
        inner = self.inner.coding
        return None if inner is None or self.inner.rounds_inputs else replace(inner, rotation=self.size)

    def has_codes(self, tensors: Tensors) -> bool:
        return self.coding is not None and self.inner.has_codes(tensors)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        return self.inner.codes(tensors, rows)

    def activated(self, x: Tensor, tensors: Tensors) -> Tensor:
        return self.inner.activated(rotated(x, self.size).to(x.dtype), tensors)

    def make_up(self, tensors: Tensors, seed: int) -> None:
        self.inner.make_up(tensors, seed)
