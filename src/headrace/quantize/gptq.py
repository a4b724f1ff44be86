"""Quantizes a matrix one input at a time, with later inputs compensating for the errors of earlier ones ("GPTQ:
Accurate Post-Training Quantization for Generative Pre-trained Transformers", Frantar et al. 2022).

What lives here: that. What may not: collecting inputs, grids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.quantize.grid import Fit, Grid, fit

_BLOCK = 128  # inputs whose errors are carried to all behind them at once
DAMP = 0.01  # of the mean of the Gram matrix's diagonal, added to it


def chosen(weight: Tensor, gram: Tensor | None, grid: Grid, method: str) -> tuple[Tensor, Fit]:
    """(codes, their grid): by GPTQ if that is the method and inputs are known, else the nearest."""
    if gram is not None and method in ("gptq", "mr-gptq"):
        return gptq(weight, gram, grid)
    found = fit(weight, grid, clip=method != "rtn")
    return found.codes(weight), found


def gptq(
    weight: Tensor,
    gram: Tensor,
    grid: Grid,
    *,
    order: bool = True,
    clip: bool = True,
    apart: Tensor | None = None,
    left: Tensor | None = None,
) -> tuple[Tensor, Fit]:
    """(codes, their grid). ``weight`` [outs, ins], ``gram`` [ins, ins]: xᵀx of inputs, float32.

    ``order``: the most important inputs come first, while groups still consist of neighbors, so only the codes differ.
    ``apart`` [outs, ins]: which weights are outliers. ``left`` receives their rounding errors, which are stored
    separately.
    """
    weight, gram = weight.float().clone(), gram.float().clone()
    silent = gram.diagonal() == 0
    gram.diagonal()[silent] = 1.0
    weight[:, silent] = 0.0
    found = fit(weight if apart is None else weight.masked_fill(apart, 0.0), grid, clip=clip)
    ins = weight.shape[1]
    places = torch.argsort(gram.diagonal(), descending=True) if order else torch.arange(ins, device=weight.device)
    weight, factor = weight[:, places], _factor(gram[places][:, places])
    codes = torch.empty_like(weight)
    at = places.tolist()
    for begin in range(0, ins, _BLOCK):
        end = min(begin + _BLOCK, ins)
        block, share = weight[:, begin:end], factor[begin:end, begin:end]
        errors = torch.empty_like(block)
        for index in range(end - begin):
            one = found.column(at[begin + index])
            column = block[:, index : index + 1]
            codes[:, begin + index : begin + index + 1] = chosen = one.codes(column)
            off = column - one.dense(chosen)
            if apart is not None and left is not None:
                mine = apart[:, (place := at[begin + index]), None]
                left[:, place, None] = off.where(mine, 0.0)
                off = off.masked_fill(mine, 0.0)
            errors[:, index : index + 1] = error = off / share[index, index]
            block[:, index:] -= error * share[index, index:]
        weight[:, end:] -= errors @ factor[begin:end, end:]
    back = torch.empty_like(places)
    back[places] = torch.arange(ins, device=places.device)
    return codes[:, back], found


def _factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse; the diagonal is increased until it exists."""
    damp = DAMP * float(gram.diagonal().mean())
    while True:
        gram.diagonal().add_(damp)
        lower, failed = torch.linalg.cholesky_ex(gram)
        if not int(failed):
            factor: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(factor[1]):
                return factor[0]
        damp *= 10


def sensitivity(gram: Tensor) -> Tensor:
    """The squared error that each input costs once the later inputs have compensated for it. [ins]"""
    return 1.0 / _factor(gram.float().clone()).square().sum(0)


def output_error(weight: Tensor, rounded: Tensor, gram: Tensor) -> float:
    """Σ |x (W - W')ᵀ|² over the inputs that ``gram`` was computed from."""
    off = weight.float() - rounded.float()
    return float(((off @ gram.float()) * off).sum())
