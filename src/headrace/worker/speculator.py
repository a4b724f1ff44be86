"""A step that verifies drafts, on the worker: how long its rows really are, what is proposed after them, what of that
was right.

The scheduler plans upper bounds: it does not know how many drafts of the steps in flight are accepted. Here that is
known when a step begins, so its chunks are shifted to where rows really end, and made shorter where a proposer has less
to propose. All samples of a row are picked at once, each after the drafts before it; up to the first that differs from
its draft they are what would have been sampled one by one. A draft's key and value that were refuted are written over
when the true token of that place is computed.

A tree's keys lie one after another after its row's, whatever stands after what. Of the accepted path they are moved to
the places that these tokens have in the text; what lies beyond is written over.

What lives here: lengths, the plan as it is computed, acceptance, where trees stand and what is kept of them. What may
not: proposing (speculative/), growing trees (draft_tree.py), sampling, deciding how many.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.attention import kv_codes
from headrace.request import DraftsAhead, NewRow, Runs, Singles, StepPlan, TokenLogprobs
from headrace.spec import KVFormat
from headrace.speculative.lookup import Lookup
from headrace.speculative.tree import Tree
from headrace.worker.judge import Judge
from headrace.worker.rows import Ints, PackedTree, Packing, Rows, as_array, even, ints, iota, places_on, within

_FIELDS = tuple(each.name for each in fields(StepPlan))
Tokens = Sequence[tuple[int, ...]]
Logprobs = Mapping[int, tuple[TokenLogprobs, ...]]


@dataclass(frozen=True, slots=True)
class Proposal:
    """``counts``: of each row. ``tokens``: those; or, of a device that has a queue, where they will be on the host when
    the step that verifies them has ended, or who looks for them there, [rows, at least the largest count] int32.
    ``stand``: they have been written into the rows. ``trees``: how each row's stand; None: one after another. ``ahead``:
    of them, and of what was drawn for nothing, where drafts are drawn while others are verified."""

    counts: Ints
    tokens: list[list[int]] | Tensor | Callable[[], Ints]
    stand: bool = False
    trees: Sequence[Tree | None] = ()
    ahead: DraftsAhead | None = None

    def lists(self) -> list[list[int]]:
        found = self.tokens if isinstance(self.tokens, list) else self.table().tolist()
        return [tokens[:count] for tokens, count in zip(found, self.counts.tolist(), strict=True)]

    def table(self) -> Ints:
        """Where there are as many for each row, or they come from a device."""
        if isinstance(self.tokens, list):
            return ints(self.lists())
        return self.tokens.numpy() if isinstance(self.tokens, Tensor) else self.tokens()


class Proposer:
    """Who drafts. ``begins``: a plan's rows are built, its chunks begin where it says, and nothing of it is computed.
    ``propose``: at most ``most[i]`` tokens after the ``lengths[i]`` that row ``rows[i]`` has. ``took``: a row of so many
    tokens has got these in a step with drafts. ``left``: a row's sequence has ended, or begins anew. ``settles``: the
    step before, as it was computed, is over, and nothing of the next, ``coming``, has been done; rows have ``lengths``
    tokens. ``forget``: all rows are gone. ``remembers``: ``took`` does something."""

    remembers = False

    def begins(self, plan: StepPlan) -> None:
        """Nothing."""

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        raise NotImplementedError

    def took(self, row: int, length: int, tokens: Sequence[int]) -> None:
        """Nothing."""

    def left(self, row: int, length: int) -> None:
        """Nothing is kept of rows but what lies in their blocks, unless a proposer says otherwise."""

    def settles(self, plan: StepPlan, lengths: Ints, coming: StepPlan) -> None:
        """Nothing."""

    def forget(self) -> None:
        """Nothing."""


class LookupProposer(Proposer):
    """Looks up what rows hold. The host has a copy of them: of the device it asks only for what steps without drafts
    have sampled."""

    remembers = True

    def __init__(self, rows: Rows, lookup: Lookup) -> None:
        self._rows = rows
        self._lookup = lookup
        self._tenants: dict[int, NewRow] = {}
        self._ids: Ints = np.empty(rows.token_ids.shape, dtype=np.int32)
        self._known = np.zeros(len(self._ids), dtype=np.int32)  # tokens of each row

    def begins(self, plan: StepPlan) -> None:
        for new in plan.rows_added:
            self._tenants[new.row] = new
            self._known[new.row] = 0
            self.took(new.row, 0, new.token_ids)

    def took(self, row: int, length: int, tokens: Sequence[int]) -> None:
        if length <= self._known[row]:  # what stood after were guesses of a pipeline
            self._known[row] = end = length + len(tokens)
            self._ids[row, length:end] = tokens

    def propose(self, rows: Ints, lengths: Ints, most: Ints) -> Proposal:
        self._fetch(rows, lengths)
        parts = zip(rows.tolist(), lengths.tolist(), most.tolist(), strict=True)
        tokens = [
            self._lookup.propose(self._ids[row, :length], count, self._tenants[row].pool)
            for row, length, count in parts
        ]
        return Proposal(ints([len(each) for each in tokens]), tokens)

    def _fetch(self, rows: Ints, lengths: Ints) -> None:
        missing = lengths - self._known[rows]
        if (most := int(missing.max(initial=0))) > 0:
            held = self._rows.held(rows, self._known[rows], most).cpu().numpy()
            for row, count, ids in zip(rows.tolist(), missing.tolist(), held, strict=True):
                self.took(row, int(self._known[row]), ids[: max(0, count)])

    def left(self, row: int, length: int) -> None:
        new = self._tenants.pop(row, None)
        if new is not None and length > new.num_prompt_tokens and self._lookup.keeps:
            self._fetch(ints([row]), ints([length]))
            self._lookup.keep(self._ids[row, new.num_prompt_tokens : length], new.pool)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of a plan's samples, in their order: what was proposed after each, ``counts`` of them. ``which``: of the
    proposal's rows; -1: nothing was. ``rows``: that they are for. ``trees``: by chunk, where they do not stand one after
    another. In pipelines (staged_drafts.py), of samples that go on from drafts in flight: ``guesses``, the place and the
    token that each takes for sampled there; ``empty``: those that guess nothing, of which nothing is computed;
    ``cancelled``: all guesses are known to be wrong; ``unsent``: the stage before knew that, and nothing comes from
    there; ``turns``: of their rows, as long as nothing begins from the truth."""

    proposal: Proposal
    counts: list[int]
    which: list[int]
    rows: list[int]
    trees: Mapping[int, Tree] = field(default_factory=dict)
    guesses: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    empty: frozenset[int] = frozenset()
    cancelled: bool = False
    unsent: bool = False
    turns: Sequence[int] = ()

    def lists(self) -> list[list[int]]:
        found = self.proposal.lists()
        return [found[at] if at >= 0 else [] for at in self.which]


class Speculator:
    """Follows every plan of a worker, whether anything is drafted in it or not. ``kv_caches``: the target's, held as
    ``kv``, in which accepted branches of trees are moved. ``judge``: of chains; samples judge, if not said otherwise."""

    _alike = True  # rows with as many drafts are taken together

    def __init__(
        self,
        rows: Rows,
        proposer: Proposer,
        kv_caches: Sequence[Tensor] = (),
        kv: KVFormat | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._rows = rows
        self._kv_caches, self._kv = kv_caches, kv
        self._proposer = proposer
        self.judge = judge or Judge()
        self._lengths = rows.column()  # tokens of each row that are known or sampled
        self._taken: set[int] = set()  # rows in use
        self._last: StepPlan | None = None  # the step before, as it was computed

    def leave(self, plan: StepPlan) -> None:
        """Before the plan's rows are built: whose rows go."""
        if self._last is not None:
            self._proposer.settles(self._last, self._lengths, plan)
            self._last = None
        for row in {*plan.rows_dropped, *(new.row for new in plan.rows_added)} & self._taken:
            self._taken.discard(row)
            self._proposer.left(row, int(self._lengths[row]))

    def forget(self) -> None:
        """All rows are gone."""
        self._taken.clear()
        self._last = None
        self._proposer.forget()

    def begin(self, plan: StepPlan) -> tuple[StepPlan, Drafts | None]:
        """The plan as it is to be computed. Its rows are built."""
        self._last, drafts = self._begun(plan)
        return self._last, drafts

    def _begun(self, plan: StepPlan) -> tuple[StepPlan, Drafts | None]:
        for new in plan.rows_added:
            self._lengths[new.row] = len(new.token_ids)
            self.judge.begins(new.row, new.sequence_id)
        self._taken.update(new.row for new in plan.rows_added)
        if not plan.drafts:
            self._proposer.begins(plan)
            if plan.sample_rows:
                ends = ints(plan.starts) + ints(plan.counts)
                self._lengths[np.asarray(plan.sample_rows)] = ends[np.asarray(plan.sample_work)] + 1
            return plan, None
        return self._drafted_alike(plan, most) if (most := self._alike_drafts(plan)) else self._drafted(plan)

    def _alike_drafts(self, plan: StepPlan) -> int:
        """How many each chunk has after its one known token, where all have as many and nothing else is asked for; else
        0."""
        count, most = len(plan.rows), plan.drafts[0]
        alike = self._alike and plan.drafts.count(most) == plan.counts.count(1 + most) == count
        alike = alike and plan.sample_rows == plan.rows and plan.sample_work == even(count, 1).every
        return most if alike else 0

    def _drafted_alike(self, plan: StepPlan, most: int) -> tuple[StepPlan, Drafts]:
        """``_drafted`` of such a plan."""
        rows, count = ints(plan.rows), len(plan.rows)
        lengths = self._lengths[rows]
        own = {"starts": as_array(lengths - 1), "counts": even(count, 1).counts, "drafts": array("i")}
        self._proposer.begins(_changed(plan, own))
        proposal = self._proposer.propose(rows, lengths, np.full(count, most, dtype=np.int32))
        if not proposal.stand:
            self._write(rows, lengths, proposal)
        each = proposal.counts
        trees = {work: tree for work, tree in enumerate(proposal.trees) if tree is not None}
        found = Drafts(proposal, each.tolist(), list(range(count)), plan.rows.tolist(), trees)
        if (each == most).all():
            laid = even(count, 1 + most)
            own |= {"counts": laid.counts, "drafts": plan.drafts, "sample_work": laid.work, "sample_back": laid.back}
            return _changed(plan, own | {"sample_rows": as_array(rows[laid.chunk])}), found
        changes = {"starts": own["starts"], "counts": as_array(each + 1), "drafts": as_array(each)}
        return with_samples(plan, iota(count), each, **changes), found

    def _drafted(self, plan: StepPlan) -> tuple[StepPlan, Drafts]:
        starts, counts, most = (np.array(column, dtype=np.int32) for column in (plan.starts, plan.counts, plan.drafts))
        rows, work = ints(plan.rows), ints(plan.sample_work)
        counts -= most
        starts[work] = self._lengths[rows[work]] - counts[work]  # a chunk with several takers is shifted by nothing
        known = replace(plan, starts=as_array(starts), counts=as_array(counts), drafts=array("i"))
        self._proposer.begins(known)
        which = np.flatnonzero(most)
        theirs, most = rows[which], most[which]
        lengths = self._lengths[theirs]
        proposal = self._proposer.propose(theirs, lengths, most) if len(which) else Proposal(most, [], stand=True)
        if not proposal.stand:
            self._write(theirs, lengths, proposal)
        drafts, places = np.zeros_like(counts), np.full(len(counts), -1, dtype=np.int32)
        drafts[which], places[which] = proposal.counts, iota(len(which))
        exact = with_samples(known, work, drafts, counts=as_array(counts + drafts), drafts=as_array(drafts))
        trees = {work: tree for work, tree in zip(which.tolist(), proposal.trees, strict=False) if tree is not None}
        return exact, Drafts(proposal, drafts[work].tolist(), places[work].tolist(), list(plan.sample_rows), trees)

    def _write(self, rows: Ints, lengths: Ints, proposal: Proposal) -> None:
        """Drafts stand in their rows while they are verified."""
        tokens = ints([token for each in proposal.lists() for token in each])
        if not len(tokens):
            return
        at = np.repeat(lengths, proposal.counts) + within(proposal.counts)
        self._rows.put(np.repeat(rows, proposal.counts), at, tokens)

    def cut(
        self, plan: StepPlan, drafts: Drafts, samples: Sequence[int], *, computed: bool
    ) -> tuple[StepPlan, Drafts, list[int]]:
        """Without the drafts that grammars refute. ``samples``: as TokenMasks names them; also returned as samples of the
        plan that comes of it. ``computed``: the plan's tokens have been, so that only samples are left out."""
        planned = np.array(drafts.counts, dtype=np.int32)
        named, firsts, masks = np.unique(ints(samples), return_index=True, return_counts=True)
        kept = planned.copy()
        kept[named] = masks - 1
        begins = np.cumsum(kept + 1) - (kept + 1)
        at = np.repeat(begins[named] - firsts, masks) + np.arange(len(samples))
        chosen = np.concatenate([np.arange(count + 1) for count in planned]) <= np.repeat(kept, planned + 1)
        work, rows, back = (ints(column)[chosen] for column in (plan.sample_work, plan.sample_rows, plan.sample_back))
        changes: dict[str, Any] = {"sample_work": as_array(work), "sample_rows": as_array(rows)}
        if not computed:
            refuted = np.zeros(len(plan.rows), dtype=np.int32)
            np.maximum.at(refuted, work, np.repeat(planned - kept, kept + 1))  # a chunk with drafts has one sampler
            changes |= {
                name: as_array(np.asarray(getattr(plan, name), dtype=np.int32) - refuted)
                for name in ("counts", "drafts")
            }
            back -= refuted[work]
        counts, which = drafts.proposal.counts.copy(), ints(drafts.which)
        counts[which[which >= 0]] = kept[which >= 0]
        left = replace(drafts, proposal=replace(drafts.proposal, counts=counts), counts=kept.tolist())
        self._last = replace(plan, sample_back=as_array(back), **changes)
        return self._last, left, at.tolist()

    def end(
        self, plan: StepPlan, drafts: Drafts, tokens: Tokens, logprobs: Logprobs, errors: Mapping[int, str]
    ) -> tuple[Tokens, Logprobs, Mapping[int, str]]:
        """From samples at every place to the tokens that each row gets, with what goes with them. A sample after a
        right draft that is not usable is none: the next step finds that out again, as its first."""
        if (
            self._alike
            and self.judge.alike
            and isinstance(tokens, Singles)
            and len(each := set(drafts.counts)) == 1
            and not drafts.trees
        ):
            return self._end_alike(drafts, each.pop(), ints(tokens.values)), {}, {}
        taken: list[tuple[int, ...]] = []
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        failed: dict[int, str] = {}
        branches: list[Branch] = []
        first = 0
        for j, proposed in enumerate(drafts.lists()):
            if j in drafts.empty:
                taken.append(())
                continue
            samples = [None if at in errors else tokens[at][0] for at in range(first, first + len(proposed) + 1)]
            row, tree = plan.sample_rows[first], drafts.trees.get(plan.sample_work[first])
            if not self._counts(drafts, j, row):
                taken.append(())
                first += len(samples)
                continue
            known = int(self._lengths[row])
            mine, path = (
                self.judge.accepted(row, known, proposed, samples) if tree is None else tree.accepted(proposed, samples)
            )
            if not mine:
                failed[j] = errors[first]
            elif tree is not None:
                branches.append(Branch(row, known, path, mine))
            taken.append(tuple(mine))
            if first in logprobs:
                scores[j] = tuple(entry for at in (0, *path) for entry in logprobs[first + at])[: len(mine)]
            self._proposer.took(row, known, mine)
            self._take(row, len(proposed), mine)
            self._lengths[row] += max(1, len(mine))
            first += len(samples)
        if branches:
            keep_branches(self._rows, self._kv_caches, branches, self._kv)
        return taken, scores, failed

    def _end_alike(self, drafts: Drafts, count: int, tokens: Ints) -> Runs:
        """Of rows with as many drafts each, where nothing but tokens was asked for."""
        rows, samples = ints(drafts.rows), tokens.reshape(-1, count + 1)
        proposed = drafts.proposal.table()[:, :count] if count else samples[:, :0]
        if len(proposed) > len(rows):
            proposed = proposed[drafts.which]
        lengths = self._lengths[rows]
        ends = self.judge.count(rows, lengths, proposed, samples) + 1
        taken = Runs(samples[iota(count + 1) < ends[:, None]].tolist(), ends.tolist())
        if self._proposer.remembers:
            for row, length, mine in zip(drafts.rows, lengths.tolist(), taken, strict=True):
                self._proposer.took(row, length, mine)
        self._lengths[rows] += ends
        return taken

    def _counts(self, drafts: Drafts, j: int, row: int) -> bool:
        """Whether a chunk's samples are the next tokens of its row."""
        return True

    def _take(self, row: int, drafts: int, tokens: Sequence[int]) -> None:
        """A row gets these, of so many drafts and one more. Whoever sampled them has written them."""


def _changed(plan: StepPlan, columns: Mapping[str, Any]) -> StepPlan:
    """As ``replace``, in a fifth of the time: a frozen record is made field by field."""
    made = object.__new__(StepPlan)
    for name in _FIELDS:
        object.__setattr__(made, name, columns[name] if name in columns else getattr(plan, name))
    return made


def with_samples(plan: StepPlan, work: Ints, each_drafts: Ints, **changes: Any) -> StepPlan:
    """A sample after each of so many drafts as well as before the first."""
    each = each_drafts[work] + 1
    back = np.repeat(np.cumsum(each, dtype=np.int32), each) - 1 - iota(each.sum())
    rows = np.repeat(ints(plan.sample_rows), each)
    changes |= {"sample_work": as_array(np.repeat(work, each)), "sample_rows": as_array(rows)}
    return replace(plan, sample_back=as_array(back), **changes)


@dataclass(frozen=True, slots=True)
class Branch:
    """``tokens`` that row ``row`` got after its first ``length``; the keys of those before the last lie at ``path``,
    counted from the last known token."""

    row: int
    length: int
    path: Sequence[int]
    tokens: Sequence[int]


def branched(packing: Packing, trees: Mapping[int, Tree]) -> Packing:
    """Where the chunks ``trees`` are a tree, each after its root: tokens stand as deep as they have tokens before
    them."""
    position = packing.position.copy()
    ancestors, first = np.zeros(len(position), dtype=np.int64), packing.context.copy()
    for work, tree in trees.items():
        span = slice(int(packing.query_start[work]), int(packing.query_start[work + 1]))
        first[work] = position[span.start]
        ancestors[span] = tree.ancestors
        position[span] = first[work] + [bits.bit_count() - 1 for bits in tree.ancestors]
    return replace(packing, position=position, tree=PackedTree(packing.position, first, ancestors))


def keep_branches(
    rows: Rows, kv_caches: Sequence[Tensor], branches: Sequence[Branch], kv: KVFormat | None = None
) -> None:
    """``kv_caches``: by group, [blocks, layers, 2, kv_heads, block_size, head_dim], or held as ``kv``."""
    row = _joined([[each.row] * len(each.path) for each in branches])
    source = _joined([[each.length - 1 + at for at in each.path] for each in branches])
    target = _joined([range(each.length, each.length + len(each.path)) for each in branches])
    moved = source != target
    if moved.any():
        places = places_on(rows.device, row[moved], source[moved], target[moved])
        for table, block_size, cache in zip(rows.tables, rows.block_sizes, kv_caches, strict=True):
            for part in (cache,) if kv is None else kv_codes.parts(cache, kv):
                _move(table, block_size, part, *places)
    row = _joined([[each.row] * len(each.tokens) for each in branches])
    place = _joined([range(each.length, each.length + len(each.tokens)) for each in branches])
    rows.put(row, place, _joined([each.tokens for each in branches]))


def _move(table: Tensor, block_size: int, cache: Tensor, row: Tensor, source: Tensor, target: Tensor) -> None:
    """All are read before any is written."""
    (old, read), (new, written) = (
        (table[row, torch.div(each, block_size, rounding_mode="floor")].long(), each % block_size)
        for each in (source, target)
    )
    cache[new, :, :, :, written] = cache[old, :, :, :, read]


def _joined(parts: Sequence[Sequence[int]]) -> Ints:
    return ints([value for part in parts for value in part])
