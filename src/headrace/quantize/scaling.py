"""Multiplies input channels by factors that their producer divides by: the result is unchanged, but rounding becomes
easier.

    AWQ          weights of inputs that are large on average grow, so that they are rounded more finely (Lin et al.
    2023)
    SmoothQuant  inputs with large maxima shrink, so that they can be rounded, too (Xiao et al. 2022)

What lives here: the factors. What may not: who produces an input (run.py), grids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.quantize.gptq import output_error
from headrace.quantize.grid import Grid, fit

_STEPS = 20  # exponents that are tried


def activation_aware(weights: Sequence[Tensor], mean: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """Factors [ins] that weights [outs, ins] with the same inputs are multiplied by. ``mean``: of the inputs'
    magnitudes, [ins]."""
    size = mean.float().clamp(min=1e-6)
    best, least = torch.ones_like(size), float("inf")
    for step in range(_STEPS):
        factors = size.pow(step / _STEPS)
        factors = (factors / (factors.amax() * factors.amin()).sqrt()).clamp(1e-4, 1e4)
        error = 0.0
        for weight in weights:
            scaled = weight.float() * factors
            error += output_error(weight, fit(scaled, grid).rounded(scaled) / factors, gram)
        if error < least:
            best, least = factors, error
    return best


def smooth(weights: Sequence[Tensor], most: Tensor, *, strength: float = 0.5) -> Tensor:
    """Factors [ins] likewise; ``most``: the inputs' largest magnitudes, [ins]. ``strength``: 0 leaves the inputs
    unchanged, 1 moves all of their range to the weights."""
    heaviest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0).clamp(min=1e-5)
    return (most.float().clamp(min=1e-5).pow(strength) / heaviest.pow(1.0 - strength)).clamp(1e-4, 1e4)
