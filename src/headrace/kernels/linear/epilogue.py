"""What stands around a product in a layer, where one kernel can carry out all of it.

What lives here: the noun. What may not: kernels, layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.spec import Activation


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The product of ``fused_linear`` is made of a norm before it and of what follows it; every part may be missing.

    ``squares``: partial sums of the squares of what x was before it was multiplied by the norm's weight; with them the
    product is multiplied by 1 / sqrt(their sum / in_features + eps), which completes the norm. ``gate``: the first half
    of the columns, through the activation, times the second half. ``residual`` is added. ``scale``: the weight of the
    norm that follows; the result comes multiplied by it, too, and with the squares of its own.
    """

    squares: Tensor | None = None  # [pieces, T], float32
    eps: float = 0.0
    gate: Activation | None = None
    residual: Tensor | None = None  # [T, out]
    scale: Tensor | None = None  # [out]


PLAIN = Epilogue()
MOST_ROWS = 64  # of a product that is fused; more are a prompt, or a batch whose products are bound by arithmetic
LEAST_ADDED = 4096  # rows of a product that takes the residual in: of fewer, the norm that follows adds it as quickly
# y [T, out]; y · scale [T, out] and squares [pieces, T], where a scale was given
Fused = tuple[Tensor, Tensor | None, Tensor | None]
Fuse = Callable[[Tensor, Epilogue], Fused]
