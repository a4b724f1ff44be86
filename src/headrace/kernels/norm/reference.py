"""The twins of norms and activations.

What lives here: formulas in plain torch. What may not: anything that is fast at the cost of being plain.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.spec import Activation


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm (Zhang and Sennrich 2019) after an optional residual sum.

    ``x``, ``residual`` [..., H], ``weight`` [H]. Returns (y, residual'): residual' = x + residual, y = residual' /
    rms(residual') · weight.
    """
    if residual is not None:
        x = x + residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype), x


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Layer norm (Ba et al. 2016) after an optional residual sum. Shapes and results as ``rms_norm``; ``bias`` [H]."""
    if residual is not None:
        x = x + residual
    wide = F.layer_norm(x.float(), (x.shape[-1],), weight.float(), None if bias is None else bias.float(), eps)
    return wide.to(x.dtype), x


def activation(x: Tensor, kind: Activation) -> Tensor:
    """SiLU, exact GELU or its tanh form (Hendrycks and Gimpel 2016), elementwise over any shape."""
    if kind is Activation.SILU:
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind is Activation.GELU_TANH else "none")


def gated_activation(x: Tensor, kind: Activation) -> Tensor:
    """act(first half) · second half (Shazeer 2020). ``x`` [..., 2I] → [..., I]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (activation(gate, kind) * up).to(x.dtype)
