"""Between the host, rows and a step, on the device: the torch twins of writing the ids of new rows, of fetching what
the host has written for a step, of gathering its inputs from rows, and of writing picked tokens into them and for the
host.

What lives here: those four, and rows as kernels take and give them. What may not: what a row is (worker/rows.py), which rows take part, picking.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def plainly_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def rows_of(x: Tensor) -> Tensor:
    """[..., H] as [rows, H] with a contiguous last dimension; a view where possible."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def write_rows(
    token_ids: Tensor,  # [rows, length], int32, written
    ids: Tensor,  # [Σ lengths], int32: of each new row, one behind another
    row: Tensor,  # [n], int64, no two the same
    begin: Tensor,  # [n + 1], int32: where in ``ids`` each begins, and the end of the last
    longest: int,  # the most ids that one of them has, or more; no more than a row's length
) -> None:
    """Row ``row[i]`` begins with its ids from then on; what lies behind them stays."""
    for each, first, end in zip(row.tolist(), begin[:-1].tolist(), begin[1:].tolist(), strict=True):
        token_ids[each, : end - first] = ids[first:end]


def gather_inputs(
    token_ids: Tensor,  # [rows, length], int32: the tokens of every row
    table: Tensor,  # [rows, blocks], int32: the block table of every row, in one KV group
    row: Tensor,  # [chunks], int32: the row each chunk of the step belongs to
    chunk: Tensor,  # [tokens], int32: the chunk each packed token belongs to
    position: Tensor,  # [tokens], int32: its position in the sequence; -1: a token of no sequence
    context: Tensor,  # [chunks], int32: keys the chunk's last query sees
    block_size: int,
    width: int,  # blocks of the longest context, or more
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids [tokens] int64, positions [tokens] int64, slots [tokens] int64, block tables [chunks, width] int32).

    A token of no sequence has id 0, position 0 and slot -1. Entries of a block table beyond its chunk's context are
    anything.
    """
    real = (position >= 0).int()
    place, row = (position * real).long(), row.long()
    block_table = table[:, :width].index_select(0, row)
    of_row, chunk = row[chunk.long()], chunk.long()
    block = block_table[chunk, place // block_size].long()
    slots = (block * block_size + place % block_size + 1) * real - 1
    return token_ids[of_row, place].long() * real, place, slots, block_table


def store_tokens(
    token_ids: Tensor,  # [rows, length], int32, written
    row: Tensor,  # [n], int32
    place: Tensor,  # [n], int32: where in the row the token goes; beyond the row's length (and below 1): nowhere
    tokens: Tensor,  # [n], int64
    peak: Tensor,  # [n], float32: where it is not finite, the token is not usable
    ring: Tensor | None = None,  # [slots, n or more, 2], int32, written: where the host looks, else in what is returned
    turn: Tensor | None = None,  # [1], int32, with it: the slot after this step's
) -> Tensor:
    """Writes picked tokens into their rows, where the next step finds them, and (token, usable) for the host. Returns
    that, [n, 2] int32; with ``ring`` nothing of use."""
    at = place.long()
    inside = (at >= 1) & (at < token_ids.shape[1])
    at, row = torch.where(inside, at, 0), row.long()
    token_ids[row, at] = torch.where(inside, tokens.int(), token_ids[row, at])
    picked = torch.stack((tokens.int(), peak.isfinite().int()), dim=1)
    if ring is not None and turn is not None:
        ring[:, : len(picked)].index_copy_(0, (turn - 1).remainder(ring.shape[0]).long(), picked[None])
    return picked


def fetch_step(
    ring: Tensor,  # [slots, 7, width], int32: where the host writes
    turn: Tensor,  # [1], int32: the slot of this step, written: of the next one
    step: Tensor,  # [3, n], int32, written: row, position and context of each row of the step
    table: Tensor,  # [rows, blocks], int32, written: the block table of every row
) -> None:
    """Copies the first ``n`` columns of the slot's first three lines. The next three are edits of the table (row, index
    and block), no place of which is named twice; the last begins with their number."""
    slot = ring.index_select(0, turn.long())[0]
    step.copy_(slot[:3, : step.shape[1]])
    row, index, block = slot[3:6]
    places = torch.where(
        torch.arange(slot.shape[1], device=slot.device) < slot[6, 0], row.long() * table.shape[1] + index, table.numel()
    )
    table.copy_(
        torch.cat((table.flatten(), places.new_zeros(1).int())).index_copy_(0, places, block)[:-1].view_as(table)
    )
    turn.add_(1).remainder_(ring.shape[0])


def embedding(ids: Tensor, table: Tensor, scale: float | None) -> Tensor:
    """table[ids] · scale. ``ids`` [T], ``table`` [rows, H] → [T, H]; the product is rounded to the table's type."""
    rows = F.embedding(ids, table)
    return rows if scale is None else rows * scale
