"""A draft model that grows trees (speculative/tree.py): each pass extends all tokens that are among the best.

The keys of tokens that it extends lie after the row's own, wherever a place is free. What is accepted it computes
anew with its next first pass, in the right places. Where a row has a temperature, its noise is known: then the scores of
tokens are those that the noise has been added to. Rows with masks, penalties or the like get chains.

What lives here: passes over trees. What may not: which tokens are the best, how trees are verified (speculator.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.sampling.reference import vocabulary_noise
from headrace.speculative.tree import Belief, Found, Growing, Node, Tree
from headrace.worker.draft_model import DraftModel, chunk_plan
from headrace.worker.rows import Ints, PackedTree, Packing, Trait, ints, iota, places_on
from headrace.worker.speculator import Proposal

_GROWN = Trait.SCORED | Trait.RANDOM | Trait.FILTERED


@dataclass(frozen=True, slots=True)
class _Grown:
    """A row's tree after its first ``length`` tokens, as ``Growing`` gives it."""

    length: int
    drafts: list[int]
    tree: Tree
    found: list[Found | None]


class TreeDrafts(DraftModel):
    """``topk``: continuations of a token that are looked at."""

    def __init__(self, *parts: Any, topk: int) -> None:
        super().__init__(*parts)
        self._topk = topk
        self._trees: dict[int, Tree] = {}  # of the last proposal, by row
        self._grown: dict[int, _Grown] = {}  # the last of each row
        self._beliefs = Belief(), Belief()  # of greedy rows, and of those with a temperature

    def propose(self, rows: Ints, lengths: Ints, most: Ints, ready: Ints | None = None) -> Proposal:
        self._trees = {}
        proposal = super().propose(rows, lengths, most, ready)
        return replace(proposal, trees=[self._trees.get(row) for row in rows.tolist()])

    def left(self, row: int, length: int) -> None:
        self._grown.pop(row, None)

    def forget(self) -> None:
        super().forget()
        self._grown.clear()

    def _draw_drafts(self, rows: Ints, lengths: Ints, most: Ints) -> None:
        grown = ((self._rows.traits[rows] & ~_GROWN) == 0) & (most > 1)
        if not grown.all():
            super()._draw_drafts(rows[~grown], lengths[~grown], most[~grown])
            self._release()
        if grown.any():
            self._grow(rows[grown], lengths[grown], most[grown])

    def _grow(self, rows: Ints, lengths: Ints, most: Ints) -> None:
        self._learn(rows, lengths)
        starts: Ints = np.minimum(self._computed[rows], lengths - 1)
        growing = [Growing(int(budget)) for budget in most]
        found = self._best(self._hidden(rows, starts, lengths - starts), rows, lengths)
        for tree, each in zip(growing, found, strict=True):
            tree.add([each])
        while len(live := ints([at for at, each in enumerate(growing) if each.frontier])):
            nodes = [growing[at].frontier for at in live]
            self._look_behind(rows[live], lengths[live], most[live], nodes, growing, live)
        self._computed[rows] = lengths
        for row, length, tree in zip(rows.tolist(), lengths.tolist(), growing, strict=True):
            made = self._grown[row] = _Grown(length, *tree.grown())
            self._trees[row] = made.tree
        drafts = [self._grown[row].drafts for row in rows.tolist()]
        self._write(rows, lengths, [range(len(each)) for each in drafts], drafts)

    def _learn(self, rows: Ints, lengths: Ints) -> None:
        """From what rows have got since their last trees."""
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            if (last := self._grown.get(row)) is not None:
                tokens = self._rows.token_ids[row, last.length : length].tolist()
                self._beliefs[self._is_random(row)].learn(tokens, last.drafts, last.tree, last.found)

    def _is_random(self, row: int) -> bool:
        return bool(self._rows.traits[row] & Trait.RANDOM)

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
        counts = ints([len(each) for each in nodes])
        chunk = np.repeat(iota(len(rows)), counts)
        place, depth = (ints([getattr(n, name) for each in nodes for n in each]) for name in ("place", "depth"))  # fmt: skip
        ancestors = np.array([n.ancestors for each in nodes for n in each], dtype=np.int64)
        root = lengths - 1
        packed = PackedTree(root[chunk] + place, root, ancestors)
        starts = np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
        packing = Packing(starts, lengths + most, chunk, root[chunk] + depth, tree=packed)
        found = self._best(self._hidden_of_tree(rows, counts, packing), rows[chunk], lengths[chunk] + depth)
        for at, begin, end in zip(live, starts, starts[1:], strict=False):
            growing[at].add(found[begin:end])

    def _hidden_of_tree(self, rows: Ints, counts: Ints, packing: Packing) -> Tensor:  # [tokens, hidden]
        hidden = self._replayed(rows[packing.chunk], packing.position + 1, tree=packing)
        if hidden is not None:
            return hidden
        return self._passed(self._gather.inputs(chunk_plan(rows, packing.context - counts, counts), packing))

    def _best(self, hidden: Tensor, rows: Ints, positions: Ints) -> list[Found]:
        """For each row of ``hidden``, the most probable tokens at its position."""
        made = list[Found]()
        for first in range(0, len(rows), self._most_logits):
            piece = slice(first, first + self._most_logits)
            logits = self._decoder.logits(hidden[piece]).float()
            self._add_noise(logits, rows[piece], positions[piece])
            exponents = [self._beliefs[self._is_random(row)].exponent for row in rows[piece].tolist()]
            given = torch.log_softmax(logits, dim=-1)
            believed = torch.log_softmax(given * torch.tensor(exponents, device=given.device)[:, None], dim=-1)
            best = believed.topk(min(self._topk, logits.shape[1]), dim=-1)
            expected = (believed.exp() * given).sum(-1)
            columns = (
                best.values,
                given.gather(1, best.indices),
                expected[:, None],
                best.indices,
            )  # ids fit into float32
            made += [_found(row, best.values.shape[1]) for row in torch.cat(columns, dim=1).tolist()]
        return made

    def _add_noise(self, logits: Tensor, rows: Ints, positions: Ints) -> None:
        """Where a row has a temperature: its own, of these places."""
        random = np.flatnonzero(self._rows.traits[rows] & Trait.RANDOM).astype(np.int32)
        if len(random):
            places = positions[random] - self._rows.num_prompt_tokens[rows[random]]
            at, row, place = places_on(self._rows.device, random, rows[random], places)
            temperature, seeds = self._sampler.temperatures(row)
            logits[at] = logits[at] / temperature[:, None] + vocabulary_noise(seeds, place, logits.shape[1])

    def _write(
        self, rows: Ints, lengths: Ints, places: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> None:
        """``tokens`` into the rows, at ``places`` after what each has."""
        counts = [len(each) for each in places]
        at = np.repeat(lengths, counts) + ints([place for each in places for place in each])
        ids = ints([token for each in tokens for token in each])
        self._rows.put(np.repeat(rows, counts), at, ids)


def _found(row: list[float], best: int) -> Found:
    """From scores, what was given, what was expected, and ids."""
    return Found([int(token) for token in row[-best:]], row[:best], row[best : 2 * best], row[2 * best])
