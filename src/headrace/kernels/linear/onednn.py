"""Linear layers over weights packed once for oneDNN.

What lives here: the packed linear. What may not: other operations, C of our own.

The two torch operations are private, so they are looked for, and declined without. One packed form serves every number
of rows: hints of none, 16 and 512 rows gave the same speed at 1, 16 and 512 rows; a hint of 1 costs float32 half its
bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.candidate import CallSite, Declined, WeightFacts

ROWS_HINT = 512


def create_linear(site: CallSite[WeightFacts]) -> Any:
    dtype = site.facts.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return Declined(f"packs float32 and bfloat16, not {dtype}")
    if not (hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return Declined("this torch has no mkldnn._reorder_linear_weight and mkldnn._linear_pointwise")
    if not torch.backends.mkldnn.is_available():
        return Declined("this torch was built without oneDNN")
    if (refusal := _refusal(dtype)) is not None:
        return Declined(f"oneDNN does not pack {dtype} on this CPU: {refusal}")
    if site.facts.shared:
        return Declined("the weight is another layer's too, and packing would keep a second copy of it")
    return pack


@cache
def _refusal(dtype: torch.dtype) -> str | None:
    """What it says to a small weight: which CPUs it takes depends on the element type."""
    try:
        pack(torch.zeros(16, 16, dtype=dtype), None)(torch.zeros(1, 16, dtype=dtype))
    except RuntimeError as error:
        return (str(error).splitlines() or [repr(error)])[0]
    return None


def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
    apply = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        y: Tensor = apply(x, packed, bias, "none", [], "")
        return y

    return linear
