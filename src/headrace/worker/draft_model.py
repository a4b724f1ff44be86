"""A draft model: a small one with the target's vocabulary, which runs ahead of it on the same rows and block tables.

Its keys and values lie in a cache of its own whose blocks have the numbers of the target's, so prefixes, forks and preemption need nothing
more. Prompts it computes beside the target; of decoding rows that draft nothing for a while it catches up when they do. It draws with the
target's noise, parameters and masks (bias, penalties), so that where both models agree, so do their samples.

What lives here: running it, and how far its keys reach. What may not: loading (worker.py), acceptance (speculator.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.models.decoder import Decoder
from headrace.request import StepPlan
from headrace.worker.inputs import Gather, pack
from headrace.worker.rows import Ints, Rows, ship_all
from headrace.worker.sampler import SampleBatch, Sampler

_UNKNOWN = -1


class DraftModel:
    """A Proposer. ``kv_caches``: one for each of the draft's KV groups; ``groups``: the target's group whose block table each uses."""

    def __init__(self, decoder: Decoder, kv_caches: Sequence[Tensor], groups: Sequence[int], rows: Rows, kernels: Kernels) -> None:
        self._decoder = decoder
        self._kv_caches = tuple(kv_caches)
        self._groups = tuple(groups)
        self._rows = rows
        self._gather = Gather(rows, kernels)
        self._sampler = Sampler(rows, kernels)
        self._computed = np.full(len(rows.traits), _UNKNOWN, dtype=np.int32)  # tokens of each row whose keys are there

    def begins(self, plan: StepPlan) -> None:
        """Computes what is new of prompts. Of a new row its first chunk says what was found in the cache: whoever computed that, drafted."""
        for group, source, target in zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True):
            for cache in (cache for own, cache in zip(self._groups, self._kv_caches, strict=True) if own == group):
                cache[target].copy_(cache[source], non_blocking=True)
        for new in plan.rows_added:
            self._computed[new.row] = _UNKNOWN
        if not plan.rows:
            return
        rows, starts, counts = (np.asarray(column, dtype=np.int32) for column in (plan.rows, plan.starts, plan.counts))
        computed = self._computed[rows]
        begin = np.where(computed == _UNKNOWN, starts, np.minimum(computed, starts))
        self._computed[rows] = begin
        longer = np.flatnonzero(counts > 1)
        if len(longer):
            ends = (starts + counts)[longer]
            self._hidden(rows[longer], begin[longer], ends - begin[longer])
            self._computed[rows[longer]] = ends

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> list[list[int]]:
        """Its own next tokens, one after another; the first pass catches up."""
        starts: Ints = np.minimum(self._computed[rows], lengths - 1)  # what was drafted beyond was refuted, or is sampled anew
        counts = lengths - starts
        columns: list[tuple[Ints, Tensor]] = []
        for depth in range(int(most.max())):
            live = np.flatnonzero(most > depth).astype(np.int32)
            hidden = self._hidden(rows[live], starts[live], counts[live])
            columns.append((live, self._drawn(hidden, rows[live], lengths[live] + depth, depth)))
            starts, counts = lengths + depth, np.ones_like(counts)
        self._computed[rows] = lengths + most - 1
        proposed: list[list[int]] = [[] for _ in rows]
        for live, tokens in columns:
            for at, token in zip(live.tolist(), tokens.tolist(), strict=True):
                proposed[at].append(token)
        return proposed

    def left(self, row: int, length: int) -> None:
        """Its blocks are the target's, and go with them."""

    def _hidden(self, rows: Ints, starts: Ints, counts: Ints) -> Tensor:  # [rows, hidden]
        """Of each chunk's last token."""
        columns = [array("i", column.astype(np.int32).tobytes()) for column in (rows, starts, counts)]
        plan = StepPlan(-1, rows=columns[0], starts=columns[1], counts=columns[2], sample_rows=columns[0],
                        sample_work=array("i", range(len(rows))))  # fmt: skip
        inputs = self._gather.inputs(plan, pack(plan, padded=False, prune=True))
        return self._decoder.forward(replace(inputs, attention=tuple(inputs.attention[group] for group in self._groups)), self._kv_caches)

    def _drawn(self, hidden: Tensor, rows: Ints, positions: Ints, depth: int) -> Tensor:  # [rows], int64
        """Written into the rows as well, for the next pass."""
        every = np.arange(len(rows), dtype=np.int32)
        batch = SampleBatch(rows, positions, every, np.full(len(rows), depth, dtype=np.int32))
        tokens = self._sampler.propose(self._decoder.logits(hidden).float(), batch)
        row, position = (part.long() for part in ship_all(self._rows.device, rows, positions))
        self._rows.token_ids[row, position] = tokens.to(torch.int32)
        return tokens
