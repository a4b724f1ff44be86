"""The residual stream of few rows between products that carry out what stands around them.

What lives here: the stream as one product leaves it for the next. What may not: layers, kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.kernels.around import Around
from headrace.quant import ApplyFused


@dataclass(frozen=True, slots=True)
class Stream:
    """``residual`` [tokens, hidden] is the sum so far. ``x`` is its norm where there are no ``squares``; else what the norm multiplies.

    Then the next product completes the norm, from the sums of the residual's squares.
    """

    residual: Tensor  # [tokens, hidden]
    x: Tensor  # [tokens, hidden]
    squares: Tensor | None  # [pieces, tokens], float32
    eps: float


def added(product: ApplyFused, x: Tensor, stream: Stream, scale: Tensor) -> Stream:
    """``product`` of ``x`` added to the stream. ``scale`` [hidden]: the weight of the norm that follows."""
    y, scaled, squares = product(x, Around(residual=stream.residual, scale=scale))
    assert scaled is not None
    return Stream(y, scaled, squares, stream.eps)
