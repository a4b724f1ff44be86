"""A matrix on a low-bit grid: one scale, and optionally one zero, for each group of inputs of an output.

What lives here: grids, fitting and rounding to nearest. What may not: calibration data, file layouts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.quant.codes import FP8_MAX
from headrace.quant.floats import E2M1

FP4_MAX = 6.0
_CLIPS = tuple(1.0 - 0.02 * step for step in range(1, 26))  # of the largest value, that are tried
_POWER = 2.4  # of the error that a clip is judged by: large ones count for more (as GPTQ's reference does)
_FP4 = E2M1[:8]
_BETWEEN = tuple((low + high) / 2 for low, high in itertools.pairwise(_FP4))
_MX_PLAIN = 6.0 / 8.0  # the largest value lies in [4, 8) of its power of two (OCP Microscaling formats, 2023)


@dataclass(frozen=True, slots=True)
class Grid:
    """``kind``: "int" of ``bits``, "fp8" (e4m3), or e2m1 with scales as MXFP4 or NVFP4 store them ("mxfp4", "nvfp4");
    "ternary": -1, 0, 1, where -1 stands for a row's ``zero`` and 1 for its ``scale``; "levels": 0 for a group's
    ``zero``, 1 for ``scale`` more.

    ``group``: inputs that share a scale, 0 for all of an output's; ``rows``: outputs, likewise. ``symmetric``: zero is
    a code in the middle; otherwise each group has its own zero. ``scales``: the type in which scales are stored.
    ``whole``: for NVFP4, the common factor of all scales of a matrix.
    """

    bits: int
    group: int = 128
    symmetric: bool = True
    kind: str = "int"
    rows: int = 1
    scales: torch.dtype = torch.bfloat16
    whole: float = 1.0

    @property
    def lowest(self) -> int:
        return -(1 << self.bits >> 1) if self.symmetric else 0

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits) - 1

    def size(self, ins: int) -> int:
        """Inputs per group."""
        return self.group or ins

    @property
    def most(self) -> float:
        """The largest code of a floating-point grid."""
        return FP8_MAX if self.kind == "fp8" else FP4_MAX

    def stored(self, scale: Tensor) -> Tensor:
        """Scales rounded to their stored type; 1 for groups of zeros."""
        if self.kind == "mxfp4":
            kept = scale.clamp(min=2.0**-126).log2().ceil().clamp(-127, 127).exp2()
        elif self.kind == "nvfp4":
            least = torch.finfo(torch.float8_e4m3fn).smallest_normal
            kept = (scale / self.whole).clamp(least, FP8_MAX).to(torch.float8_e4m3fn).float() * self.whole
        else:
            kept = scale.clamp(min=2.0**-24).to(self.scales).float()
        return torch.where(scale > 0, kept, torch.ones_like(scale) if self.kind != "nvfp4" else self.whole)


@dataclass(frozen=True, slots=True)
class Fit:
    """The position of a matrix's grid. ``scale`` [outs, groups], float32; ``zero`` likewise, whole numbers, for grids
    that have one."""

    grid: Grid
    scale: Tensor
    zero: Tensor | None

    def column(self, index: int) -> Fit:
        """The fit of a single input."""
        at = index // (self.grid.group or 2**31)
        return Fit(self.grid, self.scale[:, at : at + 1], None if self.zero is None else self.zero[:, at : at + 1])

    def codes(self, weight: Tensor) -> Tensor:
        """Nearest codes, float32 [outs, ins] (or of one column); for floating-point grids, their values."""
        if self.grid.kind == "ternary":
            assert self.zero is not None
            return (weight > self.scale / 2).float() - (weight < self.zero / 2).float()
        if self.grid.kind == "levels":
            assert self.zero is not None
            high = self._spread(self.zero + self.scale / 2, weight.shape[1])
            return (weight > high).float()
        scaled = weight / self._spread(self.scale, weight.shape[1])
        if self.grid.kind == "fp8":
            return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        if self.grid.kind != "int":
            return scaled.new_tensor(_FP4)[fp4_codes(scaled)].copysign(scaled)
        zero = 0 if self.zero is None else self._spread(self.zero, weight.shape[1])
        return (scaled.round() + zero).clamp(self.grid.lowest, self.grid.highest)

    def dense(self, codes: Tensor) -> Tensor:
        if self.grid.kind == "ternary":
            assert self.zero is not None
            return codes.clamp(min=0) * self.scale - codes.clamp(max=0) * self.zero
        zero = 0 if self.zero is None else self._spread(self.zero, codes.shape[1])
        if self.grid.kind == "levels":
            return codes * self._spread(self.scale, codes.shape[1]) + zero
        return (codes - zero) * self._spread(self.scale, codes.shape[1])

    def rounded(self, weight: Tensor) -> Tensor:
        return self.dense(self.codes(weight))

    def _spread(self, values: Tensor, ins: int) -> Tensor:
        return values if values.shape[1] == 1 else values.repeat_interleave(self.grid.size(ins), 1)[:, :ins]


def fp4_codes(values: Tensor) -> Tensor:
    """The index of the nearest of e2m1's eight magnitudes."""
    return torch.bucketize(values.abs(), values.new_tensor(_BETWEEN))


def fit(weight: Tensor, grid: Grid, *, clip: bool = False) -> Fit:
    """The grid for ``weight`` [outs, ins], float32: up to its largest values, or (``clip``) to where the rounding error
    is smallest."""
    plain = _MX_PLAIN if grid.kind == "mxfp4" else 1.0
    found = _fit(weight, grid, plain)
    if not clip or grid.kind in ("fp8", "ternary", "levels"):
        return found
    least = _errors(weight, found)
    for share in (1.0, 0.5) if grid.kind == "mxfp4" else _CLIPS:
        tried = _fit(weight, grid, share)
        errors = _errors(weight, tried)
        better = errors < least
        least = torch.where(better, errors, least)
        zero = None if found.zero is None or tried.zero is None else torch.where(better, tried.zero, found.zero)
        found = Fit(grid, torch.where(better, tried.scale, found.scale), zero)
    return found


def _fit(weight: Tensor, grid: Grid, share: float) -> Fit:
    groups = _by_group(weight, grid)
    if grid.kind == "ternary":
        return Fit(grid, weight.amax(1, keepdim=True).clamp(min=0.0), weight.amin(1, keepdim=True).clamp(max=0.0))
    if grid.kind == "levels":
        return _levels(groups, grid)
    if grid.kind != "int":
        return Fit(grid, grid.stored(_by_rows(groups.abs().amax(-1), grid) * share / grid.most), None)
    if grid.symmetric:
        return Fit(grid, grid.stored(groups.abs().amax(-1) * share * 2 / (2**grid.bits - 1)), None)
    low, high = groups.amin(-1).clamp(max=0.0) * share, groups.amax(-1).clamp(min=0.0) * share
    scale = grid.stored((high - low) / (2**grid.bits - 1))
    return Fit(grid, scale, (-low / scale).round().clamp(0, grid.highest))


def _levels(groups: Tensor, grid: Grid) -> Fit:
    """The two means that are nearest to all of a group (Lloyd 1982), from above and below its own mean."""
    between = groups.mean(-1, keepdim=True)
    for _ in range(8):
        above = groups > between
        count = above.sum(-1, keepdim=True)
        high = (groups * above).sum(-1, keepdim=True) / count.clamp(min=1)
        low = (groups * ~above).sum(-1, keepdim=True) / (groups.shape[-1] - count).clamp(min=1)
        high = torch.where(count > 0, high, low)
        between = (low + high) / 2
    low = low.squeeze(-1).to(grid.scales).float()
    return Fit(grid, (high.squeeze(-1) - low).clamp(min=0.0).to(grid.scales).float(), low)


def _by_rows(most: Tensor, grid: Grid) -> Tensor:
    """For each row, the largest value of the rows that share its scale. [outs, groups]"""
    if grid.rows == 1:
        return most
    blocks: Tensor = F.pad(most, (0, 0, 0, -len(most) % grid.rows)).unflatten(0, (-1, grid.rows)).amax(1)
    return blocks.repeat_interleave(grid.rows, 0)[: len(most)]


def _errors(weight: Tensor, found: Fit) -> Tensor:
    return _by_group((found.rounded(weight) - weight).abs().pow(_POWER), found.grid).sum(-1)


def _by_group(weight: Tensor, grid: Grid) -> Tensor:
    """[outs, groups, size], with the last group padded with zeros."""
    size = grid.size(weight.shape[1])
    groups: Tensor = F.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    return groups
