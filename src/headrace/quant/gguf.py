"""GGUF's blocks, held as the file has them: a matrix is rows of bytes, dequantised a few rows at a time.

What lives here: the types' names and sizes (torch-free), and the format. What may not: the container
(models/gguf_file.py), the arithmetic of each type (gguf_blocks.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.quant import Format, FormatError, StoredTensor, Tensors
from headrace.quant.codes import codes_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.linear.packing import Codes, Coding
    from headrace.quant.gguf_blocks import Parts

_TYPES = tomllib.loads(Path(__file__).with_name("gguf_types.toml").read_text(encoding="utf-8"))
# type → (elements, bytes, offsets of its float16 scales) of one block
BLOCKS: Mapping[str, tuple[int, int, tuple[int, ...]]] = {
    kind: (row["elements"], row["bytes"], tuple(row["halves"])) for kind, row in _TYPES.items()
}
# type → (bits of a code, inputs of one scale, whether shifts are added)
CODES: Mapping[str, tuple[int, int, bool]] = {
    kind: (row["bits"], row["group"], row["shifts"]) for kind, row in _TYPES.items()
}


@dataclass(frozen=True, slots=True)
class GGUFBlocks(Format):
    kind: str

    @property
    def label(self) -> str:
        return f"GGUF {self.kind}"

    @property
    def merges(self) -> bool:
        return True

    def problem(self, outs: int, ins: int) -> str | None:
        elements = BLOCKS[self.kind][0]
        return f"{ins} inputs are no whole blocks of {elements}" if ins % elements else None

    def tensors(self, outs: int, ins: int) -> tuple[StoredTensor, ...]:
        elements, size, _ = BLOCKS[self.kind]
        return (StoredTensor("weight", (outs, ins // elements * size), "uint8"),)

    def prepare(self, tensors: Tensors) -> Tensors:
        from headrace.quant import gguf_blocks

        blocks = tensors["weight"].view(-1, BLOCKS[self.kind][1])
        for offset in BLOCKS[self.kind][2]:
            if bad := int((~gguf_blocks.half(blocks, offset).isfinite()).sum()):
                raise FormatError(f"{bad} of {len(blocks)} blocks have a scale that is NaN or infinite")
        return tensors | gguf_blocks.tables(self.kind, tensors["weight"])

    def dense(self, tensors: Tensors, rows: Any, dtype: torch.dtype) -> Tensor:
        parts = self._parts(tensors, rows)
        return parts.dense(tensors.get("table")).reshape(len(tensors["weight"][rows]), -1).to(dtype)

    @property
    def coding(self) -> Coding | None:
        from headrace.kernels.linear.packing import Coding, Scales, sets_of

        bits, group, shifts = CODES[self.kind]
        scales = Scales.POWER if self.kind == "MXFP4" else Scales.BYTE if BLOCKS[self.kind][0] == 256 else Scales.HALF
        table = self.kind.startswith("IQ4")
        return Coding(bits, sets_of(group) or 1, floats=self.kind == "MXFP4", shifts=shifts, table=table, scales=scales)

    def codes(self, tensors: Tensors, rows: slice) -> Codes:
        parts, count = self._parts(tensors, rows), len(tensors["weight"][rows])

        def of_row(values: Tensor) -> Tensor:
            return values.reshape(count, -1)

        table, (_, group, _), size = tensors.get("table"), CODES[self.kind], BLOCKS[self.kind][0]
        codes, scale = of_row(parts.codes), of_row(parts.scale)
        shift = None if parts.shift is None else of_row(parts.shift)
        if parts.scales is None:
            return codes_of(codes, scale, group, shift, table=None if self.kind == "MXFP4" else table)
        large = (scale,) if shift is None else (scale, shift)
        shifts = None if parts.shifts is None else of_row(parts.shifts)
        return codes_of(codes, of_row(parts.scales), group, shifts, large=large, size=size, table=table)

    def _parts(self, tensors: Tensors, rows: Any) -> Parts:
        from headrace.quant import gguf_blocks

        return gguf_blocks.PARTS[self.kind](tensors["weight"][rows].reshape(-1, BLOCKS[self.kind][1]))

    def make_up(self, tensors: Tensors, seed: int) -> None:
        """Random codes under the same small scale, 2^-10 (or for MXFP4's exponents 2^-7)."""
        Format.make_up(self, tensors, seed)
        _, size, scales = BLOCKS[self.kind]
        blocks = tensors["weight"].view(-1, size)
        for offset in scales:
            blocks[:, offset], blocks[:, offset + 1] = 0, 0x14
        if self.kind == "MXFP4":
            blocks[:, 0] = 120
