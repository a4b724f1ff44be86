"""Writes bfloat16 matrices in the format of quant/dfloat11.py.

What lives here: encoding. What may not: the code itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.quant import Format
from headrace.quant.dfloat11 import canonical, code_lengths
from headrace.quantize.blocks import Inputs
from headrace.quantize.grid import Grid
from headrace.quantize.names import own_entry


@dataclass(frozen=True, slots=True)
class LosslessRecipe:
    name: str = "dfloat11"
    form: str = "headrace"
    layout: str = "dfloat11"
    method: str = "rtn"
    grid: Grid = Grid(16)  # noqa: RUF009 - a frozen value

    def problem(self, outs: int, ins: int) -> str | None:
        return None

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        narrow = weight.cpu().to(torch.bfloat16)
        if not torch.equal(narrow.float(), weight.cpu()):
            raise ConfigError(
                "--format dfloat11 is lossless for bfloat16 only, and this model has weights of more bits; give another."
            )
        return encoded(narrow)

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        return own_entry(self.layout, ignored)


def encoded(weight: Tensor) -> dict[str, Tensor]:
    """``weight`` [outs, ins], bfloat16."""
    bits = weight.contiguous().view(torch.int16).int() & 0xFFFF
    exponents = (bits >> 7 & 255).flatten()
    lengths = code_lengths(exponents.bincount(minlength=256).tolist())
    sizes, codes = torch.tensor(lengths), torch.zeros(256, dtype=torch.int64)
    for exponent, code in canonical(lengths):
        codes[exponent] = code
    own = sizes[exponents]
    ends = own.cumsum(0)
    places = torch.arange(int(ends[-1])) - (ends - own).repeat_interleave(own)
    stream = (codes[exponents].repeat_interleave(own) >> (own.repeat_interleave(own) - 1 - places)) & 1
    octets = torch.nn.functional.pad(stream, (0, -len(stream) % 8)).view(-1, 8) << torch.arange(7, -1, -1)
    return {
        "sign_mantissa": (bits >> 8 & 128 | bits & 127).to(torch.uint8),
        "encoded_exponent": octets.sum(1).to(torch.uint8),
        "row_starts": (ends - own).view(weight.shape)[:, 0].clone(),
        "code_lengths": sizes.to(torch.uint8),
    }
