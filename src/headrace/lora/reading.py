"""An adapter's factors in host memory, as a device takes them: packed into blocks.

What lives here: reading, checking values, folding the scale into the second factor. What may not: names, shapes
(peft.py has checked them), what lies where (layout.py), devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import ModelError
from headrace.lora.layout import Layout, Run, pack
from headrace.lora.peft import Adapter, Factors
from headrace.lora.pinned import pinned_zeros
from headrace.models.checkpoint import DTYPES, MappedFiles
from headrace.models.safetensors_file import TensorEntry
from headrace.parallel.shares import Cut
from headrace.sites import Role
from headrace.spec import ADDRESS_UNIT

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_PIECE = 2**19  # numbers that are looked at together
_SPAN = 2**24  # bytes of a file that are converted together


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


Named = tuple[tuple[str, int, int, bool], ...]  # as Layout.strips has them


@dataclass(frozen=True, slots=True)
class Packing:
    """Where adapters lie that have the same modules and ranks: ``runs`` of each module, in ``count`` blocks. The rest as
    HostAdapter has it."""

    runs: tuple[tuple[Run, ...], ...]
    count: int
    block: int  # elements
    columns: NDArray[np.int64]
    blocks: NDArray[np.int64]
    units: NDArray[np.int64]
    num_blocks: int


def create_packing(layout: Layout, named: Named) -> Packing:
    runs, count = pack(layout.strips(named), layout.block)
    of_source: list[list[Run]] = [[] for _ in named]
    for run in runs:
        of_source[run.strip.source].append(run)
    nothing = np.zeros(0, dtype=np.int64)
    entries = [(nothing,) * 3, *map(_entries, runs)]
    columns, blocks, units = (np.concatenate(each) for each in zip(*entries, strict=True))
    return Packing(
        tuple(map(tuple, of_source)), count, layout.block, columns, blocks, units, layout.count_blocks(named)
    )


def read_factors(
    adapter: Adapter,
    packing: Callable[[Named], Packing],
    dtype: torch.dtype,
    *,
    pinned: bool,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
) -> HostAdapter:
    """What a layout has places for, or what of that belongs to a rank's ``cuts`` of weights, by name. ``pinned``: where
    a device copies from it. Raises ModelError for values that are no numbers."""
    named = tuple(
        (each.module.weight.name, each.module.part or 0, each.rank, each.magnitude is not None)
        for each in adapter.factors
    )
    packed = packing(named)
    shape = packed.count, packed.block
    image = pinned_zeros(*shape, dtype) if pinned else torch.zeros(shape, dtype=dtype)
    held = _whole(image)
    files, modules = MappedFiles(), []
    try:
        with torch.inference_mode():
            own = [each for each in zip(adapter.factors, named, packed.runs, strict=True) if each[2]]
            found = _numbers(
                files, [part for each, _, _ in own for part in ((each.a, 1.0), (each.b, each.scale))], dtype
            )
            for (each, (name, part, rank, _), runs), a, b in zip(own, found, found, strict=True):
                a, b, magnitude = _cut(files, each, a, b.T, cuts.get(name))
                modules.append(HostModule(name, part, rank, magnitude))
                for run in runs:
                    _fill(held, run, a, b)
            if not _is_finite(image):
                for each in adapter.factors:
                    _check(files, each, each.a, each.b)
                raise ModelError(
                    f"{adapter.folder}: some of its factors are too large for {dtype}. Use --dtype float32."
                )
    finally:
        files.close()
    return HostAdapter(image, tuple(modules), packed.columns, packed.blocks, packed.units, packed.num_blocks)


def _fill(held: NDArray[Any], run: Run, a: NDArray[Any], b: NDArray[Any]) -> None:
    strip = run.strip
    if strip.kind == "gains":
        return
    factor, at = a if strip.kind == "a" else b, run.at
    rows = factor[run.first : run.first + run.count, strip.first : strip.first + strip.length]
    place = held[run.block, at : at + run.count * run.width].reshape(run.count, run.width)
    place[:, : rows.shape[1]] = rows  # of ranks the last may have fewer tokens


def _entries(run: Run) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Columns, blocks and units of a run's rows."""
    each = np.arange(run.count)
    columns = run.strip.column + (run.first + each) * run.strip.step
    return columns, np.full(run.count, run.block), (run.at + each * run.width) // ADDRESS_UNIT


def _numbers(
    files: MappedFiles, wanted: Sequence[tuple[TensorEntry, float]], dtype: torch.dtype
) -> Iterator[NDArray[Any]]:
    """Each tensor times its scale as ``dtype``, in whole numbers of as many bits. Many are converted at once: a thread that
    asks torch for little things keeps the one that runs steps from the interpreter, some 20 ms for 14 MB."""
    for group in _neighbours(wanted):
        start, kind = min(entry.start for entry, _ in group), DTYPES[group[0][0].dtype]
        end = max(entry.start + entry.num_bytes for entry, _ in group)
        # by float32: torch converts 16 bits into other 16 bits one by one
        flat = _bytes(files, group[0][0].file, start, end, kind).to(torch.float32, copy=True)
        places = [
            slice((first := (entry.start - start) // kind.itemsize), first + math.prod(entry.shape))
            for entry, _ in group
        ]
        for (_, scale), place in zip(group, places, strict=True):
            if scale != 1:
                np.multiply(flat.numpy()[place], np.float32(scale), out=flat.numpy()[place])
        held = _whole(flat.to(dtype))
        yield from (held[place].reshape(entry.shape) for (entry, _), place in zip(group, places, strict=True))


def _neighbours(wanted: Iterable[tuple[TensorEntry, float]]) -> Iterator[list[tuple[TensorEntry, float]]]:
    """In their order; of one type, and within a span of the file."""
    group, first, last = list[tuple[TensorEntry, float]](), 0, 0
    for each in wanted:
        entry = each[0]
        low, high = min(first, entry.start), max(last, entry.start + entry.num_bytes)
        alike = group and entry.dtype == group[0][0].dtype and (entry.start - first) % DTYPES[entry.dtype].itemsize == 0
        if not alike or high - low > _SPAN:
            if group:
                yield group
            group, low, high = [], entry.start, entry.start + entry.num_bytes
        group.append(each)
        first, last = low, high
    if group:
        yield group


def _cut(
    files: MappedFiles, factors: Factors, a: NDArray[Any], b: NDArray[Any], cut: Cut | None
) -> tuple[NDArray[Any], NDArray[Any], Tensor | None]:
    """a [rank, ins], b [rank, outs] and magnitudes [outs], float32, or a rank's part. Raises ModelError for what is no
    number and would not be seen in the image."""
    magnitude = None if factors.magnitude is None else _tensor(files, factors.magnitude).float()
    if factors.magnitude is not None:
        _check(files, factors, factors.magnitude)
    if cut is None:
        return a, b, magnitude
    _check(files, factors, factors.a, factors.b)  # others have the rest
    rows = np.concatenate([np.arange(each.start, each.stop) for each in cut.rows_of(factors.module.part)])
    if factors.module.weight.role is Role.EMBEDDING:
        return a[:, rows], b, magnitude
    if len(cut.columns) == cut.whole[1]:
        return a, b[:, rows], None if magnitude is None else magnitude[rows]
    if magnitude is not None:
        raise ModelError(
            "It has magnitudes (DoRA) of results that ranks add up, which is not supported; merge it, or use one rank."
        )
    return a[:, cut.columns.start : cut.columns.stop], b, None


def _whole(tensor: Tensor) -> NDArray[Any]:
    """Its bits as whole numbers: numpy, unlike torch, keeps the interpreter while it only looks."""
    return tensor.view(_WHOLE[tensor.itemsize]).numpy()


def _tensor(files: MappedFiles, entry: TensorEntry) -> Tensor:
    found = _bytes(files, entry.file, entry.start, entry.start + entry.num_bytes, DTYPES[entry.dtype])
    return found.view(entry.shape)


def _bytes(files: MappedFiles, file: Path, start: int, end: int, kind: torch.dtype) -> Tensor:
    held = files.whole(file)[start:end]
    return (held if start % kind.itemsize == 0 else held.clone()).view(kind)


def _check(files: MappedFiles, factors: Factors, *entries: TensorEntry) -> None:
    for entry in entries:
        if not _is_finite(_tensor(files, entry)):
            raise ModelError(
                f"{entry.file}: a factor of {factors.module.name} holds NaN or infinite values. Use another version of it."
            )


def _is_finite(values: Tensor) -> bool:
    """All of them: what is not has all bits of its exponent, which without the sign makes the largest numbers. In
    pieces that a core's cache holds, this takes a fifth of a sum's time."""
    numbers = _whole(values.reshape(-1)).view(f"u{values.itemsize}")
    largest = _whole(torch.tensor(torch.finfo(values.dtype).max, dtype=values.dtype)).item()
    pieces = (numbers[at : at + _PIECE] for at in range(0, len(numbers), _PIECE))
    return all(int(np.left_shift(piece, 1).max()) <= 2 * largest for piece in pieces)
