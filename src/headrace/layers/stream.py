"""The residual stream between the halves of a decoder's blocks.

What lives here: the stream as one half leaves it for the next. What may not: layers, kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headrace.kernels.lora.inputs import AdapterRows


class Norm(Protocol):
    eps: float
    scale: Tensor  # [hidden]: what normed values are multiplied by, for a kernel that does part of the norm

    def forward(
        self, x: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...  # norm(x + residual), x + residual


@dataclass(slots=True)
class Stream:
    """What one step has computed so far. Whoever adds a result may leave it ``pending`` for the norm that follows,
    which adds it at no cost; or add it and leave that norm half done: ``scaled`` by its weight, to be divided by the
    root of the mean of ``squares``.

    ``takes_norms``, ``takes_sums``: products of this step take in norms and sums, or sums alone, where they have a
    kernel for it. ``adapters``: rows that adapters add to.
    """

    sum: Tensor  # [tokens, hidden]
    takes_norms: bool
    takes_sums: bool
    pending: Tensor | None = None  # [tokens, hidden]
    scaled: Tensor | None = None  # [tokens, hidden]
    adapters: AdapterRows | None = None
    squares: Tensor | None = None  # [pieces, tokens], float32: partial sums

    def normed(self, norm: Norm) -> Tensor:
        """The norm of all that has been computed, which is added up then."""
        if self.pending is None:
            return norm.forward(self.sum)[0]
        x, self.sum = norm.forward(self.pending, self.sum)
        self.pending = None
        return x

    def add(self, y: Tensor, norm: Norm) -> None:
        """A result onto the sum at once. Where products take in norms, that before the next one is left half done, as
        they leave it."""
        self.sum = self.sum + y
        if self.takes_norms:
            self.scaled = (self.sum * norm.scale).to(y.dtype)
            self.squares = self.sum.float().square().sum(1).unsqueeze(0)

    def renormed(self, norm: Norm | None) -> None:
        """What is pending passes a norm of its own before it is added."""
        if norm is not None and self.pending is not None:
            self.pending = norm.forward(self.pending)[0]
