"""The twins of matrix products: with a residual sum, a gate, or all that stands around one in a layer.

What lives here: formulas in plain torch. What may not: anything that is fast at the cost of being plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.candidate import Empty, plainly_empty
from headrace.kernels.linear.epilogue import Epilogue, Fuse, Fused
from headrace.kernels.norm.reference import gated_activation
from headrace.spec import Activation


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """y = x · weightᵀ + bias. ``weight`` [out, in], ``bias`` [out]; the result maps x [..., in] to [..., out]."""
    return partial(F.linear, weight=weight, bias=bias)


@dataclass(frozen=True, slots=True)
class LinearInto:
    """y = x · weightᵀ (+ bias): ``x`` [T, in]. The same call of the library as ``F.linear`` makes for a result of its
    own."""

    turned: Tensor  # [in, out], a view
    bias: Tensor | None
    empty: Empty

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2:
            return F.linear(x, self.turned.t(), self.bias)
        y = self.empty((x.shape[0], self.turned.shape[1]), x.dtype, x.device)
        return torch.mm(x, self.turned, out=y) if self.bias is None else torch.addmm(self.bias, x, self.turned, out=y)


def linear_into(weight: Tensor, bias: Tensor | None, empty: Empty) -> Callable[[Tensor], Tensor]:
    """As the twin of ``linear``, with memory of ``empty``."""
    return linear(weight, bias) if empty is plainly_empty else LinearInto(weight.t(), bias, empty)


def added_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """residual' = residual + x · weightᵀ + bias: ``x`` [T, in], ``residual`` [T, out], which a candidate may
    overwrite."""
    return lambda x, residual: residual + F.linear(x, weight, bias)


def gated_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor, Activation], Tensor]:
    """y = act(x · Wᵀ + b) ⊙ (x · Vᵀ + c): ``weight`` [2 out, in], W before V; maps x [T, in] and the activation to [T,
    out].

    A candidate may give None for a number of rows that product and activation serve as well one after the other.
    """
    return lambda x, kind: gated_activation(F.linear(x, weight, bias), kind)


def fused_linear(weight: Tensor, bias: Tensor | None) -> Fuse:
    """The product with what stands around it: y = act(s · x Wᵀ + b) ⊙ (s · x Vᵀ + c) + residual, then y · scale and y².

    ``x`` [T, in]; ``weight`` [out, in], with a gate W and V, one behind the other, [2 out, in]; see ``Epilogue``. One
    rounding, of y.
    """

    def apply(x: Tensor, epilogue: Epilogue) -> Fused:
        y = x.float() @ weight.float().T
        if epilogue.squares is not None:
            y = y * torch.rsqrt(epilogue.squares.sum(0) / x.shape[-1] + epilogue.eps).unsqueeze(1)
        y = y if bias is None else y + bias.float()
        if epilogue.gate is not None:
            y = gated_activation(y, epilogue.gate)
        y = (y if epilogue.residual is None else y + epilogue.residual.float()).to(x.dtype)
        if epilogue.scale is None:
            return y, None, None
        return y, (y.float() * epilogue.scale.float()).to(x.dtype), y.float().square().sum(1).unsqueeze(0)

    return apply
