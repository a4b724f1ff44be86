"""An adapter's factors in host memory, as a device takes them: packed into blocks.

What lives here: reading, checking values, folding the scale into the second factor. What may not: names, shapes
(peft.py has checked them), what lies where (layout.py), devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ModelError
from headrace.lora.layout import Layout, Run, pack
from headrace.lora.peft import Adapter, Factors
from headrace.models.checkpoint import DTYPES, MappedFiles
from headrace.models.safetensors_file import TensorEntry
from headrace.parallel.shares import Cut
from headrace.sites import Role
from headrace.spec import ADDRESS_UNIT


@dataclass(frozen=True, slots=True)
class HostModule:
    """Of one part of a weight: what of it is not in the image. ``magnitude`` [outs], float32."""

    weight: str
    part: int
    rank: int
    magnitude: Tensor | None


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """``image`` [blocks, elements]: a's rows, b's columns, scaled, and room for gains. ``columns`` of the slots' table
    get the address of unit ``units`` of block ``blocks``, each [n]. In one piece: pinning many small ones takes longer
    than reading them. ``num_blocks``: that it takes; a stage of a pipeline may fill fewer."""

    image: Tensor
    modules: tuple[HostModule, ...]
    columns: NDArray[np.int64]
    blocks: NDArray[np.int64]
    units: NDArray[np.int64]
    num_blocks: int

    def row(self, layout: Layout, held: NDArray[np.int64]) -> NDArray[np.int32]:
        """Of the table [columns], once its blocks are those ``held``. -1: there is nothing."""
        row = np.full(layout.columns, -1, dtype=np.int32)
        row[: layout.num_parts] = 0
        for module in self.modules:
            row[layout.by_name[module.weight].ranks + module.part] = module.rank
        row[self.columns] = held[self.blocks] * (layout.block // ADDRESS_UNIT) + self.units
        return row


def read_factors(
    adapter: Adapter,
    layout: Layout,
    dtype: torch.dtype,
    *,
    pinned: bool,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> HostAdapter:
    """What a layout has places for, or what of that belongs to a rank's ``cuts`` of weights, by name. ``pinned``: where
    a device copies from it. Raises ModelError for values that are no numbers."""
    named = [
        (each.module.weight.name, each.module.part or 0, each.rank, each.magnitude is not None)
        for each in adapter.factors
    ]
    runs, count = pack(layout.strips(named), layout.block)
    image = torch.zeros(count, layout.block, dtype=dtype, pin_memory=pinned)
    of_source: list[list[Run]] = [[] for _ in named]
    for run in runs:
        of_source[run.strip.source].append(run)
    files, modules = MappedFiles(), []
    try:
        with torch.inference_mode():
            for each, (name, part, rank, _), own in zip(adapter.factors, named, of_source, strict=True):
                if not own:
                    continue
                a, b, magnitude = _read(files, each, cuts.get(name))
                modules.append(HostModule(name, part, rank, magnitude))
                for run in own:
                    _fill(image, run, {"a": a, "b": b})
    finally:
        files.close()
    if not _is_finite(image):  # what was read is
        raise ModelError(f"{adapter.folder}: some of its factors are too large for {dtype}. Use --dtype float32.")
    nothing = np.zeros(0, dtype=np.int64)
    entries = [(nothing,) * 3, *map(_entries, runs)]
    columns, blocks, units = (np.concatenate(each) for each in zip(*entries, strict=True))
    return HostAdapter(image, tuple(modules), columns, blocks, units, layout.count_blocks(named))


def _fill(image: Tensor, run: Run, factors: Mapping[str, Tensor]) -> None:
    strip = run.strip
    if (factor := factors.get(strip.kind)) is None:
        return
    rows = factor[run.first : run.first + run.count, strip.first : strip.first + strip.length]
    room = image[run.block, run.at : run.at + run.count * run.width].view(run.count, run.width)
    room[:, : rows.shape[1]] = rows  # of ranks the last may have fewer tokens


def _entries(run: Run) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Columns, blocks and units of a run's rows."""
    each = np.arange(run.count)
    columns = run.strip.column + (run.first + each) * run.strip.step
    return columns, np.full(run.count, run.block), (run.at + each * run.width) // ADDRESS_UNIT


def _read(files: MappedFiles, factors: Factors, cut: Cut | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """a [rank, ins], b [rank, outs], scaled, and magnitudes [outs], float32."""

    def tensor(entry: TensorEntry) -> Tensor:
        read = files.tensor(entry.file, DTYPES[entry.dtype], entry.start, entry.num_bytes).view(entry.shape)
        if not _is_finite(read):
            raise ModelError(
                f"{entry.file}: a factor of {factors.module.name} holds NaN or infinite values. Use another version of it."
            )
        return read

    a, b = tensor(factors.a), (tensor(factors.b).float() * factors.scale).T
    magnitude = None if factors.magnitude is None else tensor(factors.magnitude).float()
    if cut is not None:
        turned = factors.module.weight.role is Role.EMBEDDING
        a, b, magnitude = _shared(a, b, magnitude, cut, factors.module.part, turned=turned)
    return a, b, magnitude


def _shared(
    a: Tensor, b: Tensor, magnitude: Tensor | None, cut: Cut, part: int | None, *, turned: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A rank's rows of the embedding (``turned``), inputs, or outputs."""
    rows = torch.cat([torch.arange(each.start, each.stop) for each in cut.rows_of(part)])
    if turned:
        return a[:, rows], b, magnitude
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
