"""The linear layer: a shape and a QuantMethod.

What lives here: Linear. What may not: weight formats (quant/), kernels, reading checkpoints.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.layers.context import LayerContext
from headrace.quant import Applies, Apply, ApplyAdded, ApplyFused, ApplyGated, LinearShape


class Linear(nn.Module):
    """y = x · Wᵀ (+ bias). ``.weight`` [out, in] and ``.bias`` [out] are there to be filled until ``finish_loading``.

    ``around``: once loading has finished ``fused`` computes it with what stands around it, for few rows, or is None where nobody can.
    ``gated``: with a gate, the first half of the rows; then ``through_gate`` may be there, too. ``adds``: ``added`` adds it to a residual,
    for many rows, or is None.
    ``tie_weight`` makes the layer read another layer's tensor (a tied head) and hold none of its own.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: LayerContext,
        *,
        bias: bool,
        around: bool = False,
        gated: bool = False,
        adds: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__()
        if (rank, world) != (0, 1):
            raise ConfigError(f"A linear layer was asked to be part {rank} of {world}, but layers are not split yet; use one device.")
        self.shape = LinearShape(in_features, out_features, bias, context.dtype, context.device, around, gated, adds)
        self.weight_bytes = 0  # held by this layer beyond its parameters, once loading has finished
        self._context = context
        self._shared = False
        self._applies = Applies(self._unfinished)
        self._apply_weight: Apply = self._unfinished
        context.method.create(self, self.shape)

    def tie_weight(self, weight: nn.Parameter) -> None:  # [out, in]
        """Reads ``weight``, which stays its owner's (and is named once by ``named_parameters``). Before ``finish_loading``."""
        self.weight = weight
        self._shared = True

    def finish_loading(self) -> None:
        """Packs the filled parameters for the chosen kernel and drops what it does not need. Once."""
        held = 0 if self._shared else sum(p.numel() * p.element_size() for p in self.parameters(recurse=False))
        self._applies = self._context.method.load(self, self.shape, self._context.kernels, shared=self._shared)
        self._apply_weight = self._applies.plain
        self.weight_bytes = held if self._applies.held is None else self._applies.held

    @property
    def fused(self) -> ApplyFused | None:
        return self._applies.fused

    @property
    def through_gate(self) -> ApplyGated | None:
        return self._applies.gated

    @property
    def added(self) -> ApplyAdded | None:
        return self._applies.added

    def forward(self, x: Tensor) -> Tensor:  # [..., in] → [..., out]
        return self._apply_weight(x)

    def _unfinished(self, x: Tensor) -> Tensor:
        assert self.weight is not None, "the method created no plain weight, so the layer computes only once loading has finished"
        return F.linear(x, self.weight, self.bias)
