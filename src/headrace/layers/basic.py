"""The plain layers of a decoder: norms, embeddings and the dense feed-forward.

What lives here: layers without a file of their own. What may not: attention, experts, kernels, families.

Layers choose their kernels when they are made. They compute after ``finish_loading`` has been called on each that has
it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.kernels.candidate import Facts, NormFacts
from headrace.kernels.inputs import AdapterRows
from headrace.kernels.operations import EMBEDDING, LAYER_NORM, RMS_NORM
from headrace.layers.context import LayerContext
from headrace.layers.delta import Delta
from headrace.layers.linear import Linear, Norm, Stream
from headrace.layers.packed import Piece, create_pieces
from headrace.sites import Role, Split, Weight
from headrace.spec import Activation


def empty_parameter(context: LayerContext, *shape: int) -> nn.Parameter:
    """Memory for a weight that the loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=context.dtype, device=context.device), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, after adding the residual. ``offset`` is added to the weight once
    it is loaded.

    With an offset the sum is kept in float32: 1 + w in bfloat16 would round most of w away.
    """

    def __init__(self, size: int, eps: float, context: LayerContext, *, offset: float) -> None:
        super().__init__()
        self.weight = empty_parameter(context, size)
        self.eps = eps
        self._offset = offset
        self.scale: Tensor = self.weight.data  # [size]
        self._norm = context.kernels.choose(
            RMS_NORM, NormFacts(context.dtype, torch.float32 if offset else context.dtype)
        )

    def finish_loading(self) -> None:
        if self._offset:
            self.weight = nn.Parameter(self.weight.float() + self._offset, requires_grad=False)
        self.scale = self.weight.data

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # [..., size] each
        """Returns (norm(x + residual), x + residual)."""
        return self._norm(x, self.scale, self.eps, residual)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias over the last dimension, after adding the residual."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = empty_parameter(context, size)
        self.bias = empty_parameter(context, size)
        self.eps = eps
        self.scale: Tensor = self.weight.data  # [size]
        self._shift: Tensor = self.bias.data  # [size]
        self._norm = context.kernels.choose(LAYER_NORM, NormFacts(context.dtype, context.dtype))

    def finish_loading(self) -> None:
        self.scale, self._shift = self.weight.data, self.bias.data

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # [..., size] each
        """Returns (norm(x + residual), x + residual)."""
        return self._norm(x, self.scale, self._shift, self.eps, residual)


class Embedding(nn.Module):
    """A row of ``weight`` (or of ``pieces``) for each id, times ``scale`` (rounded to the weights' precision, as the
    models were trained). ``delta``: what adapters add. Of ranks each has some rows, and all have all that are found."""

    weight: nn.Parameter | None

    def __init__(self, site: Weight, context: LayerContext, *, scale: float | None = None) -> None:
        super().__init__()
        self.weight = None if site.formats else empty_parameter(context, site.outs, site.ins)
        self.pieces = create_pieces(site, context)
        self.delta: Delta | None = None
        self._dtype = context.dtype
        self._group = context.group if site.split is Split.VOCABULARY else None
        self._rows = site.outs
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=context.dtype))
        self._lookup = context.kernels.choose(EMBEDDING, Facts(context.dtype))

    def finish_loading(self) -> None:
        for piece in self.pieces:
            assert isinstance(piece, Piece)
            piece.finish_loading()

    @property
    def weight_bytes(self) -> int:
        """Held beyond parameters, once loading has finished."""
        return sum(piece.num_bytes for piece in self.pieces if isinstance(piece, Piece))

    def forward(self, ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:  # [tokens], int64 → [tokens, size]
        if self._group is None:
            return self._adapted(ids, adapters)
        own = ids - self._group.rank * self._rows
        others = (own < 0) | (own >= self._rows)
        found = self._adapted(own.masked_fill_(others, 0), adapters)
        return self._group.all_reduce(found.masked_fill_(others.unsqueeze(1), 0))

    def _adapted(self, ids: Tensor, adapters: AdapterRows | None) -> Tensor:
        found = self._looked_up(ids)
        if adapters is not None and self.delta is not None and self.delta.touched:
            self.delta.look_up(found, ids, adapters, self._scale)
        return found

    def _looked_up(self, ids: Tensor) -> Tensor:
        if self.weight is not None:
            return self._lookup(ids, self.weight, self._scale)
        (piece,) = self.pieces
        assert isinstance(piece, Piece)
        rows = piece.dense(ids, self._dtype)
        return rows if self._scale is None else rows * self._scale


class FeedForward(nn.Module):
    """down(act(up(x))), or where up is gated down(act(gate(x)) · up(x)), gate and up merged into one matrix, gate
    first."""

    def __init__(self, sites: Mapping[Role, Weight], activation: Activation, context: LayerContext) -> None:
        super().__init__()
        self.up = Linear(sites[Role.UP], context, activation)
        self.down = Linear(sites[Role.DOWN], context)
        self._activation = activation

    def forward(self, stream: Stream, norm: Norm, following: Norm) -> None:
        """Norm, this, and onto the stream. ``following``: the norm behind it."""
        if self.down.takes_activation(stream):
            self.down.activated_onto(stream, self.up.normed(stream, norm, activates=False), self._activation)
        else:
            self.down.onto(stream, self.up.normed(stream, norm), following)
