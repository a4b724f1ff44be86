"""An adapter's factors in host memory, as slots take them.

What lives here: reading, checking values, folding the scale into the second factor. What may not: names, shapes
(peft.py has checked them), devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.lora.peft import Adapter, Factors
from headrace.models.checkpoint import DTYPES, MappedFiles
from headrace.models.safetensors_file import TensorEntry
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


def read_factors(adapter: Adapter, dtype: torch.dtype, *, pinned: bool) -> HostAdapter:
    """All of it. ``pinned``: where a device copies from it. Raises ModelError for values that are no numbers."""
    files, found = MappedFiles(), dict[str, tuple[HostFactors, ...]]()
    try:
        with torch.inference_mode():
            for each in adapter.factors:
                name = each.module.weight.name
                found[name] = (*found.get(name, ()), _read(files, each, dtype, pinned=pinned))
    finally:
        files.close()
    return MappingProxyType(found)


def _read(files: MappedFiles, factors: Factors, dtype: torch.dtype, *, pinned: bool) -> HostFactors:
    def tensor(entry: TensorEntry) -> Tensor:
        read = files.tensor(entry.file, DTYPES[entry.dtype], entry.start, entry.num_bytes).view(entry.shape).float()
        if not torch.isfinite(read).all():
            raise ModelError(f"{entry.file}: a factor of {factors.module.name} holds NaN or infinite values. Use another version of it.")
        return read

    def held(value: Tensor) -> Tensor:
        cast = value.to(dtype).contiguous()
        if not torch.isfinite(cast).all():
            raise ModelError(f"{factors.a.file}: a factor of {factors.module.name} is too large for {dtype}. Use --dtype float32.")
        return cast.pin_memory() if pinned else cast

    a, b = tensor(factors.a), tensor(factors.b) * factors.scale
    turned = factors.module.weight.role is Role.EMBEDDING
    magnitude = None if factors.magnitude is None else tensor(factors.magnitude)
    return HostFactors(factors.module.part, held(a.T if turned else a), held(b.T), magnitude)
