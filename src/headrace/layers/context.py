"""What the layers of one decoder have in common.

What lives here: that. What may not: sizes, which differ from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels import Kernels
from headrace.parallel.group import Group
from headrace.spec import KVFormat


@dataclass(frozen=True, slots=True)
class LayerContext:
    """``composes``: products may take in what stands around them. ``kv``: how the cache holds keys and values; None: in
    ``dtype``. ``group``: the ranks that share the model; ``keys``: those that share the keys; None: there is one."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    composes: bool = False
    kv: KVFormat | None = None
    group: Group | None = None
    keys: Group | None = None
