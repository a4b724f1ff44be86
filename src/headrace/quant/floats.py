"""Weights in 4-bit floats: MXFP4 (the OCP Microscaling formats, 2023), NVFP4, and bitsandbytes' NF4 and FP4 (Dettmers
et al. 2023).

What lives here: those. What may not: configs (config.py), computing with 4-bit inputs: they stay in the type the model
computes in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, FormatError, StoredTensor, Tensors, check_scale
from headrace.quant.codes import by_group, codes_of, coding_of, looked_up, nibbles, table_like

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.linear.packing import Codes, Coding

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_GROUP, NV_GROUP = 32, 16


@dataclass(frozen=True, slots=True)
class MXFP4(Format):
    """w = code · 2^(exponent - 127), an exponent for each 32 inputs.

    ``blocks``: as gpt-oss stores experts, all in one tensor, [experts, outs, ins / 32, 16]; ``interleaved``: rows of
    gate and up take turns.
    """

    blocks: bool = False
    interleaved: bool = False

    @property
    def label(self) -> str:
        return "MXFP4"

    @property
    def merges(self) -> bool:
        return self.blocks

    def problem(self, outs: int, ins: int) -> str | None:
        return f"{ins} inputs are no whole groups of {MX_GROUP}" if ins % MX_GROUP else None

    def shares(self, *, by_inputs: bool) -> bool:
        return not self.blocks

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        groups = ins // MX_GROUP
        shape = (outs, groups, MX_GROUP // 2) if self.blocks else (outs, ins // 2)
        packed, scale = ("blocks", "scales") if self.blocks else ("weight_packed", "weight_scale")
        return StoredTensor("codes", shape, "uint8", (packed,)), StoredTensor(
            "scale", (outs, groups), "uint8", (scale,)
        )

    def prepare(self, tensors: Tensors) -> Tensors:
        if bool((tensors["scale"] == 255).any()):
            raise FormatError("scale holds NaN (an exponent of 255)")
        if self.interleaved:
            tensors = {
                name: tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) for name, tensor in tensors.items()
            }
        return tensors | {"table": table_like(tensors["scale"], E2M1)}

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        codes = nibbles(tensors["codes"][rows]).flatten(1)
        return by_group(
            looked_up(codes, tensors["table"]), (tensors["scale"][rows].float() - 127).exp2(), size=MX_GROUP
        ).to(dtype)

    @property
    def coding(self) -> Coding | None:
        from headrace.kernels.linear.packing import Coding, Scales

        return Coding(4, 4, floats=True, scales=Scales.POWER)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        return codes_of(nibbles(tensors["codes"][rows]).flatten(1), tensors["scale"][rows], MX_GROUP)

    def make_up(self, tensors: Tensors, seed: int) -> None:
        Format.make_up(self, tensors, seed)
        tensors["scale"].fill_(120)


@dataclass(frozen=True, slots=True)
class NVFP4(Format):
    """w = code · scale · global scale, an FP8 scale for each 16 inputs. ``inverse``: the global one is stored as what
    it divides by."""

    inverse: bool
    suffixes: tuple[str, str, str] = ("weight_packed", "weight_scale", "weight_global_scale")

    @property
    def label(self) -> str:
        return "NVFP4"

    def problem(self, outs: int, ins: int) -> str | None:
        return f"{ins} inputs are no whole groups of {NV_GROUP}" if ins % NV_GROUP else None

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        packed, scale, whole = self.suffixes
        return (
            StoredTensor("codes", (outs, ins // 2), "uint8", (packed,)),
            StoredTensor("scale", (outs, ins // NV_GROUP), "float8_e4m3fn", (scale,)),
            StoredTensor("whole", (), "float32", (whole,)),
        )

    def prepare(self, tensors: Tensors) -> Tensors:
        check_scale(tensors, "whole")
        check_scale(tensors, "scale", zeros=True)
        return tensors | {"table": table_like(tensors["whole"], E2M1)}

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        whole, codes = tensors["whole"], looked_up(nibbles(tensors["codes"][rows]), tensors["table"])
        scale = tensors["scale"][rows].float()
        return by_group(codes, scale / whole if self.inverse else scale * whole, size=NV_GROUP).to(dtype)

    @property
    def coding(self) -> Coding | None:
        from headrace.kernels.linear.packing import Coding, Scales

        return Coding(4, 8, floats=True, scales=Scales.FP8)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        scale, whole = tensors["scale"][rows], tensors["whole"].float()
        factor = (1 / whole if self.inverse else whole).expand(len(scale))
        return codes_of(nibbles(tensors["codes"][rows]), scale, NV_GROUP, factor=factor)

    @property
    def unit_scale(self) -> float:
        return 20.0 if self.inverse else 0.05


@dataclass(frozen=True, slots=True)
class NormalFloat(Format):
    """bitsandbytes' 4 bits: w = table[code] · largest of its block. ``nested``: the largest are 8-bit codes of blocks
    of their own."""

    kind: str  # "nf4" or "fp4"
    nested: bool
    block: int = 64
    nested_block: int = 256

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind.upper()}" + (", nested scales" if self.nested else "")

    def problem(self, outs: int, ins: int) -> str | None:
        return f"{ins} inputs are no whole blocks of {self.block}" if ins % self.block else None

    def shares(self, *, by_inputs: bool) -> bool:
        return False

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        nested = -(-outs * ins // self.block // self.nested_block)
        found = [
            StoredTensor("codes", (outs, ins // 2), "uint8", ("weight",), flat=True),
            StoredTensor(
                "absmax",
                (outs, ins // self.block),
                "uint8" if self.nested else "float32",
                ("weight.absmax",),
                flat=True,
            ),
            StoredTensor("table", (16,), "float32", ("weight.quant_map",)),
            StoredTensor("state", (-1,), "uint8", (f"weight.quant_state.bitsandbytes__{self.kind}",)),
        ]
        if self.nested:
            found.append(StoredTensor("nested_absmax", (nested,), "float32", ("weight.nested_absmax",)))
            found.append(StoredTensor("nested_table", (256,), "float32", ("weight.nested_quant_map",)))
        return tuple(found)

    def prepare(self, tensors: Tensors) -> Tensors:
        state, (outs, half) = _parsed(tensors.pop("state")), tensors["codes"].shape
        for name, wanted in {"quant_type": self.kind, "blocksize": self.block, "shape": [outs, 2 * half]}.items():
            if state.get(name) != wanted:
                raise FormatError(f"its quant_state says {name} {state.get(name)}, not {wanted}")
        check_scale(tensors, *(("nested_absmax", "nested_table") if self.nested else ("absmax",)), "table", zeros=True)
        if self.nested:
            offset, size = state.get("nested_offset"), state.get("nested_blocksize")
            if not isinstance(offset, int | float) or size != self.nested_block:
                raise FormatError(
                    f"its quant_state says nested_offset {offset} and nested_blocksize {size}, "
                    f"not a number and {self.nested_block}"
                )
            tensors["offset"] = tensors["table"].new_tensor(float(offset))
            check_scale(tensors, "offset", zeros=True)
        return tensors

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        codes = nibbles(tensors["codes"][rows], high_first=True)
        return by_group(looked_up(codes, tensors["table"]), self._absmax(tensors, rows), size=self.block).to(dtype)

    @property
    def coding(self) -> Coding | None:
        return coding_of(4, self.block, table=True)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        codes = nibbles(tensors["codes"][rows], high_first=True)
        return codes_of(codes, self._absmax(tensors, rows), self.block, table=tensors["table"])

    def _absmax(self, tensors: Tensors, rows: Any) -> Tensor:
        absmax = tensors["absmax"][rows]
        if not self.nested:
            return absmax
        large = tensors["nested_absmax"].repeat_interleave(self.nested_block)[: tensors["absmax"].numel()]
        return (
            looked_up(absmax, tensors["nested_table"]) * large.view(tensors["absmax"].shape)[rows] + tensors["offset"]
        )

    def make_up(self, tensors: Tensors, seed: int) -> None:
        Format.make_up(self, tensors, seed)
        said = {
            "quant_type": self.kind,
            "blocksize": self.block,
            "shape": [len(tensors["codes"]), 2 * tensors["codes"].shape[1]],
        }
        said |= {"nested_blocksize": self.nested_block, "nested_offset": 0.03} if self.nested else {}
        tensors["state"] = tensors["state"].new_tensor(list(json.dumps(said).encode()))
        tensors["table"].copy_(tensors["table"].new_tensor(range(-8, 8)) / 8)


def _parsed(state: Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(state.tolist()).rstrip(b"\0"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its quant_state is not JSON ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise FormatError("its quant_state is no JSON object")
    return found
