"""What the layers of one decoder have in common.

What lives here: that. What may not: sizes, which differ from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels import Kernels
from headrace.quant import QuantMethod


@dataclass(frozen=True, slots=True)
class LayerContext:
    """``method``: the format that linear layers hold their weights in."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    method: QuantMethod
