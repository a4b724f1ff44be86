"""The twin of what adapters add to a product.

What lives here: the formula in plain torch. What may not: anything that is fast at the cost of being plain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.lora.inputs import AdapterRows


def add_deltas(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, parts: Sequence[int], rows: AdapterRows) -> None:
    """y[i] += concat over parts p of (x[i] · a[s, p]ᵀ) · b[s]ₚ for each row i of slot s, in place (BGMV for few rows a
    slot, SGMV for many: Punica, Chen et al. 2023).

    ``y`` [T, Σ parts], ``x`` [T, ins], ``a`` [slots, parts, max_rank, ins], ``b`` [slots, max_rank, Σ parts], all of one
    type. ``ranks`` [slots], int32, on the host: of the slot's adapter at this weight; 0: it leaves the weight alone.
    """
    for slot, begin, end in rows.spans:
        rank = int(ranks[slot])
        if not rank:
            continue
        chosen = rows.order[begin:end]
        picked, first, deltas = x[chosen], 0, []
        for part, outs in enumerate(parts):
            inner = picked @ a[slot, part, :rank].T
            deltas.append(inner @ b[slot, :rank, first : first + outs])
            first += outs
        y.index_add_(0, chosen, torch.cat(deltas, 1) if len(deltas) > 1 else deltas[0])
