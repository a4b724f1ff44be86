"""What adapters add to one weight: low-rank factors in slots, beside the weight's own product.

What lives here: the tensors of a weight's slots, adding them to a result. What may not: which adapter is in which slot
(lora/), kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.candidate import DeltaFacts
from headrace.kernels.lora.inputs import AdapterRows
from headrace.kernels.operations import ADD_DELTAS
from headrace.layers.context import LayerContext


class Delta:
    """``parts``: outputs of what is merged in the weight, each with factors of its own; of an embedding, one.

    ``table``: the weight is an embedding, so that ``ins`` counts its rows.
    """

    def __init__(self, ins: int, parts: Sequence[int], slots: int, rank: int, context: LayerContext, *, table: bool = False) -> None:
        dtype, device = context.dtype, context.device
        self.a = torch.zeros((slots, ins, rank) if table else (slots, len(parts), rank, ins), dtype=dtype, device=device)
        self.b = torch.zeros((slots, rank, sum(parts)), dtype=dtype, device=device)
        self.parts = tuple(parts)
        self.ranks = torch.zeros(slots, dtype=torch.int32)  # on the host; 0: the adapter leaves this weight alone
        self.gains: Tensor | None = None  # [slots, 2, outs], float32: what results are multiplied by, and what is added (DoRA)
        self._add = context.kernels.choose(ADD_DELTAS, DeltaFacts(context.dtype, ins, self.parts, rank))

    @property
    def num_bytes(self) -> int:
        held = (self.a, self.b) if self.gains is None else (self.a, self.b, self.gains)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def add(self, y: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """Onto a product's result: ``y`` [T, outs], ``x`` [T, ins]."""
        if self.gains is not None:
            self._scale(y, self.gains, rows)
        if any(self.ranks[slot] for slot, _, _ in rows.spans):
            self._add(y, x, self.a, self.b, self.ranks, self.parts, rows)

    def look_up(self, y: Tensor, ids: Tensor, rows: AdapterRows, scale: float | None) -> None:
        """Onto rows of an embedding: ``y`` [T, outs], ``ids`` [T]. ``scale``: of the embedding."""
        for slot, begin, end in rows.spans:
            if rank := int(self.ranks[slot]):
                chosen = rows.order[begin:end]
                found = self.a[slot, ids[chosen], :rank] @ self.b[slot, :rank]
                y.index_add_(0, chosen, found if scale is None else found * scale)

    def _scale(self, y: Tensor, gains: Tensor, rows: AdapterRows) -> None:
        for slot, begin, end in rows.spans:
            if self.ranks[slot]:
                chosen = rows.order[begin:end]
                gain, shift = gains[slot]
                y[chosen] = (y[chosen].float() * gain + shift).to(y.dtype)
