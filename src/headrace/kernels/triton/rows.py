# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Between rows and a step: one launch gathers a step's inputs, one writes its tokens back.

What lives here: both kernels. What may not: what a row is (worker/rows.py), which rows take part, picking.

    program        0 … chunks − 1                     then                                     rows on the device are read by index:
    work           one chunk's block table, copied    _TOKENS packed tokens each: id,          a captured step finds what the host
                   as far as its context needs it     position, slot                           edited since the capture
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.triton.launch import launchable

_TOKENS = 128
_BLOCKS = 256  # entries of a block table copied at once


@launchable(do_not_specialize=["ids_row", "table_row", "out_row", "chunks", "tokens"])
def _gather_kernel(
    ids_ptr, table_ptr, row_ptr, chunk_ptr, position_ptr, context_ptr, out_ids_ptr, out_position_ptr, slots_ptr, out_table_ptr,
    ids_row, table_row, out_row, chunks, tokens, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < chunks:
        source = tl.load(row_ptr + program).to(tl.int64)
        count = tl.minimum(tl.cdiv(tl.load(context_ptr + program), BLOCK_SIZE), out_row)
        lane = tl.arange(0, BLOCKS)
        for begin in range(0, count, BLOCKS):
            inside = begin + lane < count
            entry = tl.load(table_ptr + source * table_row + begin + lane, mask=inside, other=0)
            tl.store(out_table_ptr + program.to(tl.int64) * out_row + begin + lane, entry, mask=inside)
    else:
        token = (program - chunks) * TOKENS + tl.arange(0, TOKENS)
        live = token < tokens
        place = tl.load(position_ptr + token, mask=live, other=-1)
        real = place >= 0
        row = tl.load(row_ptr + tl.load(chunk_ptr + token, mask=real, other=0), mask=real, other=0).to(tl.int64)
        own = tl.load(ids_ptr + row * ids_row + place, mask=real, other=0)
        block = tl.load(table_ptr + row * table_row + place // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        tl.store(out_ids_ptr + token, own.to(tl.int64), mask=live)
        tl.store(out_position_ptr + token, tl.maximum(place, 0).to(tl.int64), mask=live)
        tl.store(slots_ptr + token, tl.where(real, block * BLOCK_SIZE + place % BLOCK_SIZE, -1), mask=live)


def gather_inputs(
    token_ids: Tensor, table: Tensor, row: Tensor, chunk: Tensor, position: Tensor, context: Tensor, block_size: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As kernels/rows.py says. Rows, chunks and positions are not checked."""
    chunks, tokens, device = row.shape[0], position.shape[0], row.device
    ids, positions, slots = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(3))  # each aligned
    block_table = torch.empty((chunks, width), dtype=torch.int32, device=device)
    _gather_kernel[(chunks + triton.cdiv(tokens, _TOKENS),)](
        token_ids, table, row, chunk, position, context, ids, positions, slots, block_table,
        token_ids.stride(0), table.stride(0), width, chunks, tokens, BLOCK_SIZE=block_size, TOKENS=_TOKENS, BLOCKS=_BLOCKS, num_warps=2,
    )  # fmt: skip
    return ids, positions, slots, block_table


@launchable(do_not_specialize=["ids_row", "length", "count"])
def _store_kernel(ids_ptr, row_ptr, place_ptr, tokens_ptr, usable_ptr, out_ptr, ids_row, length, count, BLOCK: tl.constexpr):
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = each < count
    place = tl.load(place_ptr + each, mask=live, other=-1)
    row = tl.load(row_ptr + each, mask=live, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + each, mask=live, other=0).to(tl.int32)
    usable = tl.load(usable_ptr + each, mask=live, other=0).to(tl.int32)
    tl.store(ids_ptr + row * ids_row + place, token, mask=live & (place >= 1) & (place < length))
    tl.store(out_ptr + 2 * each, token, mask=live)
    tl.store(out_ptr + 2 * each + 1, usable, mask=live)


def store_tokens(token_ids: Tensor, row: Tensor, place: Tensor, tokens: Tensor, usable: Tensor) -> Tensor:
    """As kernels/rows.py says."""
    count = row.shape[0]
    picked = torch.empty((count, 2), dtype=torch.int32, device=row.device)
    _store_kernel[(triton.cdiv(count, 128),)](
        token_ids, row, place, tokens, usable, picked, token_ids.stride(0), token_ids.shape[1], count, BLOCK=128, num_warps=1
    )
    return picked
