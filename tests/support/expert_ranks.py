"""What ranks that hold whole experts compute of one sparse feed-forward.

What lives here: their parts, for tests of kernels. What may not: tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headrace.layers.moe import places_of
from headrace.parallel.placement import held_of
from headrace.spec import MoESpec

UNEVEN = ((3, 0), (2,), (1, 4, 5))  # of 6 experts
COPIED = ((3, 0, 1), (2, 1), (1, 4, 5, 0))  # one on all ranks, one on two


def parts(layer: Sequence[Sequence[int]], num_experts: int) -> Iterator[tuple[list[int], Tensor]]:
    """(experts of each rank, where rows find them)."""
    for rank in range(len(layer)):
        held = held_of(tuple(map(tuple, layer)), rank)
        moe = MoESpec(num_experts, 1, 1, renormalize=True, held=held)
        yield list(moe.experts), places_of(moe, torch.device("cpu"))
