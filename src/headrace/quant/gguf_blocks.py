"""What GGUF's blocks mean: one function a type, from bytes to numbers, after ggml's definitions.

What lives here: those, in plain torch. What may not: files, choosing. Every function maps uint8 [blocks, bytes] to
``Parts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Parts:
    """w = scale · ``scales`` · (code - ``middle``), or of the code's entry in a table, + shift · ``shifts``."""

    codes: Tensor  # [blocks, elements], uint8
    scale: Tensor  # [blocks, 1], float32; of MXFP4 an exponent, uint8
    middle: int = 0
    scales: Tensor | None = None  # [blocks, groups], int8
    shift: Tensor | None = None  # [blocks, 1], float32
    shifts: Tensor | None = None  # [blocks, groups], int8

    def dense(self, table: Tensor | None) -> Tensor:
        """[blocks, elements], float32"""
        groups = 1 if self.scales is None else self.scales.shape[1]
        values: Tensor = self.codes.float() - self.middle if table is None else table[self.codes.int()]
        wide: Tensor = values.unflatten(-1, (groups, -1)) * _of_group(self.scale, self.scales)
        return (wide if self.shift is None else wide + _of_group(self.shift, self.shifts)).flatten(1)


def _of_group(large: Tensor, small: Tensor | None) -> Tensor:
    wide = (large.float() - 128).exp2() if large.dtype is torch.uint8 else large
    return (wide if small is None else wide * small.float()).unsqueeze(-1)


def tables(kind: str, like: Tensor) -> dict[str, Tensor]:
    """Values by code, where codes are no numbers: made once, since captured steps copy nothing from the host."""
    values = {"IQ4_NL": _IQ4, "IQ4_XS": _IQ4, "MXFP4": _E2M1_TWICE}.get(kind)
    return {} if values is None else {"table": torch.tensor(values, dtype=torch.float32, device=like.device)}


def half(blocks: Tensor, offset: int) -> Tensor:
    """A float16 of each block, [blocks, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _low_high(packed: Tensor) -> Tensor:
    """[..., n] → [..., 2 n]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth(blocks: Tensor, offset: int) -> Tensor:
    """32 bits of each block, as what they add to 4-bit codes, [blocks, 32]."""
    packed = blocks[:, offset : offset + 4].unsqueeze(-1)
    bits = torch.stack([packed[..., 0] >> shift & 1 for shift in range(8)], -1)
    return bits.flatten(1) << 4


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_low_high(blocks[:, 2:]), half(blocks, 0), 8)


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_low_high(blocks[:, 4:]), half(blocks, 0), shift=half(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_low_high(blocks[:, 6:]) | _fifth(blocks, 2), half(blocks, 0), 16)


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(_low_high(blocks[:, 8:]) | _fifth(blocks, 4), half(blocks, 0), shift=half(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(blocks[:, 2:] ^ 128, half(blocks, 0), 128)


def _two_bits(packed: Tensor) -> Tensor:
    """[blocks, 64] → codes [blocks, 256]: of each half of 32 bytes first the lowest pairs of bits, then the next."""
    halves = packed.unflatten(-1, (2, 32))
    return torch.stack([halves >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(1)


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16].view(torch.int8)
    return Parts(_two_bits(blocks[:, 16:80]), half(blocks, 80), 0, scales & 15, -half(blocks, 82), scales >> 4 & 15)


def _q3_k(blocks: Tensor) -> Parts:
    third = torch.stack([blocks[:, :32] >> shift & 1 for shift in range(8)], 1).flatten(1)
    packed = blocks[:, 96:108]
    low, high = _low_high(packed[:, :8]), torch.cat([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    return Parts(_two_bits(blocks[:, 32:96]) | third << 2, half(blocks, 108), 4, (low | high << 4).to(torch.int8) - 32)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes of each block → 8 scales and 8 minima of 6 bits."""
    first, second, both = packed.unflatten(-1, (3, 4)).unbind(1)
    scale = torch.cat((first & 63, (both & 15) | (first >> 6) << 4), -1)
    least = torch.cat((second & 63, both >> 4 | (second >> 6) << 4), -1)
    return scale.to(torch.int8), least.to(torch.int8)


def _by_sixths(blocks: Tensor, codes: Tensor) -> Parts:
    scales, least = _six_bit_scales(blocks[:, 4:16])
    return Parts(codes.flatten(1), half(blocks, 0), 0, scales, -half(blocks, 2), least)


def _q4_k(blocks: Tensor) -> Parts:
    return _by_sixths(blocks, _low_high(blocks[:, 16:].unflatten(-1, (4, 32))))


def _q5_k(blocks: Tensor) -> Parts:
    low = _low_high(blocks[:, 48:].unflatten(-1, (4, 32))).reshape(len(blocks), 8, 32)
    fifth = torch.stack([blocks[:, 16:48] >> shift & 1 for shift in range(8)], 1)
    return _by_sixths(blocks, low | fifth << 4)


def _q6_k(blocks: Tensor) -> Parts:
    low = _low_high(blocks[:, :128].unflatten(-1, (2, 64))).reshape(len(blocks), 2, 4, 32)
    high = torch.stack([blocks[:, 128:192].unflatten(-1, (2, 32)) >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    return Parts((low | high << 4).flatten(1), half(blocks, 208), 32, blocks[:, 192:208].view(torch.int8))


def _iq4_nl(blocks: Tensor) -> Parts:
    return Parts(_low_high(blocks[:, 2:]), half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Parts:
    high = torch.stack([blocks[:, 2 + index // 4] >> 2 * (index % 4) & 3 for index in range(8)], -1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).flatten(1)
    codes = _low_high(blocks[:, 8:].unflatten(-1, (8, 16))).flatten(1)
    return Parts(codes, half(blocks, 0), 0, (low | high << 4).to(torch.int8) - 32)


def _mxfp4(blocks: Tensor) -> Parts:
    return Parts(_low_high(blocks[:, 1:]), blocks[:, :1])


PARTS: Mapping[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
