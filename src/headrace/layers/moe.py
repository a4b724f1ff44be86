"""The sparse feed-forward: a router and its experts.

What lives here: the layer that holds them. What may not: routing and expert products (kernels), families.
"""

from __future__ import annotations

from torch import Tensor, nn

from headrace.layers.basic import empty_parameter
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.spec import Activation, MoESpec


class SparseFeedForward(nn.Module):
    """The ``top_k`` experts the router prefers for each token, weighted by its softmax (Shazeer et al. 2017)."""

    def __init__(self, hidden_size: int, moe: MoESpec, activation: Activation, context: LayerContext) -> None:
        super().__init__()
        inner = moe.intermediate_size
        self.router = Linear(hidden_size, moe.num_experts, context, bias=False)
        self.gate_up = empty_parameter(context, moe.num_experts, 2 * inner, hidden_size)
        self.down = empty_parameter(context, moe.num_experts, hidden_size, inner)
        self._spec = moe
        self._activation = activation
        self._moe = context.kernels.choose("moe", dtype=context.dtype, num_experts=moe.num_experts, top_k=moe.top_k)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, hidden] → [tokens, hidden]
        spec = self._spec
        out: Tensor = self._moe(x, self.router.forward(x), self.gate_up, self.down, spec.top_k, spec.renormalize, self._activation)
        return out
