"""An adapter's factors in host memory, as slots take them.

What lives here: reading, checking values, folding the scale into the second factor. What may not: names, shapes
(peft.py has checked them), devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.lora.peft import Adapter, Factors
from headrace.models.checkpoint import DTYPES, MappedFiles
from headrace.models.safetensors_file import TensorEntry
from headrace.parallel.shares import Cut
from headrace.sites import Role


@dataclass(frozen=True, slots=True)
class HostFactors:
    """Of one module. ``a`` [rank, ins], of an embedding [rows, rank]; ``b`` [rank, outs], scaled; ``magnitude`` [outs],
    float32."""

    part: int | None
    a: Tensor
    b: Tensor
    magnitude: Tensor | None

    @property
    def rank(self) -> int:
        return self.b.shape[0]


HostAdapter = Mapping[str, tuple[HostFactors, ...]]  # by the weight's name in the decoder


def read_factors(
    adapter: Adapter, dtype: torch.dtype, *, pinned: bool, cuts: Mapping[str, Cut] = MappingProxyType({})
) -> HostAdapter:
    """All of it, or what belongs to a rank's ``cuts`` of weights, by name. ``pinned``: where a device copies from it.
    Raises ModelError for values that are no numbers."""
    files, found = MappedFiles(), dict[str, tuple[HostFactors, ...]]()
    memory = _Memory(
        sum(math.prod(each.a.shape) + math.prod(each.b.shape) for each in adapter.factors), dtype, pinned=pinned
    )
    try:
        with torch.inference_mode():
            for each in adapter.factors:
                name = each.module.weight.name
                found[name] = (*found.get(name, ()), _read(files, each, memory, cuts.get(name)))
    finally:
        files.close()
    return MappingProxyType(found)


class _Memory:
    """Of one adapter, in one piece: pinning many small ones takes longer than reading them."""

    def __init__(self, elements: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self._left = torch.empty(elements, dtype=dtype, pin_memory=pinned)

    def held(self, value: Tensor) -> Tensor:
        """The same values there."""
        taken, self._left = self._left.split((value.numel(), self._left.numel() - value.numel()))
        kept: Tensor = taken.view(value.shape).copy_(value)
        return kept


def _read(files: MappedFiles, factors: Factors, memory: _Memory, cut: Cut | None) -> HostFactors:
    def tensor(entry: TensorEntry) -> Tensor:
        read = files.tensor(entry.file, DTYPES[entry.dtype], entry.start, entry.num_bytes).view(entry.shape)
        if not _is_finite(read):
            raise ModelError(
                f"{entry.file}: a factor of {factors.module.name} holds NaN or infinite values. Use another version of it."
            )
        return read

    def held(value: Tensor) -> Tensor:
        kept = memory.held(value)
        if kept.dtype != value.dtype and not _is_finite(kept):
            raise ModelError(
                f"{factors.a.file}: a factor of {factors.module.name} is too large for {kept.dtype}. Use --dtype float32."
            )
        return kept

    a, b = tensor(factors.a), tensor(factors.b).float() * factors.scale
    turned = factors.module.weight.role is Role.EMBEDDING
    magnitude = None if factors.magnitude is None else tensor(factors.magnitude).float()
    a, b = a.T if turned else a, b.T
    if cut is not None:
        a, b, magnitude = _shared(a, b, magnitude, cut, factors.module.part, turned=turned)
    return HostFactors(factors.module.part, held(a), held(b), magnitude)


def _shared(
    a: Tensor, b: Tensor, magnitude: Tensor | None, cut: Cut, part: int | None, *, turned: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A rank's rows of the embedding (``turned``), inputs, or outputs."""
    rows = torch.cat([torch.arange(each.start, each.stop) for each in cut.rows_of(part)])
    if turned:
        return a[rows], b, magnitude
    if len(cut.columns) == cut.whole[1]:
        return a, b[:, rows], None if magnitude is None else magnitude[rows]
    if magnitude is not None:
        raise ModelError(
            "It has magnitudes (DoRA) of results that ranks add up, which is not supported; merge it, or use one rank."
        )
    return a[:, cut.columns.start : cut.columns.stop], b, None


def _is_finite(values: Tensor) -> bool:
    """All of them. A sum is where they are, but for large ones, and takes a tenth of the time."""
    return bool(torch.isfinite(values.sum(dtype=torch.float32))) or bool(torch.isfinite(values).all())
