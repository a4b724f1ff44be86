"""The twins of what adapters add to a product and to an embedding.

What lives here: the formulas in plain torch. What may not: anything that is fast at the cost of being plain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.inputs import AdapterRows


def add_deltas(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    parts: Sequence[int],
    rows: AdapterRows,
    gains: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """y[i] += concat over parts p of (x[i] · a[s, p]ᵀ) · b[s]ₚ for each row i of slot s, in place (BGMV for few rows a
    slot, SGMV for many: Punica, Chen et al. 2023).

    ``y`` [T, Σ parts], ``x`` [T, ins], ``a`` [slots, parts, max_rank, ins], ``b`` [slots, max_rank, Σ parts], all of
    one type. ``ranks`` [slots, parts], int32: of the slot's adapter there; 0: it leaves that part alone. ``gains``
    [slots, 2, Σ parts], float32: where the adapter changes a part, y is multiplied by the first and the second is added
    before (DoRA). ``squares`` [pieces, T], float32: x is still to be divided by √(their sum / ins + eps), as in
    ``Around``.
    """
    grouped = rows.by_slot()
    if grouped is None:
        return
    if squares is not None:
        x = (x.float() * torch.rsqrt(squares.sum(0) / x.shape[1] + eps)[:, None]).to(x.dtype)
    for slot, begin, end in grouped.spans:
        chosen, first = grouped.order[begin:end], 0
        picked = x[chosen]
        for part, outs in enumerate(parts):
            last = first + outs
            if rank := int(ranks[slot, part]):
                inner = picked @ a[slot, part, :rank].T
                found = y[chosen, first:last].float()
                if gains is not None:
                    gain, shift = gains[slot, :, first:last]
                    found = found * gain + shift
                y[chosen, first:last] = (found + inner @ b[slot, :rank, first:last]).to(y.dtype)
            first = last


def look_up_deltas(
    y: Tensor, ids: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scale: float | None, rows: AdapterRows
) -> None:
    """y[i] += scale · a[s, ids[i]] · b[s] for each row i of slot s, in place.

    ``y`` [T, outs], ``ids`` [T], int64, ``a`` [slots, rows, max_rank], ``b`` [slots, max_rank, outs], ``ranks``
    [slots, 1], int32.
    """
    grouped = rows.by_slot()
    for slot, begin, end in () if grouped is None else grouped.spans:
        if rank := int(ranks[slot, 0]):
            chosen = grouped.order[begin:end] if grouped is not None else ids
            found = a[slot, ids[chosen], :rank] @ b[slot, :rank]
            y.index_add_(0, chosen, found if scale is None else found * scale)
