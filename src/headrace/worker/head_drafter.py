"""A draft head over the rows of its target: which of the target's hidden states meet which tokens, and where they lie.

    position           s-1    s     s+1   ...  e-1    e
    target's step             [ computed tokens  ]    sampled
    head's entries     s-1    s     ...   e-2   (e-1)          entry i: hidden states of i, token i + 1

An entry lies where the target keeps the keys of its position, so the last entry of a chunk waits, with its hidden
states (``held``), for the token that follows. Once a step is over, keys and values of all other entries can be written, and
are when somebody may need them, or when there are many (``pending``): steps that draft nothing cost less so. The first
pass of a draft computes the one that waited, and each later one goes on from the pass before. Entries of drafts
that were refuted are written over. A block's last entry depends on the first token of the next block: whoever finds
blocks in the cache therefore leaves out the last one (CacheManager.lookahead).

What lives here: that. What may not: layouts (models/heads.py), acceptance (speculator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs
from headrace.models.decoder import Tap
from headrace.models.draft_head import DraftHead
from headrace.request import StepPlan
from headrace.worker.draft_blocks import DraftBlocks
from headrace.worker.draft_model import Drawing, chunk_plan
from headrace.worker.draft_setup import MOST_PENDING
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.rows import Ints, Rows, ints, pack, places_on, ship_all, within
from headrace.worker.speculator import Proposal

_NOTHING = -2  # position 0 follows upon nothing that could be held
AHEAD = 1  # by so much an entry's token stands behind its position
_Entries = tuple[Ints, Ints, Ints, Tensor]  # rows, starts, counts, and what they take


class HeadDrafter(Drawing):
    """``group``: the target's KV group whose block tables it uses. ``graphs``: of its entries, each a row."""

    def __init__(
        self,
        head: DraftHead,
        tap: Tap,
        kv_cache: Tensor,
        group: int,
        rows: Rows,
        kernels: Kernels,
        max_logits_rows: int,
        blocks: Sequence[DraftBlocks] = (),
        graphs: DecodeGraphs | None = None,
    ) -> None:
        super().__init__(rows, kernels, max_logits_rows, blocks, graphs, AHEAD)
        self._head = head
        self._tap = tap
        self._kv_cache = kv_cache
        self._group = group
        self._held = tap.out.new_zeros(len(rows.traits), head.spec.carried)  # of each row's last computed position
        self._at = np.full(len(rows.traits), _NOTHING, dtype=np.int32)  # which that is

        self._pending: list[_Entries] = []

    def forget(self) -> None:
        super().forget()
        self._pending.clear()
        self._at[:] = _NOTHING

    def begins(self, plan: StepPlan) -> None:
        self._at[list(plan.rows_dropped)] = _NOTHING
        self._follow(plan, (self._group,), (self._kv_cache,))

    def settles(self, plan: StepPlan, lengths: Ints, coming: StepPlan) -> None:
        """Entries of all tokens that the step computed and that are true; what its last ones left is held."""
        if plan.rows:
            self._settle(plan, lengths)
        if coming.rows_dropped or coming.rows_added or coming.copy_group or self._blocks:  # tables will be others
            self._flush()

    def _settle(self, plan: StepPlan, lengths: Ints) -> None:
        rows, starts, counts = (ints(column) for column in (plan.rows, plan.starts, plan.counts))
        drafts = ints(plan.drafts) if plan.drafts else np.zeros_like(rows)
        ends = np.where(drafts > 0, lengths[rows] - 1, starts + counts).astype(np.int32)
        firsts = np.cumsum(counts, dtype=np.int32) - counts  # packed
        carried = self._head.carried(self._tap.out[: int(counts.sum())])
        self._write(rows, starts, ends, firsts, carried)
        holders = np.concatenate([rows, ints(plan.sample_rows)])
        work = np.concatenate([np.arange(len(rows), dtype=np.int32), ints(plan.sample_work)])
        row, source = places_on(self._rows.device, holders, (firsts + ends - starts)[work] - 1)
        self._held[row] = carried[source]
        self._at[holders] = ends[work] - 1

    def _write(self, rows: Ints, starts: Ints, ends: Ints, firsts: Ints, carried: Tensor) -> None:
        """The entry before each computed token, but where what it is made of has gone."""
        waited = self._at[rows] == starts - 1
        begins = starts + ~waited
        chosen = np.flatnonzero((ends > begins) & self._may_draft(rows))
        if not len(chosen):
            return
        counts = (ends - begins)[chosen].astype(np.int32)
        inside = within(counts)
        # packed; what waited lies elsewhere
        before = np.repeat((firsts + begins - starts)[chosen], counts) + inside - 1
        places = np.flatnonzero((inside == 0) & np.repeat(waited[chosen], counts)).astype(np.int32)
        source, place, row = places_on(self._rows.device, np.maximum(before, 0), places, rows[chosen][waited[chosen]])
        taken = carried[source]
        taken[place] = self._held[row]
        if sum(len(each[3]) for each in self._pending) + len(taken) > MOST_PENDING:
            self._flush()
        self._pending.append((rows[chosen], (begins[chosen] - 1).astype(np.int32), counts, taken))
        if len(taken) > MOST_PENDING:
            self._flush()

    def _flush(self) -> None:
        """Keys and values of what is pending. A row's entries may be several chunks: none looks at another's."""
        if self._pending:
            inputs, taken = self._inputs(*_joined(self._pending)), torch.cat([each[3] for each in self._pending])
            self._pending.clear()
            self._head.write(inputs, taken, self._kv_cache)

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        """A row whose last entry cannot be made gets none."""
        counts = np.where((self._at[rows] == lengths - 2) & self._may_draft(rows), most, 0).astype(np.int32)
        live = np.flatnonzero(counts)
        if not len(live):
            return Proposal(counts, [[] for _ in rows], stand=True)
        carried = self._held[ship_all(self._rows.device, rows[live])[0].long()]
        for depth in range(int(counts.max())):
            going = counts[live] > depth
            if not going.all():
                carried, live = carried[torch.from_numpy(going).to(carried.device)], live[going]
            carried = self._draw_next(rows[live], lengths[live] + depth, depth, carried)
        return Proposal(counts, self._drafted(rows, lengths, int(counts.max())), stand=True)

    def _draw_next(self, rows: Ints, lengths: Ints, depth: int, carried: Tensor) -> Tensor:
        """The token behind the ``lengths`` that rows have; what the one after it takes of ``carried`` [rows, carried].
        One graph computes what is pending, too."""
        graphs, how, last = self._graphs, self._graphed(rows), (rows, lengths - 2, np.ones_like(rows), carried)
        if graphs is None or not graphs.serves(len(rows) + sum(len(each[3]) for each in self._pending)):
            self._flush()
            hidden = self._head.forward(self._inputs(*last[:3]), (self._kv_cache,), carried)
            self._draw_from(self._head.logits, hidden, rows, lengths, depth)
            return carried
        bucket, alone = self._enter(graphs, [last, *self._pending]), not self._pending
        self._pending.clear()
        if alone and how is not None:
            graphs.compute(bucket, how)
            graphs.draw(bucket, len(rows), how)
        elif how is not None:
            graphs.draw_from(graphs.hidden(bucket, len(rows)), rows, lengths, how)
        else:
            self._draw_from(self._head.logits, graphs.hidden(bucket, len(rows)), rows, lengths, depth)
        return graphs.entered(len(rows))

    @staticmethod
    def _enter(graphs: DecodeGraphs, entries: Sequence[_Entries]) -> int:
        """The bucket of the step in which these are rows."""
        rows, starts, counts = _joined(entries)
        tokens, contexts = int(counts.sum()), np.repeat(starts, counts) + within(counts) + 1
        bucket = graphs.write(np.repeat(rows, counts), contexts, shared_tokens=0, chained=len(entries) > 1)
        entry, carried = graphs.entry(bucket, tokens), [each[3] for each in entries]
        if carried[0].data_ptr() != entry.data_ptr():  # else it lies there since the pass before
            torch.cat(carried, out=entry)
        return bucket

    def _inputs(self, rows: Ints, starts: Ints, counts: Ints) -> ForwardInputs:
        """Of entries at consecutive positions: each has the token behind its own."""
        plan = chunk_plan(rows, starts, counts)
        inputs = self._gather.inputs(plan, pack(plan, padded=False))
        return replace(inputs, attention=(inputs.attention[self._group],))


def _joined(entries: Sequence[_Entries]) -> tuple[Ints, Ints, Ints]:
    rows, starts, counts = (np.concatenate([each[at] for each in entries]) for at in range(3))
    return rows, starts, counts
