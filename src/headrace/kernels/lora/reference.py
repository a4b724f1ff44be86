"""The twins of what adapters add to a product and to an embedding.

What lives here: the formulas in plain torch. What may not: anything that is fast at the cost of being plain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.inputs import AdapterRows, SlotFactors


def add_deltas(
    y: Tensor,
    x: Tensor,
    factors: SlotFactors,
    parts: Sequence[int],
    rows: AdapterRows,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """y[i] += concat over parts p of (x[i] · a[s, p]ᵀ) · b[s, p] for each row i of slot s, in place (BGMV for few rows
    a slot, SGMV for many: Punica, Chen et al. 2023).

    ``y`` [T, Σ parts], ``x`` [T, ins], and a [rank, ins] and b [rank, outs] of ``factors``, all of one type. Rank 0: the
    adapter leaves that part alone. Gains, where there are some: y is multiplied by the first and the second is added
    before (DoRA). ``squares`` [pieces, T], float32: x is still to be divided by √(their sum / ins + eps).
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
            if rank := int(factors.ranks[slot, part]):
                inner = picked @ factors.rows(factors.a[slot, part, :rank], x.shape[1]).T
                found = y[chosen, first:last].float()
                if factors.gained and int(factors.gains[slot, part, 0, 0]) >= 0:
                    gain, shift = factors.floats.rows(factors.gains[slot, part], outs)
                    found = found * gain + shift
                y[chosen, first:last] = (found + inner @ factors.rows(factors.b[slot, part, :rank], outs)).to(y.dtype)
            first = last


def look_up_deltas(y: Tensor, ids: Tensor, factors: SlotFactors, scale: float | None, rows: AdapterRows) -> None:
    """y[i] += scale · a[s][:, ids[i]]ᵀ · b[s] for each row i of slot s, in place.

    ``y`` [T, outs], ``ids`` [T], int64, and a [rank, rows] and b [rank, outs] of ``factors``, of one part.
    """
    grouped = rows.by_slot()
    for slot, begin, end in () if grouped is None else grouped.spans:
        if rank := int(factors.ranks[slot, 0]):
            chosen = grouped.order[begin:end] if grouped is not None else ids
            at = (
                factors.a[slot, 0, :rank].long()[:, ids[chosen] // factors.chunk] * factors.unit
                + ids[chosen] % factors.chunk
            )
            found = factors.pool[at].T @ factors.rows(factors.b[slot, 0, :rank], y.shape[1])
            y.index_add_(0, chosen, found if scale is None else found * scale)
