"""The compressed-tensors formats that ``headrace quantize`` writes, and that vLLM, transformers and Headrace read.

What lives here: which grid a format means, how its tensors and its entry in config.json are written. What may not:
choosing codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.quant import Format
from headrace.quant.codes import FP8_MAX
from headrace.quant.rotated import rotated
from headrace.quantize.blocks import Inputs, gram_of
from headrace.quantize.gptq import chosen
from headrace.quantize.grid import FP4_MAX, Fit, Grid, fp4_codes
from headrace.quantize.layer import Maker
from headrace.quantize.names import Choice

BLOCK = 128  # of FP8: outputs, and inputs, with a scale in common
ROTATION = 32  # inputs that are rotated together
_LAYOUTS = {"mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized", "fp8": "float-quantized"}


@dataclass(frozen=True, slots=True)
class Recipe(Maker):
    """``inputs``: what GEMMs round their inputs to, row by row: "", "int" or "float" of 8 bits; ``static``: with one
    fixed scale. ``packed``: codes share words of 32 bits. ``rotation``: how many input channels are rotated together,
    0: none."""

    inputs: str = ""
    static: bool = False
    packed: bool = False
    rotation: int = 0

    def problem(self, outs: int, ins: int) -> str | None:
        for size, whose in ((self.grid.group, "in a group"), (self.rotation, "rotated together")):
            if size and ins % size:
                return f"its {ins} inputs are not a multiple of {size}, those {whose}"
        words = 32 // self.grid.bits if 32 % self.grid.bits == 0 else 32
        if self.packed and (ins % words or (not self.grid.symmetric and outs % words)):
            return f"its shape, {outs} × {ins}, is not a multiple of {words}"
        return None

    # --- one matrix

    def made(self, weight: Tensor, seen: Inputs | None, most: float, form: Format) -> dict[str, Tensor]:
        grid = replace(self.grid, whole=most / FP8_MAX / FP4_MAX or 1.0) if self.grid.kind == "nvfp4" else self.grid
        gram = gram_of(seen, weight.device)
        if self.rotation:
            weight = rotated(weight, self.rotation)
            gram = None if gram is None else rotated(rotated(gram, self.rotation).T, self.rotation)
        codes, found = chosen(weight, gram, grid, self.method)
        return self.stored(codes, found) | self._input_scale(seen)

    def stored(self, codes: Tensor, found: Fit) -> dict[str, Tensor]:
        """``codes`` [outs, ins]."""
        grid, scale = found.grid, found.scale
        if grid.kind in ("mxfp4", "nvfp4"):
            packed = _nibbles(fp4_codes(codes) + 8 * codes.signbit())
            if grid.kind == "mxfp4":
                return {"weight_packed": packed, "weight_scale": (scale.log2() + 127).to(torch.uint8)}
            kept = (scale / grid.whole).to(torch.float8_e4m3fn)
            return {
                "weight_packed": packed,
                "weight_scale": kept,
                "weight_global_scale": torch.tensor([1 / grid.whole]),
            }
        middle = 0 if grid.symmetric else 2 ** (grid.bits - 1)
        tensors = {"weight_scale": scale[:: grid.rows].to(grid.scales)}
        if not self.packed:
            return {"weight": (codes - middle).to(torch.float8_e4m3fn if grid.kind == "fp8" else torch.int8), **tensors}
        tensors |= {
            "weight_packed": pack(codes - middle, grid.bits),
            "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if found.zero is not None:
            tensors["weight_zero_point"] = pack((found.zero - middle).T, grid.bits).T.contiguous()
        return tensors

    def _input_scale(self, seen: Inputs | None) -> dict[str, Tensor]:
        if not self.static:
            return {}
        most = float(seen.most.max()) if seen is not None and seen.count else 0.0
        return {"input_scale": torch.tensor([most / FP8_MAX or 1.0]).to(self.grid.scales)}

    # --- config.json

    def entry(self, ignored: Sequence[str]) -> dict[str, Any]:
        grid = self.grid
        strategy: dict[str, Any] = (
            {"strategy": "group", "group_size": grid.group} if grid.group else {"strategy": "channel"}
        )
        if grid.rows > 1:
            strategy = {"strategy": "block", "block_structure": [grid.rows, grid.group]}
        elif grid.kind == "nvfp4":
            strategy["strategy"] = "tensor_group"
        kind = "int" if grid.kind == "int" else "float"
        weights = {"num_bits": grid.bits, "type": kind, "symmetric": grid.symmetric, "dynamic": False, **strategy}
        if grid.kind in ("mxfp4", "nvfp4"):
            weights["scale_dtype"] = "torch.uint8" if grid.kind == "mxfp4" else "torch.float8_e4m3fn"
        group = {
            "targets": ["Linear"], "weights": weights, "input_activations": self._input_entry(), "output_activations": None,
            # some readers guess it from the rest where it does not stand here, and guess wrong for wNa8
            "format": self.layout,
        }  # fmt: skip
        return {
            **Maker.entry(self, ignored),
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "kv_cache_scheme": None,
            **({"transform_config": self._rotations(ignored)} if self.rotation else {}),
        }

    def _input_entry(self) -> dict[str, Any] | None:
        if not self.inputs:
            return None
        entry = {"num_bits": 8, "type": self.inputs, "symmetric": True, "dynamic": not self.static}
        if self.grid.rows > 1:
            return {**entry, "strategy": "group", "group_size": self.grid.group}
        return {**entry, "strategy": "tensor" if self.static else "token"}

    def _rotations(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Inputs are rotated while the model computes; weights already are."""
        apply = [
            {"targets": ["Linear"], "location": "input", "inverse": False, "ignore": list(ignored)},
            {"targets": ["Linear"], "location": "weight_input", "inverse": True, "ignore": list(ignored)},
        ]
        how = {"randomize": False, "requires_grad": False, "head_dim": self.rotation, "precision": "torch.float32"}
        scheme = {"type": "hadamard", "apply": apply, **how}
        return {"config_groups": {"blocks": scheme}}


def recipe_for(choice: Choice, *, group_size: int | None, asymmetric: bool, scales: torch.dtype) -> Recipe:
    """Raises ConfigError."""
    grid, how = _forms(choice)
    layout = "pack-quantized" if "packed" in how else _LAYOUTS.get(grid.kind, "int-quantized")
    recipe = Recipe(choice.form, choice.method, layout, grid, "compressed-tensors", **how)
    if choice.method == "mr-gptq":
        recipe = replace(recipe, rotation=ROTATION)
    if (group_size is not None or asymmetric) and not recipe.packed:
        raise ConfigError(
            f"--group-size and --asymmetric are for low-bit integers, and {choice.form} has its own format; leave them out."
        )
    grid = replace(recipe.grid, symmetric=not asymmetric, scales=scales)
    if group_size is not None:
        if group_size not in (0, 32, 64, 128):
            raise ConfigError(f"--group-size is {group_size}; give 32, 64 or 128, or 0 for one scale per output.")
        grid = replace(grid, group=group_size)
    return replace(recipe, grid=grid)


def _forms(choice: Choice) -> tuple[Grid, dict[str, Any]]:
    """And what else the recipe has."""
    match choice.form:
        case "fp8" | "fp8-static":
            return Grid(8, 0, kind="fp8"), {"inputs": "float", "static": choice.form == "fp8-static"}
        case "fp8-block":
            return Grid(8, BLOCK, kind="fp8", rows=BLOCK), {"inputs": "float"}
        case "w8a8" | "int8-outliers":
            return Grid(8, 0), {"inputs": "int"}
        case "spqr":
            return Grid(3, 64), {"packed": True}
        case "mxfp4":
            return Grid(4, 32, kind="mxfp4"), {}
        case "nvfp4":
            return Grid(4, 16, kind="nvfp4"), {}
    inputs = "int" if choice.rounds_inputs else ""
    return Grid(choice.bits, 0 if choice.bits == 8 else 128), {"inputs": inputs, "packed": True}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Signed codes [n, m] into int32 words [n, ⌈m · bits / 32⌉]: one bit stream per row, each code from its lowest bit
    up."""
    unsigned = codes.to(torch.int64) + 2 ** (bits - 1)
    if 32 % bits == 0 and unsigned.shape[1] * bits % 32 == 0:  # whole codes in each word
        parts, step = unsigned.unflatten(1, (-1, 32 // bits)), bits
    else:
        stream = (unsigned[..., None] >> torch.arange(bits, device=codes.device) & 1).flatten(1)
        parts, step = torch.nn.functional.pad(stream, (0, -stream.shape[1] % 32)).unflatten(1, (-1, 32)), 1
    words = (parts << torch.arange(0, 32, step, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits, [n, m] → [n, m / 2] bytes, the first in the lower half."""
    pairs: Tensor = codes.to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
