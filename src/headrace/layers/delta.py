"""What adapters add to one weight: low-rank factors in slots, beside the weight's own product.

What lives here: the tensors of a weight's slots, adding them to a result. What may not: which adapter is in which slot
(lora/), kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.candidate import DeltaFacts
from headrace.kernels.inputs import AdapterRows
from headrace.kernels.operations import ADD_DELTAS, LOOK_UP_DELTAS
from headrace.layers.context import LayerContext


class Delta:
    """``parts``: outputs of what is merged in the weight, each with factors of its own; of an embedding, one.

    ``table``: the weight is an embedding, so that ``ins`` counts its rows. ``touched``: some adapter so far changes the
    weight. Where none does, the weight is computed as if there were no adapters.
    """

    def __init__(
        self, ins: int, parts: Sequence[int], slots: int, rank: int, context: LayerContext, *, table: bool = False
    ) -> None:
        dtype, device = context.dtype, context.device
        self.a = torch.zeros(
            (slots, ins, rank) if table else (slots, len(parts), rank, ins), dtype=dtype, device=device
        )
        self.b = torch.zeros((slots, rank, sum(parts)), dtype=dtype, device=device)
        self.parts = tuple(parts)
        # 0: the adapter leaves this part alone
        self.ranks = torch.zeros((slots, len(parts)), dtype=torch.int32, device=device)
        # [slots, 2, outs], float32: what results are multiplied by, and what is added (DoRA)
        self.gains: Tensor | None = None
        self.touched = False
        facts = DeltaFacts(context.dtype, ins, self.parts, rank)
        if table:
            self._look_up = context.kernels.choose(LOOK_UP_DELTAS, facts)
        else:
            self._add = context.kernels.choose(ADD_DELTAS, facts)

    @property
    def num_bytes(self) -> int:
        held = (self.a, self.b) if self.gains is None else (self.a, self.b, self.gains)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def adds_only(self) -> bool:
        """Whether it may be added before the product is."""
        return self.gains is None

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows, squares: Tensor | None = None, eps: float = 0.0) -> None:
        """Onto a product's result: ``y`` [T, outs], ``x`` [T, ins]. ``squares``, ``eps``: of a norm that x still
        lacks."""
        self._add(y, x, self.a, self.b, self.ranks, self.parts, rows, self.gains, squares, eps)

    def look_up(self, y: Tensor, ids: Tensor, rows: AdapterRows, scale: float | None) -> None:
        """Onto rows of an embedding: ``y`` [T, outs], ``ids`` [T]. ``scale``: of the embedding."""
        self._look_up(y, ids, self.a, self.b, self.ranks, scale, rows)
