"""What the layers of one decoder have in common.

What lives here: that. What may not: sizes, which differ from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.kernels import Kernels
from headrace.layers.shared_rows import NONE_SHARED, Sharing
from headrace.parallel.group import Group
from headrace.spec import KVFormat


@dataclass(frozen=True, slots=True)
class LayerContext:
    """``composes``: GEMMs may take in what stands around them; ``sparse``: every layer has experts, whose few rows
    alone do. ``kv``: how the cache holds keys and values; None: in
    ``dtype``. ``group``: the ranks that share the model; ``keys``: those that share the keys; ``experts``
    (Survivors): those that hold other experts and may die; None: there is one.
    ``sharing``: when ranks share rows out. ``weights``: "meta", where parameters get their memory later."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    composes: bool = False
    sparse: bool = False
    kv: KVFormat | None = None
    group: Group | None = None
    keys: Group | None = None
    experts: Any = None
    weights: torch.device | None = None
    sharing: Sharing = NONE_SHARED


def empty_parameter(context: LayerContext, *shape: int) -> nn.Parameter:
    """Memory for a weight that the loader fills."""
    place = context.weights or context.device
    return nn.Parameter(torch.empty(shape, dtype=context.dtype, device=place), requires_grad=False)
