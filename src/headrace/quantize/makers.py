"""Selects the maker of matrices for the requested format, and makes those of formats that only this project reads.

What lives here: that choice; what is kept whole beside integers (quant/outliers.py), bfloat16 without loss
(quant/dfloat11.py), experts of three levels (quant/ternary.py), one bit a weight: both levels of each group, and which
of them each weight is on (quant/integers.py). What may not: the formats themselves, grids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.quant import Format
from headrace.quant.dfloat11 import canonical, code_lengths
from headrace.quant.ternary import WORDS, book
from headrace.quantize.blocks import Inputs, gram_of
from headrace.quantize.gguf_recipe import gguf_recipe
from headrace.quantize.gptq import chosen, gptq, sensitivity
from headrace.quantize.grid import Grid, fit
from headrace.quantize.layer import Maker
from headrace.quantize.names import Choice, is_gguf
from headrace.quantize.recipe import Recipe, pack, recipe_for
from headrace.spec import DecoderSpec


class LevelsRecipe(Maker):
    def problem(self, outs: int, ins: int) -> str | None:
        size = self.grid.group
        return f"its {ins} inputs are not a multiple of {size}, those in a group" if ins % size else None

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        codes, found = chosen(weight, gram_of(seen, weight.device), self.grid, self.method)
        assert found.zero is not None
        scale, low = (each.to(self.grid.scales).cpu() for each in (found.scale, found.zero))
        return {"weight_packed": pack(codes.cpu() - 1, 1), "weight_scale": scale, "weight_low": low}

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        return Maker.entry(self, ignored) | {"group_size": self.grid.group}


def levels_recipe(choice: Choice, *, group_size: int | None, asymmetric: bool) -> LevelsRecipe:
    """Levels are stored in float16, in which kernels hold them. Raises ConfigError."""
    if asymmetric or group_size not in (None, 32, 64, 128):
        raise ConfigError(
            "w1a16 has two levels for each 32, 64 or 128 inputs; give --group-size one of them, and no --asymmetric."
        )
    grid = Grid(1, group_size or 64, kind="levels", scales=torch.float16)
    return LevelsRecipe("w1a16", choice.method, "two-levels", grid)


SHARE = 0.01  # of the weights are outliers, or of the columns
_LAYOUTS = {"int8-outliers": "outlier-columns", "spqr": "sparse-outliers"}


@dataclass(frozen=True, slots=True)
class OutlierRecipe(Maker):
    """``layout``: "outlier-columns" with int8, or "sparse-outliers" with low-bit integers."""

    inner: Recipe = field(kw_only=True)

    def problem(self, outs: int, ins: int) -> str | None:
        return self.inner.problem(outs, ins)

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        if seen is None or not seen.count:  # an expert that no row came to
            largest = weight.abs().amax(0)
            seen = Inputs(1, torch.eye(weight.shape[1], device=weight.device), largest, largest)
        return self._columns(weight, seen) if self.layout == "outlier-columns" else self._sparse(weight, seen)

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        how = {"bits": self.grid.bits, "group_size": self.grid.group, "share": SHARE}
        return Maker.entry(self, ignored) | how

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


class LosslessRecipe(Maker):
    """bfloat16, each exponent in as many bits as it is rare."""

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        narrow = weight.cpu().to(torch.bfloat16)
        if not torch.equal(narrow.float(), weight.cpu()):
            raise ConfigError(
                "--format dfloat11 is lossless for bfloat16 only, and this model has weights of more bits; give another."
            )
        return huffman_coded(narrow)


def huffman_coded(weight: Tensor) -> dict[str, Tensor]:
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


class TernaryRecipe(Maker):
    """Three levels per row, chosen so that errors compensate each other."""

    def problem(self, outs: int, ins: int) -> str | None:
        return f"its {ins} inputs are not an even number" if ins % 2 else None

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        codes, found = chosen(weight, gram_of(seen, weight.device), self.grid, self.method)
        words, ends = ternary_words(codes.cpu().to(torch.int64))
        assert found.zero is not None
        return {
            "words": torch.stack([words & 255, words >> 8], 1).flatten().to(torch.uint8),
            "row_words": ends.int(),
            "levels": torch.cat([found.zero, found.scale], 1).cpu(),
            "shape": torch.tensor(weight.shape, dtype=torch.int64),
        }


def ternary_recipe(method: str) -> TernaryRecipe:
    return TernaryRecipe("qmoe", method, "ternary", Grid(2, 0, kind="ternary"))


def ternary_words(codes: Tensor) -> tuple[Tensor, Tensor]:
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


def maker_for(
    choice: Choice,
    *,
    group_size: int | None,
    asymmetric: bool,
    scales: torch.dtype,
    spec: DecoderSpec | None = None,
) -> Maker:
    """``spec``: of the model, for GGUF; ``scales``: the type in which the model is stored. Raises ConfigError."""
    if choice.form in ("dfloat11", "qmoe") or is_gguf(choice.form):
        if group_size is not None or asymmetric:
            raise ConfigError(
                f"--group-size and --asymmetric are for low-bit integers, and {choice.form} has its own format; leave them out."
            )
        if is_gguf(choice.form):
            assert spec is not None, "which matrix gets which type depends on it"
            return gguf_recipe(choice, spec)
        if choice.form == "qmoe":
            return ternary_recipe(choice.method)
        if scales is not torch.bfloat16:
            raise ConfigError(
                f"--format dfloat11 holds bfloat16, and this model is stored in {str(scales).removeprefix('torch.')}; give another."
            )
        return LosslessRecipe("dfloat11", "rtn", "dfloat11", Grid(16))
    if choice.form == "w1a16":
        return levels_recipe(choice, group_size=group_size, asymmetric=asymmetric)
    recipe = recipe_for(choice, group_size=group_size, asymmetric=asymmetric, scales=scales)
    layout = _LAYOUTS.get(choice.form)
    return recipe if layout is None else OutlierRecipe(choice.form, recipe.method, layout, recipe.grid, inner=recipe)
