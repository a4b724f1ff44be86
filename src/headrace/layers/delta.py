"""What adapters add to one weight: low-rank factors of its slots, beside the weight's own GEMM.

What lives here: adding them to a result. What may not: which adapter is in which slot, and where it lies,
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headrace.kernels.candidate import DeltaFacts
from headrace.kernels.inputs import AdapterRows, SlotFactors
from headrace.kernels.operations import ADD_DELTAS, LOOK_UP_DELTAS
from headrace.layers.context import LayerContext


class Delta:
    """``parts``: outputs of what is merged in the weight, each with factors of its own; of an embedding, one.

    ``table``: the weight is an embedding, so that ``ins`` counts its rows. ``touched``: some adapter so far changes the
    weight. Where none does, the weight is computed as if there were no adapters. ``held``: tensors of the slots that no
    other part of an engine has made; other weights' deltas hold the same.
    """

    def __init__(
        self, ins: int, parts: Sequence[int], factors: SlotFactors, context: LayerContext, *, table: bool = False
    ) -> None:
        self.parts = tuple(parts)
        self.factors = factors
        self.touched = False
        self.held: tuple[Tensor, ...] = ()
        facts = DeltaFacts(context.dtype, ins, self.parts, factors.a.shape[2], factors.chunk)
        if table:
            self._look_up = context.kernels.choose(LOOK_UP_DELTAS, facts)
        else:
            self._add = context.kernels.choose(ADD_DELTAS, facts)

    @property
    def adds_only(self) -> bool:
        """Whether it may be added before the GEMM is."""
        return not self.factors.gained

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows, squares: Tensor | None = None, eps: float = 0.0) -> None:
        """Onto a GEMM's result: ``y`` [T, outs], ``x`` [T, ins]. ``squares``, ``eps``: of a norm that x still
        lacks."""
        self._add(y, x, self.factors, self.parts, rows, squares, eps)

    def look_up(self, y: Tensor, ids: Tensor, rows: AdapterRows, scale: float | None) -> None:
        """Onto rows of an embedding: ``y`` [T, outs], ``ids`` [T]. ``scale``: of the embedding."""
        self._look_up(y, ids, self.factors, scale, rows)
