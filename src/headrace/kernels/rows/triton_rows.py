# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Between the host, rows and a step: one launch writes the ids of new rows, one fetches what the host wrote for a step,
one gathers a step's inputs, one writes its tokens back.

What lives here: these kernels. What may not: what a row is (worker/rows.py), which rows take part, picking.

    program        0 … chunks − 1                     then                                     rows on the device are
    read by index:
    work           one chunk's block table, copied    _TOKENS packed tokens each: id,          a captured step finds
    what the host
                   as far as its context needs it     position, slot                           edited since the capture
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable

_TOKENS = 128
_BLOCKS = 256  # entries of a block table copied at once
_IDS = 1024  # of a new row, copied by one program


@launchable(do_not_specialize=["ids_row"])
def _write_kernel(ids_ptr, from_ptr, row_ptr, begin_ptr, ids_row, IDS: tl.constexpr):
    new, lane = tl.program_id(0), tl.program_id(1) * IDS + tl.arange(0, IDS)
    begin = tl.load(begin_ptr + new)
    inside = lane < tl.load(begin_ptr + new + 1) - begin
    own = tl.load(from_ptr + begin + lane, mask=inside, other=0)
    tl.store(ids_ptr + tl.load(row_ptr + new) * ids_row + lane, own, mask=inside)


def write_rows(token_ids: Tensor, ids: Tensor, row: Tensor, begin: Tensor, longest: int) -> None:
    """As kernels/rows/reference.py says. Rows and lengths are not checked."""
    if longest:
        grid = (row.shape[0], triton.cdiv(longest, _IDS))
        _write_kernel[grid](token_ids, ids, row, begin, token_ids.stride(0), IDS=_IDS, num_warps=4)


@launchable(do_not_specialize=["ids_ptr", "ids_row", "table_row", "out_row", "chunks", "tokens"])
def _gather_kernel(
    ids_ptr, table_ptr, row_ptr, chunk_ptr, position_ptr, context_ptr, out_ids_ptr, out_position_ptr, slots_ptr, out_table_ptr,
    ids_row, table_row, out_row, chunks, tokens, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
    token_ids: Tensor,
    table: Tensor,
    row: Tensor,
    chunk: Tensor,
    position: Tensor,
    context: Tensor,
    block_size: int,
    width: int,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As kernels/rows/reference.py says. Rows, chunks and positions are not checked.

    ``pdl``: what is launched early behind it may run before it has ended. Attention looks at block tables
    before it waits, and may: its plan is made by a launch that is not early.
    """
    chunks, tokens, device = row.shape[0], position.shape[0], row.device
    ids, positions, slots = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(3))  # each aligned
    block_table = torch.empty((chunks, width), dtype=torch.int32, device=device)
    _gather_kernel[(chunks + triton.cdiv(tokens, _TOKENS),)](
        token_ids, table, row, chunk, position, context, ids, positions, slots, block_table,
        token_ids.stride(0), table.stride(0), width, chunks, tokens, BLOCK_SIZE=block_size, TOKENS=_TOKENS, BLOCKS=_BLOCKS,
        PDL=pdl, num_warps=2, **dependent(pdl),
    )  # fmt: skip
    return ids, positions, slots, block_table


@launchable(do_not_specialize=["ids_row", "length", "slots", "out_slot", "count"])
def _store_kernel(
    ids_ptr, row_ptr, place_ptr, tokens_ptr, peak_ptr, out_ptr, turn_ptr, ids_row, length, slots, out_slot, count, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = each < count
    place = tl.load(place_ptr + each, mask=live, other=-1)
    row = tl.load(row_ptr + each, mask=live, other=0).to(tl.int64)
    token = tl.load(tokens_ptr + each, mask=live, other=0).to(tl.int32)
    peak = tl.load(peak_ptr + each, mask=live, other=0.0)
    tl.store(ids_ptr + row * ids_row + place, token, mask=live & (place >= 1) & (place < length))
    out = out_ptr + (tl.load(turn_ptr) + slots - 1) % slots * out_slot
    tl.store(out + 2 * each, token, mask=live)
    tl.store(out + 2 * each + 1, (peak - peak == 0.0).to(tl.int32), mask=live)  # NaN of what is not finite


def store_tokens(
    token_ids: Tensor,
    row: Tensor,
    place: Tensor,
    tokens: Tensor,
    peak: Tensor,
    ring: Tensor | None = None,
    turn: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """As kernels/rows/reference.py says."""
    count = row.shape[0]
    picked = torch.empty((count, 2), dtype=torch.int32, device=row.device) if ring is None else ring
    slots, slot = (1, 0) if ring is None else (ring.shape[0], ring.stride(0))
    _store_kernel[(triton.cdiv(count, 128),)](
        token_ids, row, place, tokens, peak, picked, row if turn is None else turn, token_ids.stride(0), token_ids.shape[1],
        slots, slot, count, BLOCK=128, PDL=pdl, num_warps=1, **dependent(pdl),
    )  # fmt: skip
    return picked


@launchable(do_not_specialize=["slots", "ring_slot", "ring_row", "step_row", "table_row", "count"])
def _fetch_kernel(
    ring_ptr,
    turn_ptr,
    step_ptr,
    table_ptr,
    slots,
    ring_slot,
    ring_row,
    step_row,
    table_row,
    count,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    turn = tl.load(turn_ptr)
    tl.debug_barrier()  # every thread has read it before one writes it
    # The host's memory, which it changes between launches: never out of a cache.
    slot_ptr = ring_ptr + turn * ring_slot
    edits = tl.load(slot_ptr + 6 * ring_row, volatile=True)
    line = tl.arange(0, 4)
    for begin in range(0, count, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (line < 3)[:, None] & (column < count)[None, :]
        value = tl.load(slot_ptr + line[:, None] * ring_row + column[None, :], mask=inside, other=0, volatile=True)
        tl.store(step_ptr + line[:, None] * step_row + column[None, :], value, mask=inside)
    for begin in range(0, edits, COLUMNS):
        each = begin + tl.arange(0, COLUMNS)
        row = tl.load(slot_ptr + 3 * ring_row + each, mask=each < edits, other=0, volatile=True)
        index = tl.load(slot_ptr + 4 * ring_row + each, mask=each < edits, other=0, volatile=True)
        block = tl.load(slot_ptr + 5 * ring_row + each, mask=each < edits, other=0, volatile=True)
        tl.store(table_ptr + row.to(tl.int64) * table_row + index, block, mask=each < edits)
    tl.store(turn_ptr, (turn + 1) % slots)


def fetch_step(ring: Tensor, turn: Tensor, step: Tensor, table: Tensor, *, pdl: bool = False) -> None:
    """As kernels/rows/reference.py says. It begins when everything before it has ended: what comes after may look at
    nothing but this step."""
    _fetch_kernel[(1,)](
        ring, turn, step, table, ring.shape[0], ring.stride(0), ring.stride(1), step.stride(0), table.stride(0), step.shape[1],
        COLUMNS=256, PDL=pdl, num_warps=4,
    )  # fmt: skip
