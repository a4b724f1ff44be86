"""The plain layers of a decoder: norms, embeddings and the dense feed-forward.

What lives here: layers without a file of their own. What may not: attention, experts, kernels, families.

Layers choose their kernels when they are made. They compute after ``finish_loading`` has been called on each that has it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.kernels.around import MOST_ROWS, Around
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.layers.stream import Stream, added
from headrace.spec import Activation


def empty_parameter(context: LayerContext, *shape: int) -> nn.Parameter:
    """Memory for a weight that the loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=context.dtype, device=context.device), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, after adding the residual. ``offset`` is added to the weight once it is loaded.

    With an offset the sum is kept in float32: 1 + w in bfloat16 would round most of w away.
    """

    def __init__(self, size: int, eps: float, context: LayerContext, *, offset: float) -> None:
        super().__init__()
        self.weight = empty_parameter(context, size)
        self._eps = eps
        self._offset = offset
        self._scale: Tensor = self.weight.data  # [size]
        self._norm = context.kernels.choose("rms_norm", dtype=context.dtype, weight_dtype=torch.float32 if offset else context.dtype)

    def finish_loading(self) -> None:
        if self._offset:
            self.weight = nn.Parameter(self.weight.float() + self._offset, requires_grad=False)
        self._scale = self.weight.data

    @property
    def scale(self) -> Tensor:  # [size]
        """What normed values are multiplied by, for a kernel that does part of the norm."""
        return self._scale

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # [..., size] each
        """Returns (norm(x + residual), x + residual)."""
        normed: tuple[Tensor, Tensor] = self._norm(x, self._scale, self._eps, residual)
        return normed


class LayerNorm(nn.Module):
    """Layer norm with weight and bias over the last dimension, after adding the residual."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.weight = empty_parameter(context, size)
        self.bias = empty_parameter(context, size)
        self._eps = eps
        self._scale: Tensor = self.weight.data  # [size]
        self._shift: Tensor = self.bias.data  # [size]
        self._norm = context.kernels.choose("layer_norm", dtype=context.dtype)

    def finish_loading(self) -> None:
        self._scale, self._shift = self.weight.data, self.bias.data

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:  # [..., size] each
        """Returns (norm(x + residual), x + residual)."""
        normed: tuple[Tensor, Tensor] = self._norm(x, self._scale, self._shift, self._eps, residual)
        return normed


class Embedding(nn.Module):
    """A row of ``weight`` for each id, times ``scale`` (rounded to the weights' precision, as the models were trained)."""

    def __init__(self, rows: int, size: int, context: LayerContext, *, scale: float | None = None) -> None:
        super().__init__()
        self.weight = empty_parameter(context, rows, size)
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=context.dtype))
        self._lookup = context.kernels.choose("embedding", dtype=context.dtype)

    def forward(self, ids: Tensor) -> Tensor:  # [tokens], int64 → [tokens, size]
        rows: Tensor = self._lookup(ids, self.weight, self._scale)
        return rows


class FeedForward(nn.Module):
    """down(act(up(x))), or with ``gated`` down(act(gate(x)) · up(x)), gate and up merged into one matrix, gate first.

    ``around``: its products are computed with what stands around them, too, where there is a kernel for it.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: Activation,
        context: LayerContext,
        *,
        gated: bool,
        bias: bool,
        around: bool = False,
    ) -> None:
        super().__init__()
        width = 2 * inner_size if gated else inner_size
        self.up = Linear(hidden_size, width, context, bias=bias, around=around, gated=gated)
        self.down = Linear(inner_size, hidden_size, context, bias=bias, around=around, adds=around)
        self._activation = activation
        self._act = context.kernels.choose("gated_activation" if gated else "activation", dtype=context.dtype)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hidden] → [tokens, hidden]
        return self.down.forward(self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:  # [tokens, hidden] → [tokens, inner]
        through_gate = self.up.through_gate if len(x) > MOST_ROWS else None
        inner = None if through_gate is None else through_gate(x, self._activation)
        if inner is None:
            inner = self._act(self.up.forward(x), self._activation)
        return inner

    def forward_added(self, x: Tensor, residual: Tensor) -> Tensor:  # [tokens, hidden] each
        """The residual, which may be overwritten, with this layer's result added."""
        assert self.down.added is not None
        return self.down.added(self._inner(x), residual)

    @property
    def fuses(self) -> bool:
        """Whether ``forward_fused`` can be called."""
        return self.up.fused is not None and self.down.fused is not None

    def forward_fused(self, stream: Stream, scale: Tensor) -> Stream:
        """The stream with this layer's result added, ready for the norm whose weight is ``scale``."""
        assert self.up.fused is not None and self.down.fused is not None
        inner, _, _ = self.up.fused(stream.x, Around(stream.squares, stream.eps, gate=self._activation))
        return added(self.down.fused, inner, stream, scale)
