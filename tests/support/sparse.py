"""Random sparse matrices, as a few weights that lie apart."""

from __future__ import annotations

import torch
from torch import Tensor


def entries(outs: int, ins: int, share: float) -> tuple[Tensor, dict[str, Tensor]]:
    """(the matrix, what ``add_sparse`` takes of it); row 0 has none, the last one all of its entries."""
    generator = torch.Generator().manual_seed(outs)
    mask = torch.rand(outs, ins, generator=generator) < share
    mask[0], mask[-1] = False, share > 0
    dense = torch.randn(outs, ins, generator=generator) * mask
    ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    return dense, {"ends": ends, "columns": mask.nonzero()[:, 1].int(), "values": dense[mask]}
