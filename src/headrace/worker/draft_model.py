"""Drafts that are computed: by a draft model, or by a head over its target's hidden states (``HeadDrafter``).

A draft model is a small one with the target's vocabulary, which runs ahead of it on the same rows and block tables.

Its keys and values lie in a cache of its own whose blocks have the numbers of the target's, so prefixes, forks and
preemption need nothing more. Prompts it computes beside the target; of decoding rows that draft nothing for a while it
catches up when they do. It draws with the target's noise, parameters and masks (bias, penalties), so that where both
models agree, so do their samples. On a device with a queue nothing of it is waited for: drafts stand in their rows, and
come to the host after the step that verifies them.

What lives here: running them, and how far their keys reach. What may not: loading (worker.py), a head's layout
(models/heads.py), acceptance (speculator.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.inputs import ForwardInputs
from headrace.kernels.step.reference import DraftRows
from headrace.models.decoder import Decoder, Tap
from headrace.models.draft_head import DraftHead
from headrace.request import StepPlan
from headrace.worker.draft_blocks import DraftBlocks
from headrace.worker.draft_setup import MOST_PENDING
from headrace.worker.graphs import DecodeGraphs
from headrace.worker.rows import Gather, Ints, Rows, Trait, ints, iota, pack, places_on, ship_all, within
from headrace.worker.sampler import Draw, SampleBatch, Sampler, draw_of
from headrace.worker.speculator import Proposal, Proposer

# tokens of a pass that graphs are captured for, of 64 rows that catch up with two each: of more, seldom anything is drafted
MOST_DRAFTING = 128
_MOST_AT_ONCE = 64  # tokens of a pass that one call computes: of more, GEMMs of many rows are quicker
_UNKNOWN = -1
# As integers: flags of an enum are made anew by each operation, which takes longer than asking all rows.
_UNEDITED = int(Trait.SCORED | Trait.MASKED)  # changes no logits here: a draft that its grammar forbids is cut later
_DRAWN = _UNEDITED | int(Trait.RANDOM | Trait.FILTERED)


class Drawing(Proposer):
    """What proposers that compute have in common: drafts are drawn as the target's tokens are, written into the rows
    for the next pass, and brought to the host after the step that verifies them."""

    def __init__(
        self,
        rows: Rows,
        kernels: Kernels,
        max_logits_rows: int,
        blocks: Sequence[DraftBlocks] = (),
        graphs: DecodeGraphs | None = None,
        ahead: int = 0,
    ) -> None:
        """``blocks``: which of the target's have a place; empty: all have, under their own numbers. ``graphs``: of its
        passes. ``ahead``: as Gather has it."""
        self._rows = rows
        self._most_logits = max_logits_rows
        self._blocks = blocks
        self._graphs = graphs
        self._tables = draft_tables(rows, blocks)
        self._gather = Gather(rows, kernels, self._tables, ahead)
        self._sampler = Sampler(rows, kernels)

    def forget(self) -> None:
        for each in self._blocks:
            each.forget()
        if self._graphs is not None:
            self._graphs.restart()

    def _graphed(self, rows: Ints) -> Draw | None:
        """How graphs draw the next tokens of ``rows``; None: they do not."""
        if self._graphs is None or not self._graphs.draws(len(rows)):
            return None
        return draw_of(self._rows.traits[rows] & ~_UNEDITED)

    def _replayed(self, rows: Ints, contexts: Ints, **how: Any) -> Tensor | None:
        """Hidden states as a graph computes them, [rows, hidden]; None: none serves so many. ``how``: as ``write`` has it."""
        if self._graphs is None or not self._graphs.serves(len(rows)):
            return None
        return self._graphs.hidden(self._graphs.write(rows, contexts, **how), len(rows))

    def _release(self) -> None:
        if self._graphs is not None:
            self._graphs.launches.release()

    def _may_draft(self, rows: Ints) -> NDArray[np.bool_]:
        return ~np.any([each.bare[rows] for each in self._blocks], axis=0) if self._blocks else np.ones(len(rows), bool)

    def _follow(self, plan: StepPlan, groups: Sequence[int], caches: Sequence[Tensor]) -> None:
        """Rows' blocks, and copies of blocks, as the target has them."""
        for each in self._blocks:
            each.apply(plan)
        if not plan.copy_group:
            return
        for at, (group, cache) in enumerate(zip(groups, caches, strict=True)):
            pairs = zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True)
            same = [(source, target) for own, source, target in pairs if own == group]
            for source, target in zip(*self._blocks[at].copies(plan), strict=True) if self._blocks else same:
                cache[target].copy_(cache[source], non_blocking=True)

    def _draw_from(
        self, score: Callable[[Tensor], Tensor], hidden: Tensor, rows: Ints, positions: Ints, depth: int
    ) -> None:
        """From ``score(hidden)`` [rows, vocab] the tokens at ``positions``, the last ``depth`` before which are drafts;
        of no more rows at once than a step samples."""
        for first in range(0, len(rows), self._most_logits):
            piece = slice(first, first + self._most_logits)
            row, position = rows[piece], positions[piece]
            every = iota(len(row))
            batch = SampleBatch(row, position, every, np.full(len(row), depth, dtype=np.int32))
            tokens = self._sampler.propose(score(hidden[piece]).float(), batch)
            self._rows.put(row, position, tokens.to(torch.int32))

    def _drafted(self, rows: Ints, lengths: Ints, most: int) -> Tensor:  # [rows, most], int32, on the host
        """What the rows hold now; samples will be written over it."""
        self._release()
        found = self._rows.held(rows, lengths, most)
        if found.device.type == "cpu":
            return found
        return torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)


def _joined_answers(answers: Sequence[Ints], last: NDArray[np.int64]) -> Ints:  # [rows, passes]
    """Tokens that passes have left on the host; of the first those at ``last``."""
    made: Ints = np.empty((len(last), len(answers)), dtype=np.int32)
    made[:, 0] = answers[0][last, 0]
    for depth, each in enumerate(answers[1:], start=1):
        made[:, depth] = each[:, 0]
    return made


def _ends(starts: Ints, counts: Ints) -> Ints:  # [Σ counts]
    """Where each token of chunks ends: the keys that it sees."""
    return np.repeat(starts, counts) + within(counts) + 1


def chunk_plan(rows: Ints, starts: Ints, counts: Ints) -> StepPlan:
    """Chunks of which the last token is read."""
    columns = [array("i", column.astype(np.int32).tobytes()) for column in (rows, starts, counts)]
    return StepPlan(-1, rows=columns[0], starts=columns[1], counts=columns[2], sample_rows=columns[0],
                    sample_work=array("i", range(len(rows))))  # fmt: skip


def draft_tables(rows: Rows, blocks: Sequence[DraftBlocks]) -> tuple[Tensor, ...]:
    """The rows' block tables as drafts see them."""
    views = {each.group: each.view for each in blocks}
    return tuple(views.get(group, table) for group, table in enumerate(rows.tables))


class DraftModel(Drawing):
    """``kv_caches``: one for each of the draft's KV groups; ``groups``: the target's group whose block
    table each uses."""

    def __init__(
        self,
        decoder: Decoder,
        kv_caches: Sequence[Tensor],
        groups: Sequence[int],
        rows: Rows,
        kernels: Kernels,
        max_logits_rows: int,
        blocks: Sequence[DraftBlocks] = (),
        graphs: DecodeGraphs | None = None,
        *,
        told: bool = False,
    ) -> None:
        """``told``: by ``correct``, what of its rows was wrong; else it takes what was drafted beyond a row's end for
        refuted."""
        super().__init__(rows, kernels, max_logits_rows, blocks, graphs)
        self._decoder = decoder
        self._kv_caches = tuple(kv_caches)
        self._groups = tuple(groups)
        self._told = told
        self._computed = rows.column(_UNKNOWN)  # tokens of each row whose keys are there

    def begins(self, plan: StepPlan, *, compute: bool = True) -> None:
        """Computes what is new of prompts, or leaves that to ``propose``. Of a new row its first chunk says what was
        found in the cache: whoever computed that, drafted."""
        self._follow(plan, self._groups, self._kv_caches)
        if plan.rows_dropped:
            self._computed[list(plan.rows_dropped)] = _UNKNOWN  # one that is built again without has its keys
        if not plan.rows:
            return
        rows, starts, counts = (ints(column) for column in (plan.rows, plan.starts, plan.counts))
        computed, long = self._computed[rows], counts > 1
        true = np.where(long, starts, computed) if self._told else starts
        begin = np.where(computed == _UNKNOWN, starts, np.minimum(computed, true))
        self._computed[rows] = begin
        longer = np.flatnonzero(long & self._may_draft(rows)) if long.any() else ()
        if len(longer) and compute:
            ends = (starts + counts)[longer]
            self._hidden(rows[longer], begin[longer], ends - begin[longer])
            self._computed[rows[longer]] = ends
        if plan.sample_rows != plan.rows:  # a chunk's other takers have the keys that its own row has
            self._computed[ints(plan.sample_rows)] = self._computed[rows[ints(plan.sample_work)]]

    def propose(self, rows: Ints, lengths: Ints, most: Ints, ready: Ints | None = None) -> Proposal:
        """Its own next tokens, one after another; the first pass catches up. ``ready``: so many of each row are
        drawn."""
        counts = np.where(self._may_draft(rows), most, 0).astype(np.int32) if self._blocks else most
        begun = lengths if ready is None else (lengths + np.minimum(ready, counts)).astype(np.int32)
        left = lengths + counts - begun
        live, told = np.flatnonzero(left), None
        if len(live) == len(rows):
            told = self._draw_drafts(rows, begun, left)
        elif len(live):
            self._draw_drafts(rows[live], begun[live], left[live])
        return Proposal(
            counts,
            told if told is not None and ready is None else self._drafted(rows, lengths, int(counts.max())),
            stand=True,
        )

    def correct(self, rows: Ints, true: Ints) -> None:
        """Of each row no more than so many tokens are what it took them for."""
        self._computed[rows] = np.minimum(self._computed[rows], true)

    def count(self, rows: Ints, tokens: Sequence[Sequence[int]]) -> None:
        """Tokens that the target has sampled."""
        self._sampler.count(rows.tolist(), tokens)

    def may_go_on(self, rows: Ints) -> NDArray[np.bool_]:
        """Whose next draft needs no more than the tokens before it."""
        plain: NDArray[np.bool_] = (self._rows.traits[rows] & ~_DRAWN) == 0
        return plain & self._may_draft(rows)

    def go_on(self, rows: Ints, lengths: Ints) -> None:
        """One token more, after the drafts that end at ``lengths``."""
        self._draw_drafts(rows, lengths, np.ones_like(lengths))

    def catch_up(self, rows: Ints, lengths: Ints, most: int) -> None:
        """Until no more than ``most`` tokens wait for a row's next draft, so many at once."""
        for row, length in zip(rows[self._may_draft(rows)], lengths[self._may_draft(rows)], strict=True):
            while length - 1 - self._computed[row] > most:
                self._hidden(ints([row]), self._computed[row : row + 1].copy(), ints([most]))
                self._computed[row] += most

    def _draw_drafts(self, rows: Ints, lengths: Ints, most: Ints) -> Callable[[], Ints] | None:
        """Returns where they will be on the host, if graphs bring them there."""
        # what was drafted beyond was refuted, or is sampled anew
        starts: Ints = np.minimum(self._computed[rows], lengths - 1)
        self._computed[rows] = lengths + most - 1
        if self._decoder.draft_tokens is None:
            how = self._graphed(rows)
            if how is None or (most != most[0]).any():
                self._draw_by_pass(rows, starts, lengths, most)
                return None
            return self._replay_passes(rows, starts, lengths, int(most[0]), how)
        at_once = (self._rows.traits[rows] & ~_DRAWN) == 0
        self._draw_all(rows[at_once], starts[at_once], lengths[at_once], most[at_once])
        if not at_once.all():
            self._draw_by_pass(rows[~at_once], starts[~at_once], lengths[~at_once], most[~at_once])
        return None

    def _replay_passes(
        self, rows: Ints, starts: Ints, lengths: Ints, most: int, how: Draw
    ) -> Callable[[], Ints] | None:
        """As many tokens of each row, by graphs alone: what they deliver needs no copy."""
        graphs, count, counts = self._graphs, len(rows), lengths - starts
        assert graphs is not None
        answers, last = list[Ints](), np.arange(count)
        behind = int(counts.sum()) - count
        if not behind or graphs.draws(behind + count):
            graphs.launches.hold()  # nothing else is queued before the target's step
        if behind and graphs.draws(behind + count):
            last = np.cumsum(counts) - 1
            answers.append(self._caught_up(graphs, np.repeat(rows, counts), _ends(starts, counts), last, how))
        elif behind:
            graphs.draw_from(self._hidden(rows, starts, counts), rows, lengths, how)
        for depth in range(behind > 0, most):
            bucket = graphs.write(rows, lengths + depth, shared_tokens=0)
            graphs.compute(bucket, how)
            answers.append(graphs.draw(bucket, count, how))
        if len(answers) < most:
            return None
        return partial(_joined_answers, answers, last)

    def _caught_up(self, graphs: DecodeGraphs, rows: Ints, contexts: Ints, last: NDArray[np.int64], how: Draw) -> Ints:
        """A pass over several tokens of a row, and the token behind each row's last; those behind others are stored
        nowhere."""
        bucket = graphs.write(rows, contexts, shared_tokens=0, chained=True)
        graphs.compute(bucket)
        places = np.zeros_like(contexts)
        places[last] = contexts[last]
        return graphs.draw_at(bucket, rows, places, how)

    def _draw_all(self, rows: Ints, starts: Ints, lengths: Ints, most: Ints) -> None:
        """All passes in one call, of rows whose logits nothing edits. Filters are left out: what they would forbid is
        mostly not drawn."""
        assert self._decoder.draft_tokens is not None
        if len(rows):
            columns = (rows, starts, lengths, most, self._rows.num_prompt_tokens[rows])
            row, start, length, count, prompt = (torch.from_numpy(each.astype(np.int32)) for each in columns)
            given = DraftRows(row, start, length, count, prompt, *self._sampler.temperatures(row.long()))
            self._decoder.draft_tokens(self._rows.token_ids, self._tables[self._groups[0]], given, self._kv_caches[0])

    def _draw_by_pass(self, rows: Ints, starts: Ints, lengths: Ints, most: Ints) -> None:
        counts = lengths - starts
        if (counts == 1).all():
            self._draw_next(rows, lengths, 0)
        elif self._graphs is not None and (how := self._graphed(rows)) is not None:
            self._graphs.draw_from(self._hidden(rows, starts, counts), rows, lengths, how)
        else:
            self._draw(self._hidden(rows, starts, counts), rows, lengths, 0)
        for depth in range(1, int(most.max())):
            live = np.flatnonzero(most > depth)
            self._draw_next(rows[live], lengths[live] + depth, depth)

    def _hidden(self, rows: Ints, starts: Ints, counts: Ints) -> Tensor:  # [rows, hidden]
        """Of each chunk's last token."""
        contexts, chained = _ends(starts, counts), bool((counts > 1).any())
        hidden = self._replayed(np.repeat(rows, counts), contexts, shared_tokens=0, chained=chained)
        if hidden is not None:
            last = np.cumsum(counts, dtype=np.int32) - 1
            return hidden[ship_all(self._rows.device, last)[0].long()] if chained else hidden
        plan = chunk_plan(rows, starts, counts)
        return self._passed(self._gather.inputs(plan, pack(plan, padded=False, prune=True)))

    def _passed(self, inputs: ForwardInputs) -> Tensor:  # [wanted tokens, hidden]
        inputs = replace(inputs, attention=tuple(inputs.attention[group] for group in self._groups))
        if self._decoder.draft_tokens is None or len(inputs.token_ids) > _MOST_AT_ONCE:
            return self._decoder.forward(inputs, self._kv_caches)
        hidden = self._decoder.draft_tokens.hidden(inputs, self._kv_caches[0])
        return hidden if inputs.wanted is None else hidden[inputs.wanted]

    def _draw_next(self, rows: Ints, lengths: Ints, depth: int) -> None:
        """The token after the ``lengths`` that rows have, the last ``depth`` of them drafts, where keys of all but one
        are there."""
        graphs, how = self._graphs, self._graphed(rows)
        if graphs is None or how is None:
            return self._draw(self._hidden(rows, lengths - 1, np.ones_like(lengths)), rows, lengths, depth)
        bucket = graphs.write(rows, lengths, shared_tokens=0)
        graphs.compute(bucket, how)
        graphs.draw(bucket, len(rows), how)

    def _draw(self, hidden: Tensor, rows: Ints, positions: Ints, depth: int) -> None:
        self._draw_from(self._decoder.logits, hidden, rows, positions, depth)


_NOTHING = -2  # position 0 follows upon nothing that could be held
AHEAD = 1  # by so much an entry's token stands after its position
_Entries = tuple[Ints, Ints, Ints, Tensor]  # rows, starts, counts, and what they take


class HeadDrafter(Drawing):
    """A draft head over the rows of its target: which of the target's hidden states meet which tokens, and where they
    lie.

        position           s-1    s     s+1   ...  e-1    e
        target's step             [ computed tokens  ]    sampled
        head's entries     s-1    s     ...   e-2   (e-1)          entry i: hidden states of i, token i + 1

    An entry lies where the target keeps the keys of its position, so the last entry of a chunk waits, with its hidden
    states (``held``), for the token that follows. Once a step is over, keys and values of all other entries can be
    written, and are when they may be needed, or when there are many (``pending``): steps that draft nothing cost
    less so. The first pass of a draft computes the one that waited, and each later one goes on from the pass before.
    Entries of drafts that were refuted are written over. A block's last entry depends on the first token of the next
    block: whoever finds blocks in the cache therefore leaves out the last one (CacheManager.lookahead).

    ``group``: the target's KV group whose block tables it uses. ``graphs``: of its entries, each a row.
    """

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
        self._at = rows.column(_NOTHING)  # which that is
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
        work = np.concatenate([iota(len(rows)), ints(plan.sample_work)])
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
        """The token after the ``lengths`` that rows have; what the one after it takes of ``carried`` [rows, carried].
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
        """Of entries at consecutive positions: each has the token after its own."""
        plan = chunk_plan(rows, starts, counts)
        inputs = self._gather.inputs(plan, pack(plan, padded=False))
        return replace(inputs, attention=(inputs.attention[self._group],))


def _joined(entries: Sequence[_Entries]) -> tuple[Ints, Ints, Ints]:
    rows, starts, counts = (np.concatenate([each[at] for each in entries]) for at in range(3))
    return rows, starts, counts
