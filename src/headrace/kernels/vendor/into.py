"""torch's own product, its result where it is told.

What lives here: that callable. What may not: choosing an algorithm (tuned.py): torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.candidate import Empty, plainly_empty


@dataclass(frozen=True, slots=True)
class LinearInto:
    """y = x · weightᵀ (+ bias): ``x`` [T, in]. The same call of the library as ``F.linear`` makes for a result of its own."""

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
    return reference.linear(weight, bias) if empty is plainly_empty else LinearInto(weight.t(), bias, empty)
