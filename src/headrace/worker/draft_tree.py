"""A draft model that grows trees (speculative/tree.py): each pass looks on behind all tokens that are among the best.

The keys of tokens that it looks behind lie behind the row's own, wherever a place is free. What is accepted it computes
anew with its next first pass, in the right places. Where a row has a temperature, its noise is known: then the scores of
tokens are those that the noise has been added to. Rows with masks, penalties or the like get chains.

What lives here: passes over trees. What may not: which tokens are the best, how trees are verified (branches.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.sampling.reference import vocabulary_noise
from headrace.speculative.tree import Growing, Node, Tree
from headrace.worker.draft_model import DraftModel, chunk_plan
from headrace.worker.inputs import PackedTree, Packing
from headrace.worker.rows import Ints, Trait, ship_all
from headrace.worker.speculator import Proposal

_GROWN = Trait.SCORED | Trait.RANDOM | Trait.FILTERED


class TreeDrafts(DraftModel):
    """``topk``: continuations of a token that are looked at."""

    def __init__(self, *parts: Any, topk: int) -> None:
        super().__init__(*parts)
        self._topk = topk
        self._trees: dict[int, Tree] = {}  # of the last proposal, by row

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        self._trees = {}
        proposal = super().propose(rows, lengths, most)
        return replace(proposal, trees=[self._trees.get(row) for row in rows.tolist()])

    def _draw_drafts(self, rows: Ints, lengths: Ints, most: Ints) -> None:
        grown = ((self._rows.traits[rows] & ~_GROWN) == 0) & (most > 1)
        if not grown.all():
            super()._draw_drafts(rows[~grown], lengths[~grown], most[~grown])
        if grown.any():
            self._grow(rows[grown], lengths[grown], most[grown])

    def _grow(self, rows: Ints, lengths: Ints, most: Ints) -> None:
        starts: Ints = np.minimum(self._computed[rows], lengths - 1)
        growing = [Growing(int(budget)) for budget in most]
        tokens, scores = self._best(self._hidden(rows, starts, lengths - starts), rows, lengths)
        for each, first, chances in zip(growing, tokens, scores, strict=True):
            each.plant(first, chances)
        while len(live := np.array([at for at, each in enumerate(growing) if each.frontier], dtype=np.int32)):
            nodes = [growing[at].frontier for at in live]
            self._look_behind(rows[live], lengths[live], most[live], nodes, growing, live)
        self._computed[rows] = lengths
        grown = [each.grown() for each in growing]
        self._trees.update(zip(rows.tolist(), (tree for _, tree in grown), strict=True))
        self._write(rows, lengths, [range(len(ids)) for ids, _ in grown], [ids for ids, _ in grown])

    def _look_behind(
        self,
        rows: Ints,
        lengths: Ints,
        most: Ints,
        nodes: Sequence[Sequence[Node]],
        growing: Sequence[Growing],
        live: Ints,
    ) -> None:
        """One pass over the frontiers ``nodes`` of these rows."""
        self._write(rows, lengths, [[n.place - 1 for n in each] for each in nodes], [[n.token for n in each] for each in nodes])  # fmt: skip
        counts = np.array([len(each) for each in nodes], dtype=np.int32)
        chunk = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        place, depth = (np.array([getattr(n, name) for each in nodes for n in each], dtype=np.int32) for name in ("place", "depth"))  # fmt: skip
        ancestors = np.array([n.ancestors for each in nodes for n in each], dtype=np.int64)
        root = lengths - 1
        packed = PackedTree(root[chunk] + place, root, ancestors)
        starts = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
        packing = Packing(starts, lengths + most, chunk, root[chunk] + depth, tree=packed)
        inputs = self._gather.inputs(chunk_plan(rows, root, counts), packing)
        attention = tuple(inputs.attention[group] for group in self._groups)
        hidden = self._decoder.forward(replace(inputs, attention=attention), self._kv_caches)
        tokens, scores = self._best(hidden, rows[chunk], lengths[chunk] + depth)
        for at, begin, end in zip(live, starts, starts[1:], strict=False):
            growing[at].add(tokens[begin:end], scores[begin:end])

    def _best(self, hidden: Tensor, rows: Ints, positions: Ints) -> tuple[list[list[int]], list[list[float]]]:
        """Of each row of ``hidden``: the most probable tokens at its position, and their logarithms of probability."""
        tokens, scores = list[list[int]](), list[list[float]]()
        for first in range(0, len(rows), self._most_logits):
            piece = slice(first, first + self._most_logits)
            logits = self._decoder.logits(hidden[piece]).float()
            self._add_noise(logits, rows[piece], positions[piece])
            best = torch.log_softmax(logits, dim=-1).topk(min(self._topk, logits.shape[1]), dim=-1)
            tokens += best.indices.tolist()
            scores += best.values.tolist()
        return tokens, scores

    def _add_noise(self, logits: Tensor, rows: Ints, positions: Ints) -> None:
        """Where a row has a temperature: its own, of these places."""
        random = np.flatnonzero(self._rows.traits[rows] & Trait.RANDOM).astype(np.int32)
        if len(random):
            places = positions[random] - self._rows.num_prompt_tokens[rows[random]]
            at, row, place = (part.long() for part in ship_all(self._rows.device, random, rows[random], places))
            temperature, seeds = self._sampler.temperatures(row)
            logits[at] = logits[at] / temperature[:, None] + vocabulary_noise(seeds, place, logits.shape[1])

    def _write(
        self, rows: Ints, lengths: Ints, places: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        """``tokens`` into the rows, at ``places`` behind what each has."""
        counts = [len(each) for each in places]
        at = np.repeat(lengths, counts) + np.array([place for each in places for place in each], dtype=np.int32)
        ids = np.array([token for each in tokens for token in each], dtype=np.int32)
        row, to, values = ship_all(self._rows.device, np.repeat(rows, counts), at, ids)
        self._rows.token_ids[row.long(), to.long()] = values
