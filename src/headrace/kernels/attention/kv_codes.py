"""Keys and values in 8 and 4 bits, in plain torch: what codes and scales mean, and which of them a number becomes.

What lives here: encoding and decoding, the oracle of every kernel that writes or reads such a cache. What may not:
rotary embedding, attention, names on disk.

    a head's part of a block, uint8 | codes of token 0 | … of token 1 | … | scales of token 0 | … of token 1 | … |

    int8    x ≈ code · scale          scale = max |x| / 127                     of a token and head, in bfloat16
    int4    x ≈ low + code · scale    scale = (max x − min x) / 15, low = min x   of a token and head, in bfloat16
    fp8     x ≈ code · scale          scale of a KV head, float32, the same for all tokens; larger numbers saturate

Codes are computed with the scale as it was rounded, so rounding it costs next to nothing. A token and head that holds
no finite numbers alone is NaN as a whole, in formats with a scale of its own; in FP8 an infinity saturates.
After KIVI (Liu et al. 2024) and KVQuant (Hooper et al. 2024), who measure what few bits cost.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from headrace.spec import KVFormat

KINDS = MappingProxyType({"int8": 1, "float8_e4m3fn": 2, "float8_e5m2": 3, "uint4": 4})  # of KVFormat.codes, in kernels
_MOST = 127.0  # of int8
_LEVELS = 15.0  # of int4, above the lowest


def encode(x: Tensor, form: KVFormat, static: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``x`` [T, Hk, D] → codes [T, Hk, bytes], uint8, and scales [T, Hk, n], bfloat16; without those in FP8, whose
    ``static`` ones [Hk], float32, are 1 where they are None."""
    wide = x.float()
    if form.scales == 0:
        kind, scaled = getattr(torch, form.codes), wide if static is None else wide / static[:, None]
        most = torch.finfo(kind).max
        codes = scaled.clamp(-most, most).to(kind).view(torch.uint8)
        return codes.masked_fill(scaled.isnan(), 0x7F), None  # the same NaN on every machine
    odd = ~wide.isfinite().all(-1, keepdim=True)
    wide = wide.masked_fill(odd, 0.0)
    if form.scales == 1:
        scales = _rounded(wide.abs().amax(-1, keepdim=True) / _MOST)
        return _codes(wide, scales, -_MOST, _MOST).to(torch.int8).view(torch.uint8), _marked(scales, odd)
    low, high = _rounded(wide.amin(-1, keepdim=True)), wide.amax(-1, keepdim=True)
    scales = _rounded((high - low).clamp(min=0.0) / _LEVELS)
    codes = _codes(wide - low, scales, 0.0, _LEVELS).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, torch.cat((_marked(scales, odd), low.bfloat16()), dim=-1)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _marked(scales: Tensor, odd: Tensor) -> Tensor:
    """In bfloat16, NaN where ``odd``: the same one on every machine."""
    return scales.bfloat16().view(torch.int16).masked_fill(odd, 0x7FC0).view(torch.bfloat16)


def _codes(x: Tensor, scales: Tensor, least: float, most: float) -> Tensor:
    """0 where the scale is."""
    return torch.where(scales > 0, x / scales, 0.0).round().clamp(least, most)


def write(cache: Tensor, x: Tensor, slots: Tensor, form: KVFormat, static: Tensor | None) -> None:
    """Puts ``x`` [T, Hk, D] where ``slots`` [T] say, in ``cache`` [blocks, Hk, block_size, token bytes], uint8."""
    codes, scales = encode(x, form, static)
    size = cache.shape[2]
    blocks, offsets = torch.div(slots, size, rounding_mode="floor"), slots % size
    held = parts(cache, form)
    held[0][blocks, :, offsets] = codes
    if scales is not None:
        held[1][blocks, :, offsets] = scales.view(torch.uint8)


def read(
    cache: Tensor, blocks: Tensor, offsets: Tensor, head_dim: int, form: KVFormat, static: Tensor | None
) -> Tensor:
    """Tokens at ``offsets`` [n] of ``blocks`` [n], as float32 [n, Hk, D]. ``cache``: as for ``write``."""
    held = parts(cache, form)
    codes = held[0][blocks, :, offsets]
    if form.scales == 0:
        wide = codes.view(getattr(torch, form.codes)).float()
        return wide if static is None else wide * static[:, None]
    scales = held[1][blocks, :, offsets].view(torch.bfloat16).float()
    if form.scales == 1:
        return codes.view(torch.int8).float() * scales
    wide = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float()
    return torch.addcmul(scales[..., 1:], wide, scales[..., :1])


def parts(cache: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Codes [..., block_size, row] and scales [..., block_size, rest] of a cache [..., block_size, token bytes], as bytes."""
    size, own = cache.shape[-2], 2 * form.scales
    lines, row = cache.flatten(-2), cache.shape[-1] - own
    codes, scales = lines[..., : size * row], lines[..., size * row :]
    return codes.unflatten(-1, (size, row)), scales.unflatten(-1, (size, own))
