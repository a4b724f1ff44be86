"""Chooses and packs the codes of GGUF's blocks: Q4_0 … Q8_0, and Q2_K … Q6_K with scales of scales.

    symmetric      w ≈ d · (q - middle)            d from a search around (largest value) / (its code)
    with a shift   w ≈ d · q + m                   d and m by least squares, around codes that are tried
    K-quants       d = D · (whole number), m likewise, for groups of 16 or 32 in a block of 256

What a block's bytes mean is in quant/gguf_blocks.py; here each layout is undone. Errors are weighed as llama.cpp weighs
them: by how much an input carries, where that is known (its importance matrix), and by how large a weight is.

What lives here: that. What may not: names, files, which matrix gets which type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.quant.gguf import BLOCKS, CODES

_SMALL = 1e-12
_TRIED = tuple(0.1 * step for step in range(-9, 10))  # what is added to the largest code, to find a better scale
# type → (largest and least of the whole numbers that multiply D; of those that multiply its other scale)
_OF_SCALES: Mapping[str, tuple[int, int]] = {
    "Q2_K": (0, 15),
    "Q3_K": (-32, 31),
    "Q4_K": (0, 63),
    "Q5_K": (0, 63),
    "Q6_K": (-128, 127),
}
_ROWS = 1 << 20  # elements that are encoded at a time


@dataclass(frozen=True, slots=True)
class Block:
    """``codes`` [blocks, elements], whole numbers from 0; ``d``, ``m`` [blocks, 1], float16 (m: of what is added, or of
    K-quants taken away); ``scales``, ``shifts`` [blocks, groups], whole numbers. All but the halves int64."""

    codes: Tensor
    d: Tensor
    m: Tensor | None = None
    scales: Tensor | None = None
    shifts: Tensor | None = None


def encoded(kind: str, weight: Tensor, importance: Tensor | None) -> Tensor:
    """[outs, bytes] of ``weight`` [outs, ins], float32, whose rows are whole blocks. ``importance`` [ins]: the mean
    square of each input."""
    step = max(1, _ROWS // weight.shape[1])
    rows = [_encoded(kind, weight[first : first + step], importance) for first in range(0, len(weight), step)]
    return torch.cat(rows)


def _encoded(kind: str, weight: Tensor, importance: Tensor | None) -> Tensor:
    elements = BLOCKS[kind][0]
    x = weight.reshape(-1, elements)
    carried = torch.ones_like(weight) if importance is None else importance.to(weight).expand_as(weight)
    sigma = 2 * x.square().mean(1, keepdim=True)
    weighed = carried.reshape(-1, elements) * (sigma + x.square()).sqrt()
    bits, group, shifted = CODES[kind]
    fit = _shifted if shifted else _symmetric
    block = fit(kind, x.unflatten(1, (-1, group)), weighed.unflatten(1, (-1, group)), bits)
    return PACKED[kind](block).view(len(weight), -1)


# --- scales and codes


def _symmetric(kind: str, x: Tensor, weighed: Tensor, bits: int) -> Block:
    """``x`` [blocks, groups, group]."""
    middle = 1 << bits >> 1
    d = _scales(x, weighed, middle)  # [blocks, groups]
    if kind not in _OF_SCALES:
        half = d.half()
        return Block(_codes(x, half.float(), middle), half)
    least, most = _OF_SCALES[kind]
    large = (d.gather(1, d.abs().argmax(1, keepdim=True)) / least).half()
    scales = _whole(d, large, least, most)
    return Block(_codes(x, large.float() * scales, middle), large, scales=scales)


def _scales(x: Tensor, weighed: Tensor, middle: int) -> Tensor:
    """By the candidate whose error is smallest: for codes q, the scale of least squares is Σ w x q / Σ w q²."""
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    found, best = torch.zeros_like(x[..., 0]), torch.full_like(x[..., 0], -1.0)
    for more in _TRIED:
        inverse = torch.where(largest.abs() > _SMALL, -(middle + more) / largest, 0.0)
        codes = (x * inverse).round().clamp(-middle, middle - 1)
        both, squares = (weighed * x * codes).sum(2), (weighed * codes.square()).sum(2)
        gain = torch.where(squares > 0, both.square() / squares, 0.0)
        found = torch.where(gain > best, torch.where(squares > 0, both / squares, 0.0), found)
        best = torch.maximum(best, gain)
    return found


def _codes(x: Tensor, d: Tensor, middle: int) -> Tensor:
    return ((_divided(x, d.unsqueeze(2)).round() + middle).clamp(0, 2 * middle - 1)).flatten(1).long()


def _shifted(kind: str, x: Tensor, weighed: Tensor, bits: int) -> Block:
    most = (1 << bits) - 1
    below = kind in _OF_SCALES  # K-quants have no way to say that all of a group is positive
    d, m = _lines(x, weighed, most, below=below)
    if not below:
        d, m = d.half(), m.half()
        return Block(_from(x, d.float(), m.float(), most), d, m)
    _, largest = _OF_SCALES[kind]
    large, away = ((each.amax(1, keepdim=True) / largest).half() for each in (d, -m))
    scales, shifts = _whole(d, large, 0, largest), _whole(-m, away, 0, largest)
    return Block(_from(x, large.float() * scales, -away.float() * shifts, most), large, away, scales, shifts)


def _lines(x: Tensor, weighed: Tensor, most: int, *, below: bool) -> tuple[Tensor, Tensor]:
    """(d, m) of w ≈ d · q + m for each group; ``below``: m is at most 0."""
    low, high = x.amin(2), x.amax(2)
    low = low.clamp(max=0.0) if below else low
    d, m = (high - low) / most, low
    best = _error(x, weighed, d, m, most)
    total, first = weighed.sum(2), (weighed * x).sum(2)
    for more in _TRIED:
        codes = _divided(x - low.unsqueeze(2), ((high - low) / (most + more)).unsqueeze(2)).round().clamp(0, most)
        ones, squares, both = ((weighed * each).sum(2) for each in (codes, codes.square(), codes * x))
        room = total * squares - ones.square()
        slope = torch.where(room > 0, (total * both - first * ones) / room, 0.0)
        shift = torch.where(room > 0, (squares * first - ones * both) / room, low)
        if below:  # through 0 where it would be above
            through = torch.where(squares > 0, both / squares, 0.0)
            slope, shift = torch.where(shift > 0, through, slope), shift.clamp(max=0.0)
        error = _error(x, weighed, slope, shift, most)
        better = (error < best) & (slope > 0)
        d, m, best = (torch.where(better, *pair) for pair in ((slope, d), (shift, m), (error, best)))
    return d, m


def _error(x: Tensor, weighed: Tensor, d: Tensor, m: Tensor, most: int) -> Tensor:
    codes = _divided(x - m.unsqueeze(2), d.unsqueeze(2)).round().clamp(0, most)
    return (weighed * (codes * d.unsqueeze(2) + m.unsqueeze(2) - x).square()).sum(2)


def _from(x: Tensor, d: Tensor, m: Tensor, most: int) -> Tensor:
    return _divided(x - m.unsqueeze(2), d.unsqueeze(2)).round().clamp(0, most).flatten(1).long()


def _whole(values: Tensor, large: Tensor, least: int, most: int) -> Tensor:
    return _divided(values, large.float()).round().clamp(least, most).long()


def _divided(x: Tensor, by: Tensor) -> Tensor:
    return torch.where(by.abs() > _SMALL, x / by, 0.0)


# --- bytes: quant/gguf_blocks.py, backwards


def _bytes(*parts: Tensor) -> Tensor:
    """[blocks, size]; halves as two bytes."""
    return torch.cat(
        [each.view(torch.uint8) if each.dtype is torch.float16 else each.to(torch.uint8) for each in parts], 1
    )


def _nibbles(codes: Tensor) -> Tensor:
    """[..., 2 n] → [..., n]: the first half in the low halves."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def _planes(bits: Tensor, width: int) -> Tensor:
    """[..., parts, n] of ``width`` bits each → [..., n], the first part lowest."""
    shifts = torch.arange(bits.shape[-2], device=bits.device) * width
    return (bits << shifts.unsqueeze(1)).sum(-2)


def _fifth(codes: Tensor) -> Tensor:
    """The fifth bits of 32 codes, as 4 bytes."""
    return _planes((codes >> 4 & 1).unflatten(1, (4, 8)).transpose(1, 2), 1)


def _two_bits(codes: Tensor) -> Tensor:
    return _planes(codes.unflatten(1, (2, 4, 32)), 2).flatten(1)


def _q5(block: Block) -> tuple[Tensor, Tensor]:
    return _fifth(block.codes), _nibbles(block.codes & 15)


def _shift(block: Block) -> Tensor:
    assert block.m is not None, "a type with shifts"
    return block.m


def _small(block: Block) -> tuple[Tensor, Tensor]:
    assert block.scales is not None and block.shifts is not None, "a type with scales of scales and shifts"
    return block.scales, block.shifts


def _sixths(block: Block) -> Tensor:
    """8 scales and 8 shifts of 6 bits in 12 bytes."""
    scales, shifts = _small(block)
    first, second = (each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scales, shifts))
    return torch.cat((first, second, scales[:, 4:] & 15 | (shifts[:, 4:] & 15) << 4), 1)


def _q2_k(block: Block) -> Tensor:
    scales, shifts = _small(block)
    return _bytes(scales | shifts << 4, _two_bits(block.codes), block.d, _shift(block))


def _q3_k(block: Block) -> Tensor:
    assert block.scales is not None, "a type with scales of scales"
    scales = block.scales + 32
    third = _planes((block.codes >> 2).unflatten(1, (8, 32)), 1)
    high = _planes((scales >> 4).unflatten(1, (4, 4)), 2)
    return _bytes(third, _two_bits(block.codes & 3), _nibbles(scales & 15), high, block.d)


def _q4_k(block: Block) -> Tensor:
    codes = _nibbles(block.codes.unflatten(1, (4, 64))).flatten(1)
    return _bytes(block.d, _shift(block), _sixths(block), codes)


def _q5_k(block: Block) -> Tensor:
    fifth = _planes((block.codes >> 4).unflatten(1, (8, 32)), 1)
    low = _nibbles((block.codes & 15).unflatten(1, (4, 64))).flatten(1)
    return _bytes(block.d, _shift(block), _sixths(block), fifth, low)


def _q6_k(block: Block) -> Tensor:
    assert block.scales is not None, "a type with scales of scales"
    low = _nibbles((block.codes & 15).unflatten(1, (2, 128))).flatten(1)
    return _bytes(low, _two_bits(block.codes >> 4), block.scales & 255, block.d)


PACKED: Mapping[str, Callable[[Block], Tensor]] = {
    "Q4_0": lambda block: _bytes(block.d, _nibbles(block.codes)),
    "Q4_1": lambda block: _bytes(block.d, _shift(block), _nibbles(block.codes)),
    "Q5_0": lambda block: _bytes(block.d, *_q5(block)),
    "Q5_1": lambda block: _bytes(block.d, _shift(block), *_q5(block)),
    "Q8_0": lambda block: _bytes(block.d, block.codes ^ 128),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
