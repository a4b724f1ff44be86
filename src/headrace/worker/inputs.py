"""The tensors of one step, gathered from rows.

What lives here: packing sequences one after another (or padding them to the longest, to show what packing is worth), positions,
slots, and which packed token's logits each sample needs. What may not: row state, computing, sampling.

    packed tokens       | sequence 0 . . . | sequence 1 | sequence 2 . . . . . |
    query_start           0                  4            5                      11
    padded to longest   | - - 0 . . . | - - - - - 1 | 2 . . . . . |              "-": a dummy token; it writes no KV and
    query_start           0             6             12            18           nothing is read from its output
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from headrace.layers.inputs import AttentionInputs, ForwardInputs
from headrace.request import StepPlan
from headrace.worker.rows import Ints, Rows, Staging


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each planned chunk lies among the packed tokens; on the host. w = chunks, t = packed tokens."""

    query_start: Ints  # [w + 1]
    context: Ints  # [w]: keys the chunk's last query sees
    chunk: Ints  # [t]: the chunk each packed token belongs to
    position: Ints  # [t]: its position in the sequence; 0 for dummies
    real: Ints  # [t]: 1, or 0 for dummies

    @property
    def last(self) -> Ints:  # [w]: the packed index of each chunk's last token
        return self.query_start[1:] - 1


def pack(plan: StepPlan, *, padded: bool) -> Packing:
    starts, counts = np.asarray(plan.starts, dtype=np.int32), np.asarray(plan.counts, dtype=np.int32)
    lengths = np.full_like(counts, counts.max()) if padded else counts
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_start[1:])
    chunk = np.repeat(np.arange(len(counts), dtype=np.int32), lengths)
    context = starts + counts
    # The last token of a chunk sits at context - 1, and each packed token before it one position lower.
    offset = np.arange(query_start[-1], dtype=np.int32) - query_start[1:][chunk]
    position = context[chunk] + offset
    real = (position >= starts[chunk]).astype(np.int32)
    return Packing(query_start, context, chunk, position * real, real)


def forward_inputs(plan: StepPlan, rows: Rows, packing: Packing) -> ForwardInputs:
    """Ships what the plan says in one copy and gathers the rest from rows on the device. At least one chunk."""
    samples = np.asarray(plan.sample_work, dtype=np.int32)
    staging = Staging(rows.device)
    planned = np.asarray(plan.rows, dtype=np.int32)
    for part in (planned, packing.query_start, packing.context, packing.chunk, packing.position, packing.real, packing.last[samples]):
        staging.put(part)
    row, query_start, context, chunk, position, real, last = staging.ship()
    row, chunk, position = row.long(), chunk.long(), position.long()
    longest_query, longest_context = int(np.diff(packing.query_start).max()), int(packing.context.max())
    attention = []
    for table, block_size in zip(rows.tables, rows.block_sizes, strict=True):
        block_table = table[:, : -(-longest_context // block_size)].index_select(0, row)
        slots = _slots(block_table, chunk, position, real, block_size)
        attention.append(AttentionInputs(block_table, query_start, context, slots, block_size, longest_query, longest_context))
    token_ids = rows.token_ids[row[chunk], position].long() * real
    return ForwardInputs(token_ids, position, tuple(attention), last.long())


def _slots(block_table: Tensor, chunk: Tensor, position: Tensor, real: Tensor, block_size: int) -> Tensor:
    """[tokens], int64: where each token's K and V go; -1 for dummies."""
    block = block_table[chunk, position // block_size].long()
    return (block * block_size + position % block_size + 1) * real - 1
