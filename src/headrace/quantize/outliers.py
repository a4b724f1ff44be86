"""Writes matrices in the formats of quant/outliers.py: which weights are stored separately.

What lives here: choosing outliers. What may not: the formats themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.quant import Format
from headrace.quantize.blocks import Inputs
from headrace.quantize.gptq import gptq, sensitivity
from headrace.quantize.grid import Grid, fit
from headrace.quantize.names import own_entry
from headrace.quantize.recipe import Recipe

SHARE = 0.01


@dataclass(frozen=True, slots=True)
class OutlierRecipe:
    """``layout``: "outlier-columns" with int8, or "sparse-outliers" with low-bit integers."""

    inner: Recipe
    name: str
    layout: str
    form: str = "headrace"

    @property
    def method(self) -> str:
        return self.inner.method

    @property
    def grid(self) -> Grid:
        return self.inner.grid

    def problem(self, outs: int, ins: int) -> str | None:
        return self.inner.problem(outs, ins)

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        if seen is None or not seen.count:  # an expert that no row came to
            seen = Inputs(
                1, torch.eye(weight.shape[1], device=weight.device), weight.abs().amax(0), weight.abs().amax(0)
            )
        return self._columns(weight, seen) if self.layout == "outlier-columns" else self._sparse(weight, seen)

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        return own_entry(self.layout, ignored, bits=self.grid.bits, group_size=self.grid.group, share=SHARE)

    def _columns(self, weight: Tensor, seen: Inputs) -> dict[str, Tensor]:
        index = seen.most.topk(math.ceil(weight.shape[1] * SHARE)).indices.sort().values.to(weight.device)
        rest = weight.index_fill(1, index, 0.0)
        found = fit(rest, self.grid)
        apart = {"outlier_index": index.cpu(), "outlier_weight": weight[:, index].to(self.grid.scales).cpu()}
        return self.inner.stored(found.codes(rest).cpu(), found) | apart

    def _sparse(self, weight: Tensor, seen: Inputs) -> dict[str, Tensor]:
        gram = seen.gram.to(weight.device)
        hurt = (fit(weight, self.grid, clip=True).rounded(weight) - weight).square() * sensitivity(gram)
        apart = torch.zeros_like(weight, dtype=torch.bool)
        apart.view(-1)[hurt.flatten().topk(max(1, int(weight.numel() * SHARE))).indices] = True
        left = torch.zeros_like(weight)
        codes, found = gptq(weight, gram, self.grid, apart=apart, left=left)
        tensors = {
            "outlier_rows": torch.nn.functional.pad(apart.sum(1).cumsum(0), (1, 0)).int().cpu(),
            "outlier_columns": apart.nonzero()[:, 1].int().cpu(),
            "outlier_values": left[apart].cpu(),
        }
        return self.inner.stored(codes.cpu(), found) | tensors
