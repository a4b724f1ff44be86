"""Codes of few bits, and scales by group: what the families share.

What lives here: unpacking, widening by scales and zeros, rounding activations. What may not: torch at import, layouts
of one family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.kernels.linear.packing import Codes, Coding

FP8_MAX = 448.0
_LEAST = 1e-10  # of a row's largest input: rows of zeros stay zeros


def coding_of(bits: int, group: int, **more: Any) -> Coding | None:
    """None where kernels have no groups of so many inputs."""
    from headrace.kernels.linear.packing import Coding, sets_of

    sets = sets_of(group)
    return None if sets is None else Coding(bits, sets, **more)


def codes_of(*parts: Any, **more: Any) -> Codes:
    """Codes, their scale, the inputs of one and what else there is."""
    from headrace.kernels.linear.packing import Codes

    return Codes(*parts, **more)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 words [..., w] as one stream of bits, lowest first: unsigned codes [..., w · 32 / bits], int32 (or
    int64)."""
    if 32 % bits == 0:
        codes = words.new_empty(*words.shape, 32 // bits)
        for index in range(32 // bits):
            codes[..., index] = (words >> (index * bits)) & (2**bits - 1)
        return codes.flatten(-2)
    count = -(-words.shape[-1] // bits) * bits  # so many words hold whole codes
    wide = words.new_zeros(*words.shape[:-1], count).long()
    wide[..., : words.shape[-1]] = words.long() & 0xFFFFFFFF
    wide = wide.view(*words.shape[:-1], -1, bits)
    codes = wide.new_empty(*wide.shape[:-1], 32)
    for index in range(32):
        word, shift = divmod(index * bits, 32)
        low, high = wide[..., word] >> shift, wide[..., min(word + 1, bits - 1)] << (32 - shift)
        codes[..., index] = (low | high) & (2**bits - 1)
    return codes.flatten(-2)


def nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """uint8 [..., n] → codes of 4 bits, [..., 2 n], uint8."""
    codes = packed.new_empty(*packed.shape, 2)
    codes[..., int(high_first)], codes[..., int(not high_first)] = packed & 15, packed >> 4
    return codes.flatten(-2)


def looked_up(codes: Tensor, table: Tensor) -> Tensor:
    return table[codes.int()]


def table_like(tensor: Tensor, values: Sequence[float]) -> Tensor:
    return tensor.new_tensor(values) if tensor.is_floating_point() else tensor.float().new_tensor(values)


def by_group(values: Tensor, scale: Tensor, zero: Tensor | None = None, *, size: int) -> Tensor:
    """(values - zero) · scale: ``values`` [n, ins], the others [n, groups] of ``size`` inputs each (the last may be
    shorter), float32."""
    ins = values.shape[-1]
    if scale.shape[-1] > 1 and ins % size:
        scale = scale.repeat_interleave(size, -1)[:, :ins]
        zero = None if zero is None else zero.repeat_interleave(size, -1)[:, :ins]
    elif scale.shape[-1] > 1:
        values, scale = values.unflatten(-1, (-1, size)), scale.unsqueeze(-1)
        zero = None if zero is None else zero.unsqueeze(-1)
    return ((values if zero is None else values - zero) * scale).view(-1, ins)


@dataclass(frozen=True, slots=True)
class Activations:
    """Inputs in 8 bits: rounded to a scale of their own row (or of ``group`` elements of it), or to a stored one
    (``static``).

    ``powers``: scales are powers of two. A dynamic scale "by tensor" is taken by row, too: finer, and the same in any
    company.
    """

    kind: str  # "fp8" or "int8"
    static: bool = False
    group: int = 0
    powers: bool = False

    @property
    def label(self) -> str:
        return (
            f"{self.kind} inputs" + (f" by {self.group}" if self.group else "") + (" (static)" if self.static else "")
        )

    def rounded(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """``scale``: the stored one."""
        import torch

        wide, most = x.float(), FP8_MAX if self.kind == "fp8" else 127.0
        if self.group:
            wide = wide.unflatten(-1, (-1, self.group))
        if scale is None:
            scale = wide.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / most
            if self.powers:
                scale = scale.log2().ceil().exp2()
        codes = wide / scale.float()
        codes = (
            codes.clamp(-most, most).to(torch.float8_e4m3fn).float()
            if self.kind == "fp8"
            else codes.round().clamp(-128, 127)
        )
        return (codes * scale.float()).view(x.shape).to(x.dtype)
