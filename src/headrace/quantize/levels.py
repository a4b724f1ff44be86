"""One bit a weight: both levels of each group, and which of them each weight is on.

What lives here: the recipe. What may not: choosing levels and codes (grid.py, gptq.py), the format (quant/levels.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.quant import Format
from headrace.quantize.blocks import Inputs
from headrace.quantize.gptq import gptq
from headrace.quantize.grid import Grid, fit
from headrace.quantize.names import Choice, own_entry
from headrace.quantize.recipe import pack


@dataclass(frozen=True, slots=True)
class LevelsRecipe:
    method: str
    grid: Grid
    name: str = "w1a16"
    form: str = "headrace"
    layout: str = "two-levels"

    def problem(self, outs: int, ins: int) -> str | None:
        return (
            f"its {ins} inputs are not a multiple of {self.grid.group}, those in a group"
            if ins % self.grid.group
            else None
        )

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        if self.method == "gptq" and seen is not None and seen.count:
            codes, found = gptq(weight, seen.gram.to(weight.device), self.grid)
        else:
            found = fit(weight, self.grid)
            codes = found.codes(weight)
        assert found.zero is not None
        kept = {
            "weight_scale": found.scale.to(self.grid.scales).cpu(),
            "weight_low": found.zero.to(self.grid.scales).cpu(),
        }
        return {"weight_packed": pack(codes.cpu() - 1, 1), **kept}

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        return own_entry(self.layout, ignored, group_size=self.grid.group)


def levels_recipe(choice: Choice, *, group_size: int | None, asymmetric: bool) -> LevelsRecipe:
    """Levels are stored in float16, in which kernels hold them. Raises ConfigError."""
    if asymmetric or group_size not in (None, 32, 64, 128):
        raise ConfigError(
            "w1a16 has two levels for each 32, 64 or 128 inputs; give --group-size one of them, and no --asymmetric."
        )
    return LevelsRecipe(choice.method, Grid(1, group_size or 64, kind="levels", scales=torch.float16))
