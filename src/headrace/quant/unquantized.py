"""Weights as they are: float32, bfloat16 or float16.

What lives here: the plain QuantMethod. What may not: kernels (``Kernels`` chooses), file formats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.kernels import Kernels
from headrace.quant import Applies, Apply, ApplyAdded, ApplyFused, ApplyGated, LinearShape


class Unquantized:
    """One weight [out, in] and perhaps a bias [out]."""

    name = "unquantized"

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        weight = torch.empty(shape.out_features, shape.in_features, dtype=shape.dtype, device=shape.device)
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        bias = nn.Parameter(torch.empty(shape.out_features, dtype=shape.dtype, device=shape.device), requires_grad=False) if shape.bias else None
        layer.register_parameter("bias", bias)

    def load(self, layer: nn.Module, shape: LinearShape, kernels: Kernels, *, shared: bool) -> Applies:
        facts: dict[str, Any] = {"dtype": shape.dtype, "in_features": shape.in_features, "out_features": shape.out_features}
        weight, bias = layer.weight.data, None if layer.bias is None else layer.bias.data
        fuse = kernels.offer("fused_linear", gated=shape.gated, **facts) if shape.around else None
        fused: ApplyFused | None = None if fuse is None else fuse(weight, bias)
        gate = kernels.offer("gated_linear", **facts) if shape.gated and bias is None else None
        gated: ApplyGated | None = None if gate is None else gate(weight, bias)
        add = kernels.offer("added_linear", **facts) if shape.added else None
        added: ApplyAdded | None = None if add is None else add(weight, bias)
        apply: Apply = kernels.choose("linear", shared_weight=shared, fused=fused is not None, **facts)(weight, bias)
        layer.register_parameter("weight", None)  # the kernel holds what it needs: this storage, or its own form of it
        layer.register_parameter("bias", None)
        return Applies(apply, fused, gated, added, getattr(apply, "num_bytes", None))
