"""What sums over ranks do between two products of a layer, beside adding up, and the largest of all ranks: the twins.

What lives here: these, in plain torch. What may not: who meets whom (parallel/), kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.norm.reference import rms_norm

# the stream [T, hidden]; times the weight of the norm that follows [T, hidden]; sums of its squares [pieces, T], float32
Onto = tuple[Tensor, Tensor, Tensor]
# the stream [T, hidden], and its norm [T, hidden], as kernels/norm/reference.py has both
Normed = tuple[Tensor, Tensor]


def onto(x: Tensor, residual: Tensor, scale: Tensor) -> Onto:
    """total = x + residual, total · scale, and the squares of total, which leaves the norm that follows half done, as
    ``fused_linear`` does behind a product. ``x``, ``residual`` [T, hidden]; ``scale`` [hidden] of any float type; float32
    inside, total rounded once."""
    total = (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    return total, (wide * scale.float()).to(x.dtype), wide.square().sum(1).unsqueeze(0)


def normed(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> Normed:
    """total = x + residual, and the RMS norm of it. Shapes as ``onto`` has them."""
    y, total = rms_norm(x, scale, eps, residual)
    return total, y


def best_of(peaks: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the largest peak and its place: of ``peaks`` and ``places``, [ranks, rows] each; of equal ones the
    first rank's, and of a NaN any."""
    best, rank = torch.max(peaks, 0)
    return best, places.gather(0, rank[None])[0]
