"""Writes experts in the format of quant/ternary.py.

What lives here: three levels per row, chosen so that errors compensate each other, and their words. What may not: the
code book.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.quant import Format
from headrace.quant.ternary import WORDS, book
from headrace.quantize.blocks import Inputs
from headrace.quantize.gptq import gptq
from headrace.quantize.grid import Grid, fit
from headrace.quantize.names import own_entry


@dataclass(frozen=True, slots=True)
class TernaryRecipe:
    method: str
    name: str = "qmoe"
    form: str = "headrace"
    layout: str = "ternary"
    grid: Grid = Grid(2, 0, kind="ternary")  # noqa: RUF009 - a frozen value

    def problem(self, outs: int, ins: int) -> str | None:
        return f"its {ins} inputs are not an even number" if ins % 2 else None

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        if self.method == "gptq" and seen is not None and seen.count:
            codes, found = gptq(weight, seen.gram.to(weight.device), self.grid)
        else:
            found = fit(weight, self.grid)
            codes = found.codes(weight)
        words, ends = encoded(codes.cpu().to(torch.int64))
        assert found.zero is not None
        return {
            "words": torch.stack([words & 255, words >> 8], 1).flatten().to(torch.uint8),
            "row_words": ends.int(),
            "levels": torch.cat([found.zero, found.scale], 1).cpu(),
            "shape": torch.tensor(weight.shape, dtype=torch.int64),
        }

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        return own_entry(self.layout, ignored)


def encoded(codes: Tensor) -> tuple[Tensor, Tensor]:
    """(words, words before each row and after the last) of -1, 0, 1 [outs, ins]: each word as long as the book allows,
    all rows at once."""
    following, pairs = book().following, (3 * codes[:, ::2] + codes[:, 1::2] + 4).T
    at, found, done = torch.full((len(codes),), WORDS), [], []
    for pair in pairs:
        longer = following[at, pair]
        full = longer < 0
        found.append(at)
        done.append(full)
        at = torch.where(full, following[WORDS, pair], longer)
    words = torch.stack([*found[1:], at], 1)
    ends = torch.stack([*done[1:], torch.ones_like(done[0])], 1)
    return words[ends], torch.nn.functional.pad(ends.sum(1).cumsum(0), (1, 0))
