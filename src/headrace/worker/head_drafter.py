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
from headrace.worker.rows import Ints, Rows, pack, ship_all
from headrace.worker.speculator import Proposal

_NOTHING = -2  # position 0 follows upon nothing that could be held


class HeadDrafter(Drawing):
    """``group``: the target's KV group whose block tables it uses."""

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
    ) -> None:
        super().__init__(rows, kernels, max_logits_rows, blocks)
        self._head = head
        self._tap = tap
        self._kv_cache = kv_cache
        self._group = group
        self._held = tap.out.new_zeros(len(rows.traits), head.spec.carried)  # of each row's last computed position
        self._at = np.full(len(rows.traits), _NOTHING, dtype=np.int32)  # which that is

        self._pending: list[tuple[Ints, Ints, Ints, Tensor]] = []  # rows, starts, counts, and what their entries take

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
        rows, starts, counts = (np.asarray(column, dtype=np.int32) for column in (plan.rows, plan.starts, plan.counts))
        drafts = np.asarray(plan.drafts, dtype=np.int32) if plan.drafts else np.zeros_like(rows)
        ends = np.where(drafts > 0, lengths[rows] - 1, starts + counts).astype(np.int32)
        firsts = np.cumsum(counts, dtype=np.int32) - counts  # packed
        carried = self._head.carried(self._tap.out[: int(counts.sum())])
        self._write(rows, starts, ends, firsts, carried)
        holders = np.concatenate([rows, np.asarray(plan.sample_rows, dtype=np.int32)])
        work = np.concatenate([np.arange(len(rows), dtype=np.int32), np.asarray(plan.sample_work, dtype=np.int32)])
        row, source = (part.long() for part in ship_all(self._rows.device, holders, (firsts + ends - starts)[work] - 1))
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
        inside = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
        # packed; what waited lies elsewhere
        before = np.repeat((firsts + begins - starts)[chosen], counts) + inside - 1
        places = np.flatnonzero((inside == 0) & np.repeat(waited[chosen], counts)).astype(np.int32)
        source, place, row = (part.long() for part in ship_all(
            self._rows.device, np.maximum(before, 0), places, rows[chosen][waited[chosen]]))  # fmt: skip
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
            rows, starts, counts = (np.concatenate([each[at] for each in self._pending]) for at in range(3))
            taken = torch.cat([each[3] for each in self._pending])
            self._pending.clear()
            self._head.write(self._inputs(rows, starts, counts), taken, self._kv_cache)

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        """A row whose last entry cannot be made gets none."""
        self._flush()
        counts = np.where((self._at[rows] == lengths - 2) & self._may_draft(rows), most, 0).astype(np.int32)
        live, carried = np.flatnonzero(counts), self._held
        if not len(live):
            return Proposal(counts, [[] for _ in rows], stand=True)
        carried = self._held[ship_all(self._rows.device, rows[live])[0].long()]
        for depth in range(int(counts.max())):
            going = counts[live] > depth
            if not going.all():
                carried, live = carried[torch.from_numpy(going).to(carried.device)], live[going]
            inputs = self._inputs(rows[live], lengths[live] - 2 + depth, np.ones_like(live, dtype=np.int32))
            hidden, carried = self._head.forward(inputs, carried, self._kv_cache)
            self._draw_from(self._head.logits, hidden, rows[live], lengths[live] + depth, depth)
        return Proposal(counts, self._drafted(rows, lengths, int(counts.max())), stand=True)

    def _inputs(self, rows: Ints, starts: Ints, counts: Ints) -> ForwardInputs:
        """Of entries at consecutive positions: each has the token behind its own."""
        plan = chunk_plan(rows, starts, counts)
        packing = pack(plan, padded=False)
        inputs = self._gather.inputs(plan, packing)
        row, place = (p.long() for p in ship_all(self._rows.device, rows[packing.chunk], packing.position + 1))
        ids = self._rows.token_ids[row, place].long()
        return replace(inputs, token_ids=ids, attention=(inputs.attention[self._group],))
