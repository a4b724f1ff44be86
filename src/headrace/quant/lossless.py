"""bfloat16 in 12 bits without loss: a fixed length for almost all, as DFloat11 (Zhang et al. 2025) has a variable one.

What lives here: the format. What may not: its layout and mathematics (kernels/cpu). It is not found in checkpoints:
plain weights are brought into it once they are loaded, where ``compressed_weights`` asks for it and this machine
computes with it.
"""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BITS = 12.05  # 12, and a few groups whose exponents lie far apart
_DEPTH, _ROWS = 4, 16  # inputs and outputs of what is compressed together


@dataclass(frozen=True, slots=True)
class Lossless(Format):
    @property
    def label(self) -> str:
        return "12 bits, lossless"

    @property
    def merges(self) -> bool:
        return True

    def problem(self, outs: int, ins: int) -> str | None:
        return f"{ins} inputs are no multiple of {_DEPTH}" if ins % _DEPTH else None

    def num_bytes(self, outs: int, ins: int, element_bytes: float) -> float:
        return -(-outs // _ROWS) * _ROWS * ins * _BITS / 8

    def prepare(self, tensors: Tensors) -> Tensors:
        from headrace.kernels.linear.compressed import compress

        return dict(compress(_library(), tensors["weight"]).tensors)

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        from headrace.kernels.linear.compressed import CompressedWeight, decompress

        panels, groups, _ = tensors["panels"].shape
        first, last, _ = rows.indices(panels * _ROWS)
        return decompress(_library(), CompressedWeight.of(panels * _ROWS, groups * _DEPTH, tensors), first, last).to(
            dtype
        )

    @property
    def by_row(self) -> bool:
        return False


def missing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why weights of this type are not held so on this device."""
    from headrace.kernels.build.c_compiler import native_library
    from headrace.kernels.linear.compressed import missing as without

    if device.type != "cpu" or str(dtype) != "torch.bfloat16":
        return f"holds bfloat16 on a CPU, not {str(dtype).removeprefix('torch.')} on {device.type}"
    return without(native_library())


def _library() -> CDLL:
    from headrace.kernels.build.c_compiler import native_library
    from headrace.kernels.candidate import Declined

    native = native_library()
    assert not isinstance(native, Declined), "held so only where this machine computes with it"
    return native.library
