"""Rotary tables: the cosines and sines of every position, computed once in float32.

What lives here: frequencies of each kind of scaling, and the table. What may not: rotating (kernels), reading configs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.spec import RopeSpec


def rotary_table(rope: RopeSpec, max_model_len: int, device: torch.device) -> Tensor:
    """[max_model_len, rotary_dim], float32: the cosines of the pairs, then their sines, both times
    ``attention_factor``."""
    positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
    angles = positions.unsqueeze(1) * inverse_frequencies(rope, max_model_len).to(device)
    table = torch.empty(max_model_len, rope.rotary_dim, dtype=torch.float32, device=device)
    half = rope.rotary_dim // 2
    torch.cos(angles, out=table[:, :half])
    torch.sin(angles, out=table[:, half:])
    return table if rope.attention_factor == 1.0 else table.mul_(rope.attention_factor)


def inverse_frequencies(rope: RopeSpec, max_model_len: int) -> Tensor:
    """[rotary_dim / 2], float32: radians a position for each pair. ``max_model_len`` decides longrope's regime."""
    if rope.kind == "llama3":
        return _llama3(rope)
    if rope.kind == "yarn":
        return _yarn(rope)
    if rope.kind == "longrope":
        factors = rope.long_factor if max_model_len > rope.original_max_positions else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(rope.theta, rope.rotary_dim))
    plain = 1.0 / _wavelengths(rope.theta, rope.rotary_dim)
    return plain / rope.factor if rope.kind == "linear" else plain


def _wavelengths(theta: float, rotary_dim: int) -> Tensor:
    """theta^(2i / rotary_dim) for pair i: positions a radian takes."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return torch.pow(theta, exponents)


def _llama3(rope: RopeSpec) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended by how often they fit the trained
    length."""
    plain = 1.0 / _wavelengths(rope.theta, rope.rotary_dim)
    turns = rope.original_max_positions / (2.0 * math.pi / plain)  # of each pair over the trained length
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - keep) * plain / rope.factor + keep * plain


def _yarn(rope: RopeSpec) -> Tensor:
    """Pairs below the ramp keep their frequency, pairs above it are stretched by ``factor``, the ramp blends (Peng et
    al. 2023)."""
    waves = _wavelengths(rope.theta, rope.rotary_dim)
    low, high = _yarn_pair(rope, rope.beta_fast), _yarn_pair(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0.0, 1.0)
    return stretch / (rope.factor * waves) + (1.0 - stretch) / waves


def _yarn_pair(rope: RopeSpec, turns: float) -> float:
    """The (fractional) pair that makes ``turns`` turns over the trained length."""
    return (
        rope.rotary_dim * math.log(rope.original_max_positions / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))
    )
