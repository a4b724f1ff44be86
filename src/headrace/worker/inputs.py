"""The tensors of one step, gathered from rows.

What lives here: packing sequences one after another (or padding them to the longest, to show what packing is worth),
positions, slots, and which packed token's logits each sample needs. What may not: row state, computing, sampling.

    packed tokens       | sequence 0 . . . | sequence 1 | sequence 2 . . . . . |
    query_start           0                  4            5                      11
    padded to longest   | - - 0 . . . | - - - - - 1 | 2 . . . . . |              "-": a dummy token; it writes no KV and
    query_start           0             6             12            18           nothing is read from its output
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.candidate import Facts
from headrace.kernels.inputs import (
    MOST_FEW,
    AdapterRows,
    Alone,
    AttentionInputs,
    ForwardInputs,
    TreeInputs,
    adapter_rows,
)
from headrace.kernels.operations import GATHER_INPUTS
from headrace.request import StepPlan
from headrace.worker.rows import Ints, Rows, ship_all

LEAST_LEADING = 16  # sequences of one query before prompts, from which on they are worth a launch that takes no others
# Tokens of a step, by device, from which on those that are wanted attend by themselves in the last layer: of fewer, all
# do as quickly.
LEAST_ALONE = {"cpu": 128, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class PackedTree:
    """Of a step in which chunks are trees, as ``TreeInputs`` has them: ``place``, where each packed token's id and key
    lie, which is its position elsewhere."""

    place: Ints  # [t]
    first: Ints  # [w]
    ancestors: NDArray[np.int64]  # [t]


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each planned chunk lies among the packed tokens; on the host. w = chunks, t = packed tokens."""

    query_start: Ints  # [w + 1]
    context: Ints  # [w]: keys the chunk's last query sees
    chunk: Ints  # [t]: the chunk each packed token belongs to
    position: Ints  # [t]: its position in the sequence; -1 for dummies
    # [n]: the packed tokens whose hidden states are computed to the end, ascending; None: all
    wanted: Ints | None = None
    tree: PackedTree | None = None

    @property
    def last(self) -> Ints:  # [w]: the packed index of each chunk's last token
        return self.query_start[1:] - 1

    @property
    def alone(self) -> tuple[Ints, Ints, Ints]:
        """As ``Alone`` has them: chunks, contexts and query starts of the wanted tokens."""
        assert self.wanted is not None
        return self.chunk[self.wanted], self.position[self.wanted] + 1, np.arange(len(self.wanted) + 1, dtype=np.int32)

    def sampled(self, plan: StepPlan) -> Ints:  # [samples]
        """The packed token whose logits each of the plan's samples reads."""
        tokens = self.last[np.asarray(plan.sample_work, dtype=np.int32)]
        return tokens - np.asarray(plan.sample_back, dtype=np.int32) if plan.sample_back else tokens

    def begun(self, plan: StepPlan) -> Ints:  # [samples]
        """The packed token that begins the chunk of each."""
        work = np.asarray(plan.sample_work, dtype=np.int32)
        begun: Ints = self.last[work] + 1 - np.asarray(plan.counts, dtype=np.int32)[work]
        return begun

    def hidden_rows(self, tokens: Ints) -> Ints:
        """Where the hidden states of these packed tokens lie among those that were computed."""
        return tokens if self.wanted is None else np.searchsorted(self.wanted, tokens).astype(np.int32)

    @property
    def leading(self) -> int:
        """As AttentionInputs has it; 0, too, where they are few, or all there are. Graphs do without: last bits may
        differ."""
        lengths = np.diff(self.query_start)
        longer = np.flatnonzero(lengths != 1)
        if not len(longer) or longer[0] < LEAST_LEADING or (lengths[longer[0] :] <= MOST_FEW).any():
            return 0
        return int(longer[0])


def pack(plan: StepPlan, *, padded: bool, prune: bool = False, first: bool = False) -> Packing:
    """``prune``: only hidden states that are sampled from are wanted, or with ``first`` those that begin their chunks.
    A step that scores prompts wants all, and so does one whose chunks are single tokens: graphs compute those, sampled
    or not."""
    packing = _pack(plan, padded)
    if not prune or plan.prompt_logprobs or len(packing.chunk) == len(plan.rows):
        return packing
    wanted = np.unique(packing.begun(plan) if first else packing.sampled(plan))
    # kernels take no empty tensors
    return replace(packing, wanted=wanted if len(wanted) else np.zeros(1, dtype=np.int32))


def _pack(plan: StepPlan, padded: bool) -> Packing:
    starts, counts = np.asarray(plan.starts, dtype=np.int32), np.asarray(plan.counts, dtype=np.int32)
    if (counts == 1).all():  # a decode step: nothing to lay out
        every = np.arange(len(counts) + 1, dtype=np.int32)
        return Packing(every, starts + 1, every[:-1], starts)
    lengths = np.full_like(counts, counts.max()) if padded else counts
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_start[1:])
    chunk = np.repeat(np.arange(len(counts), dtype=np.int32), lengths)
    context = starts + counts
    # The last token of a chunk sits at context - 1, and each packed token before it one position lower.
    offset = np.arange(query_start[-1], dtype=np.int32) - query_start[1:][chunk]
    position = context[chunk] + offset
    return Packing(query_start, context, chunk, np.where(position >= starts[chunk], position, -1).astype(np.int32))


class Gather:
    """Builds the tensors of a step: what the plan says is shipped in one copy, the rest is gathered from rows on the
    device."""

    def __init__(self, rows: Rows, kernels: Kernels, tables: Sequence[Tensor] | None = None) -> None:
        """``tables``: instead of the rows' block tables."""
        self._rows = rows
        self._tables = rows.tables if tables is None else tables
        self._least_alone = LEAST_ALONE[rows.device.type]
        self._gather = kernels.choose(GATHER_INPUTS, Facts(torch.int32))

    def inputs(self, plan: StepPlan, packing: Packing, slots: Ints | None = None) -> ForwardInputs:
        """At least one chunk. ``slots``: of its adapter, or none, for each; None: no chunk has one."""
        parts = [
            np.asarray(plan.rows, dtype=np.int32),
            packing.query_start,
            packing.context,
            packing.chunk,
            packing.position,
        ]
        tree, alone = packing.tree, len(packing.chunk) >= self._least_alone and packing.tree is None
        if packing.wanted is not None:
            parts += [packing.wanted, *(packing.alone if alone else ())]
        if tree is not None:
            parts += [tree.place, tree.first, tree.ancestors.view(np.int32)]
        row, query_start, context, chunk, position, *rest = ship_all(self._rows.device, *parts)
        *rest, place, first, ancestors = rest if tree is not None else (*rest, position, position, position)
        longest_query, longest_context = int(np.diff(packing.query_start).max()), int(packing.context.max())
        gathered = self.gathered(
            row,
            query_start,
            context,
            chunk,
            place,
            longest_query,
            longest_context,
            plan.shared_tokens,
            packing.leading if tree is None else 0,
        )
        if tree is not None:
            seen = TreeInputs(first, ancestors.view(torch.int64))
            attention = tuple(replace(each, tree=seen) for each in gathered.attention)
            gathered = replace(gathered, positions=position.long(), attention=attention)
        adapters = None if slots is None else self._adapters(packing, slots)
        return replace(
            gathered, wanted=rest[0] if rest else None, alone=Alone(*rest[1:]) if rest[1:] else None, adapters=adapters
        )

    def _adapters(self, packing: Packing, slots: Ints) -> AdapterRows | None:
        found, device = adapter_rows(slots[packing.chunk], self._rows.device), self._rows.device
        if found is None or packing.wanted is None:
            return found
        return replace(found, wanted=adapter_rows(slots[packing.chunk[packing.wanted]], device))

    def gathered(
        self,
        row: Tensor,  # [w], int32
        query_start: Tensor,  # [w + 1], int32
        context: Tensor,  # [w], int32
        chunk: Tensor,  # [t], int32
        position: Tensor,  # [t], int32; -1 for dummies
        longest_query: int,
        longest_context: int,
        shared_tokens: int | None = None,
        leading: int = 0,
        chained: bool = False,
    ) -> ForwardInputs:
        """The same from what is on the device already."""
        rows, attention = self._rows, []
        for table, block_size in zip(self._tables, rows.block_sizes, strict=True):
            width = -(-longest_context // block_size)
            ids, positions, slots, block_table = self._gather(
                rows.token_ids, table, row, chunk, position, context, block_size, width
            )
            longest = longest_query, longest_context
            attention.append(
                AttentionInputs(
                    block_table, query_start, context, slots, block_size, *longest, shared_tokens, leading, chained
                )
            )
        return ForwardInputs(ids, positions, tuple(attention))

    def wanting(self, inputs: ForwardInputs, wanted: Tensor, chunk: Tensor, position: Tensor) -> ForwardInputs:
        """``inputs`` of a step of which only ``wanted`` [n] int32 are read, from what is on the device already."""
        alone = alone_of(wanted, chunk, position) if len(chunk) >= self._least_alone else None
        return replace(inputs, wanted=wanted, alone=alone)


def alone_of(wanted: Tensor, chunk: Tensor, position: Tensor) -> Alone:
    """As ``Packing.alone``, from what is on the device already (shapes as in ``Gather.gathered``), for a step that a
    graph holds.

    A token that is said again, to fill ``wanted`` [n] up, sees no keys: nobody reads its result twice.
    """
    new = torch.ones_like(wanted)
    new[1:] = wanted[1:] != wanted[:-1]
    start = torch.arange(len(wanted) + 1, dtype=torch.int32, device=wanted.device)
    return Alone(chunk[wanted], (position[wanted] + 1) * new, start)
