"""Rows: what a worker remembers of each running sequence, on the device, edited by the deltas of StepPlans; and the tensors
of one step, gathered from them.

What lives here: the row tensors, penalty counts among them, what the host keeps beside them, and the packed staging
copy that carries a step's numbers to the device; packing sequences one after another (or padding them to the longest,
to show what packing is worth), positions, slots, and which packed token's logits each sample needs. What may not:
computing, sampling, decisions.

Rows are a cache of the scheduler's state: dropping all of them and adding them again gives the same next step.

    packed tokens       | sequence 0 . . . | sequence 1 | sequence 2 . . . . . |
    query_start           0                  4            5                      11
    padded to longest   | - - 0 . . . | - - - - - 1 | 2 . . . . . |              "-": a dummy token; it writes no KV and
    query_start           0             6             12            18           nothing is read from its output
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from functools import lru_cache
from itertools import accumulate, compress, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.candidate import Facts
from headrace.kernels.inputs import (
    MOST_FEW,
    AdapterRows,
    AttentionInputs,
    ForwardInputs,
    PassedKeys,
    Queries,
    TreeInputs,
    adapter_rows,
    slot_rows,
)
from headrace.kernels.operations import GATHER_INPUTS
from headrace.kernels.rows.reference import write_rows
from headrace.parallel.context import KeyShare
from headrace.request import NO_SLOT, NewRow, SamplingParams, StepPlan
from headrace.worker.spread import LEAST_SPREAD, given_blocks, of_ranks, of_tokens, spread_rows

Ints = NDArray[np.int32]
Wide = NDArray[np.int64]
Edits = tuple[Sequence[int], Sequence[int], Sequence[int]]  # of one block table: rows, indices, blocks

# Columns of a row's parameters: float32 bits first, integers after them.
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INT_COLUMNS = ("top_k", "seed_low", "seed_high", "num_prompt_tokens", "adapter_slot")
_NUM_FLOATS = len(FLOAT_COLUMNS)
_SMALLEST_REPETITION = 1e-30  # a logit divided by less would be infinite in float32; to the choice it is the same


# int32 values: every part begins at 16 bytes, so that kernels are not compiled again for parts that do not
_ALIGNED = 4


class Staging:
    """Collects int32 arrays and ships them to the device in one copy; ``ship`` returns them in the order they were
    put."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[Sequence[Ints | array[int]], int]] = []  # each in pieces, and how many values it has

    def put(self, values: Ints) -> None:
        self._parts.append(((values.ravel(),), values.size))

    def put_wide(self, values: Wide) -> None:
        """Arrives as twice as many values, to be viewed as int64: indices that nothing on the device has to widen."""
        self.put(values.view(np.int32))

    def put_joined(self, pieces: Sequence[array[int]]) -> None:
        """One after another, each copied once: out of where it lies into what is shipped."""
        self._parts.append((pieces, sum(map(len, pieces))))

    def ship(self) -> list[Tensor]:
        sizes = [size for _, size in self._parts]
        starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
        host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=self._device.type == "cuda")
        packed = host.numpy()
        for (pieces, _), start in zip(self._parts, starts, strict=False):
            for piece in pieces:
                packed[start : start + len(piece)] = piece
                start += len(piece)
        shipped = host.to(self._device, non_blocking=True)
        return [shipped[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def ship_all(device: torch.device, *parts: Ints) -> list[Tensor]:
    """In one copy."""
    staging = Staging(device)
    for part in parts:
        staging.put(part)
    return staging.ship()


def places_on(device: torch.device, *parts: Ints) -> list[Tensor]:
    """The same as indices: int64."""
    return [part.long() for part in ship_all(device, *parts)]


def ints(values: ArrayLike) -> Ints:
    """A column of a plan, without a copy."""
    return np.asarray(values, dtype=np.int32)


def iota(count: int) -> Ints:
    """0, 1, … of so many."""
    return np.arange(count, dtype=np.int32)


def within(counts: Ints) -> Ints:  # [Σ counts]
    """0, 1, … for each of them."""
    return iota(counts.sum()) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)


@dataclass(frozen=True, slots=True)
class BadWords:
    """Banned token sequences of one row, flat. Entry e bans ``last[e]`` when its ``lengths[e]`` prefix ids end the
    output."""

    last: Ints  # [entries]
    lengths: Ints  # [entries]
    prefix: Ints  # [Σ lengths]
    entry: Ints  # [Σ lengths]: which entry each prefix id belongs to
    distance: Ints  # [Σ lengths]: how far before the next output position each must stand, from 1


class Trait(IntFlag):
    """What a row's sampling needs beyond the argmax of its raw logits."""

    RANDOM = 1  # temperature above 0
    FILTERED = 2  # top-k, top-p or min-p
    EDITED = 4  # bias, allowed ids, bad words, min_tokens
    PENALISED = 8
    COUNTED = 16  # a presence or frequency penalty: occurrences in the output are counted
    SCORED = 32  # logprobs
    MASKED = 64  # a grammar


@dataclass(frozen=True, slots=True)
class HostRow:
    """What the host must know of a row without asking the device."""

    params: SamplingParams
    traits: Trait
    stop_ids: Ints  # where they are ever masked
    allowed_ids: Ints | None
    bias_ids: Ints
    bias_values: NDArray[np.float32]
    bad_words: BadWords | None


_NO_IDS, _NO_VALUES = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)


def _host_rows(added: Sequence[NewRow], vocab_size: int) -> list[HostRow]:
    """A batch's rows often share one object of parameters: what is found out of it is found out once."""
    found: dict[tuple[object, ...], HostRow] = {}
    hosts = []
    for new in added:
        key = (id(new.params), new.stop_token_ids, new.bad_word_ids)
        host = found.get(key)
        if host is None:
            host = found[key] = _host_row(new, vocab_size)
        hosts.append(host)
    return hosts


def _host_row(new: NewRow, vocab_size: int) -> HostRow:
    params, bias = new.params, new.params.logit_bias
    # a checkpoint's EOS may have no logit
    stops = [token for token in new.stop_token_ids if token < vocab_size] if params.min_tokens else ()
    return HostRow(
        params=params,
        traits=_traits(params, bad_words=bool(new.bad_word_ids), open_end=bool(stops)),
        stop_ids=ints(stops) if stops else _NO_IDS,
        allowed_ids=None
        if params.allowed_token_ids is None
        else np.frombuffer(params.allowed_token_ids.packed, dtype=np.int32),
        bias_ids=ints(list(bias)) if bias else _NO_IDS,
        bias_values=np.array(list(bias.values()), dtype=np.float32) if bias else _NO_VALUES,
        bad_words=_bad_words(new.bad_word_ids) if new.bad_word_ids else None,
    )


_TRAITS = tuple(map(int, Trait))


def _traits(p: SamplingParams, *, bad_words: bool, open_end: bool) -> Trait:
    """``open_end``: ids that would end the answer are masked until it has min_tokens."""
    counted = p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    held = (  # in Trait's order
        not p.greedy,
        p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0,
        bad_words or open_end or bool(p.logit_bias) or p.allowed_token_ids is not None,
        counted or p.repetition_penalty != 1.0,
        counted,
        p.logprobs is not None,
        p.structured_outputs is not None,
    )
    return Trait(sum(compress(_TRAITS, held)))


def _bad_words(words: tuple[tuple[int, ...], ...]) -> BadWords | None:
    words = tuple(word for word in words if word)
    if not words:
        return None
    lengths = ints([len(word) - 1 for word in words])
    return BadWords(
        last=np.array([word[-1] for word in words], dtype=np.int32),
        lengths=lengths,
        prefix=np.array([token for word in words for token in word[:-1]], dtype=np.int32),
        entry=np.repeat(iota(len(words)), lengths),
        distance=ints([len(word) - 1 - i for word in words for i in range(len(word) - 1)]),
    )


def _floats(p: SamplingParams) -> tuple[float, ...]:
    return (
        p.temperature,
        p.top_p,
        p.min_p,
        p.presence_penalty,
        p.frequency_penalty,
        max(p.repetition_penalty, _SMALLEST_REPETITION),
    )


def _param_bits(added: Sequence[NewRow]) -> Ints:  # [rows, columns]
    floats = {key: _floats(params) for key, params in {id(new.params): new.params for new in added}.items()}
    ints = [
        (
            max(new.params.top_k, 0),
            new.seed & 0xFFFFFFFF,
            new.seed >> 32 & 0xFFFFFFFF,
            new.num_prompt_tokens,
            new.adapter_slot & 0xFFFFFFFF,
        )
        for new in added
    ]
    columns = np.array([floats[id(new.params)] for new in added], dtype=np.float32), np.array(ints, dtype=np.uint32)
    return np.concatenate([part.view(np.int32) for part in columns], axis=1)


def lazy_zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 zeros; on a CPU the operating system provides them page by page at first touch."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)


class Rows:
    """The state of all rows of one worker, from step to step.

    ``token_ids[row, i]`` is token i of the row's sequence: known ids are written when the row is built, sampled ones
    where they were sampled, so that a later step finds them without the host. ``write`` carries out the operation of
    that name (``write_rows``).
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        vocab_size: int,
        block_sizes: Sequence[int],
        device: torch.device,
        write: Callable[..., None] = write_rows,
        share: KeyShare | None = None,
    ) -> None:
        """``share``: of ranks that share the keys, this one's; block sizes are the scheduler's."""
        self.device, self.share = device, share
        self.block_sizes = tuple(block_sizes)
        self.token_ids = lazy_zeros((max_rows, max_model_len), device)
        widths = [-(-max_model_len // size) for size in block_sizes]
        firsts = [0, *accumulate(-(-max_rows * width // _ALIGNED) * _ALIGNED for width in widths)]
        self._places = lazy_zeros((firsts.pop(),), device)  # of all tables, so that one launch edits any of them
        self.tables = tuple(  # [rows, blocks] a group
            self._places[first : first + max_rows * width].view(max_rows, width)
            for first, width in zip(firsts, widths, strict=True)
        )
        self._firsts, self._widths = np.array(firsts, dtype=np.int64), np.array(widths, dtype=np.int64)
        self._write = write
        self.params = lazy_zeros((max_rows, _NUM_FLOATS + len(INT_COLUMNS)), device)  # bits
        self.counts = lazy_zeros((max_rows, vocab_size), device)  # occurrences in the output, for rows that count them
        self.host: dict[int, HostRow] = {}
        self.traits = np.zeros(max_rows, dtype=np.int32)  # Trait bits, so that a step asks about all its rows at once
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int32)
        self.adapter_slots = np.full(max_rows, NO_SLOT, dtype=np.int32)

    def column(self, value: int = 0) -> Ints:  # [rows]
        """A number kept for each row, as it begins."""
        return np.full(len(self.traits), value, dtype=np.int32)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.token_ids, *self.tables, self.params, self.counts))

    def apply(self, plan: StepPlan) -> None:
        """Drops rows, builds rows, edits block tables: the part of a plan that changes rows before anything is
        computed."""
        self.drop(plan)
        if not plan.rows_added and not plan.table_row:
            return
        # a row given away twice in a plan is the last one's
        added = tuple({new.row: new for new in plan.rows_added}.values())
        staging = Staging(self.device)
        if plan.table_row:
            places, blocks = self._table_edits(plan)
            staging.put_wide(places)
            staging.put(blocks)
        if added:
            self._note(added)
            self._stage(added, staging)
        staged = staging.ship()
        if plan.table_row:
            self._places.index_copy_(0, staged[0].view(torch.int64), staged[1])
        if added:
            self._build(added, *staged[-4:])

    def drop(self, plan: StepPlan) -> None:
        for row in plan.rows_dropped:
            self.host.pop(row, None)

    def edits_of(self, plan: StepPlan) -> Edits | None:
        """(rows, indices, blocks): all that ``apply`` would do besides dropping rows, in any order, no more than rows
        the plan has. None: it would do more."""
        count = len(plan.table_row)
        if plan.rows_added or len(self.tables) > 1 or count > len(plan.rows):
            return None
        if count > 1 and len({*zip(plan.table_row, plan.table_index, strict=True)}) < count:
            return None
        return plan.table_row, plan.table_index, plan.table_block

    def clear(self) -> None:
        self.host.clear()

    def _note(self, added: Sequence[NewRow]) -> None:
        """What the host remembers of them."""
        assert max(len(new.token_ids) for new in added) <= self.token_ids.shape[1], (
            "a row holds no more than the longest sequence"
        )
        rows, hosts = [new.row for new in added], _host_rows(added, self.counts.shape[1])
        self.traits[rows] = [host.traits for host in hosts]
        self.num_prompt_tokens[rows] = [new.num_prompt_tokens for new in added]
        self.adapter_slots[rows] = [new.adapter_slot for new in added]
        self.host.update(zip(rows, hosts, strict=True))

    def _stage(self, added: Sequence[NewRow], staging: Staging) -> None:
        ids = [new.token_ids for new in added]
        staging.put_wide(np.array([new.row for new in added], dtype=np.int64))
        staging.put(_param_bits(added))
        staging.put(ints([0, *accumulate(map(len, ids))]))
        staging.put_joined(ids)

    def _build(self, added: Sequence[NewRow], row: Tensor, bits: Tensor, begin: Tensor, ids: Tensor) -> None:
        row = row.view(torch.int64)
        self.params.index_copy_(0, row, bits.view(len(added), -1))
        self._write(self.token_ids, ids, row, begin, max(len(new.token_ids) for new in added))
        counted = self.traits[[new.row for new in added]] & Trait.COUNTED
        if counted.any():
            self._count(added, counted, ids)

    def _count(self, added: Sequence[NewRow], counted: Ints, ids: Tensor) -> None:
        """Occurrences in the outputs of those that count them. Few have outputs already: those that begin again."""
        self.counts.index_fill_(0, places_on(self.device, ints([new.row for new in compress(added, counted)]))[0], 0)
        ends = accumulate((len(new.token_ids) for new in added), initial=0)
        for new, counts, (begin, end) in zip(added, counted, pairwise(ends), strict=True):
            if counts and begin + new.num_prompt_tokens < end:
                outputs = ids[begin + new.num_prompt_tokens : end].long()
                self.counts[new.row].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def slots_of(self, rows: Tensor, positions: Tensor) -> Tensor:  # [n], int32
        """Of these rows' adapters, or NO_SLOT; of rows that fill a step up, which are at no position, too."""
        slots = self.params[:, _NUM_FLOATS + INT_COLUMNS.index("adapter_slot")]
        return torch.where(positions >= 0, slots.index_select(0, rows), NO_SLOT)

    def put(self, rows: Ints, places: Ints, ids: Ints | Tensor) -> None:
        """Tokens ``ids`` [n], int32, into ``rows`` [n] at ``places`` [n]."""
        row, place, *shipped = ship_all(self.device, rows, places, *(() if isinstance(ids, Tensor) else (ids,)))
        self.token_ids[row.long(), place.long()] = ids if isinstance(ids, Tensor) else shipped[0]

    def held(self, rows: Ints, begins: Ints, width: int) -> Tensor:  # [n, width], int32
        """Tokens of ``rows`` [n] from ``begins`` [n] on; what is beyond a row's end means nothing."""
        row, begin = places_on(self.device, rows, begins)
        places = begin[:, None] + torch.arange(width, device=self.device)
        return self.token_ids[row[:, None], places.clamp_(max=self.token_ids.shape[1] - 1)]

    def float_params(self, rows: Tensor) -> Tensor:  # [n] → [n, FLOAT_COLUMNS], float32
        return self.params[rows][:, :_NUM_FLOATS].view(torch.float32)

    def int_params(self, rows: Tensor) -> Tensor:  # [n] → [n, INT_COLUMNS], int64; seed words are 32 bits, unsigned
        return self.params[rows][:, _NUM_FLOATS:].long()

    def _table_edits(self, plan: StepPlan) -> tuple[Wide, Ints]:
        """Where in all tables, and which blocks; of two edits of one place the later one holds."""
        group = np.asarray(plan.table_group) if len(self.tables) > 1 else 0
        places = (
            np.asarray(plan.table_row, dtype=np.int64) * self._widths[group]
            + np.asarray(plan.table_index)
            + self._firsts[group]
        )
        assert (np.asarray(plan.table_index) < self._widths[group]).all(), "a block table has no such place"
        blocks, ordered = ints(plan.table_block), np.sort(places)
        if (ordered[1:] != ordered[:-1]).all():  # as ever; telling costs a tenth of finding the last ones
            return places, blocks
        _, last = np.unique(places[::-1], return_index=True)
        last = len(places) - 1 - last
        return places[last], blocks[last]


LEAST_LEADING = 16  # sequences of one query before prompts, from which on they are worth a launch that takes no others
# Tokens of a step, by device, from which on those that are wanted attend by themselves in the last layer: of fewer, all
# do as quickly.
LEAST_QUERIES = {"cpu": 128, "cuda": 1024}


class Even(NamedTuple):
    """Chunks of as many tokens each, all of which are sampled from: where these lie in a step, and its plan's columns. All
    of it is shared, and never changed."""

    query_start: Ints  # [chunks + 1]
    chunk: Ints  # [tokens]
    inside: Ints  # [each]: 0, 1, …
    every: array[int]  # [chunks]: 0, 1, …
    counts: array[int]  # [chunks]
    work: array[int]  # [tokens]: as ``chunk``
    back: array[int]  # [tokens]: how far before its chunk's last each is


@lru_cache(maxsize=64)
def even(chunks: int, each: int) -> Even:
    first, inside = iota(chunks + 1), iota(each)
    chunk = np.repeat(first[:-1], each)
    columns = first[:-1], np.full(chunks, each), chunk, np.tile(inside[::-1], chunks)
    return Even(first * each, chunk, inside, *map(as_array, columns))


def as_array(values: ArrayLike) -> array[int]:
    """A column of a plan."""
    return array("i", np.asarray(values, dtype=np.int32).tobytes())


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
    def queries(self) -> tuple[Ints, Ints, Ints]:
        """As ``Queries`` has them: chunks, contexts and query starts of the wanted tokens."""
        assert self.wanted is not None
        return self.chunk[self.wanted], self.position[self.wanted] + 1, iota(len(self.wanted) + 1)

    def sampled(self, plan: StepPlan) -> Ints:  # [samples]
        """The packed token whose logits each of the plan's samples reads."""
        tokens = self.last[ints(plan.sample_work)]
        return tokens - ints(plan.sample_back) if plan.sample_back else tokens

    def begun(self, plan: StepPlan) -> Ints:  # [samples]
        """The packed token that begins the chunk of each."""
        work = ints(plan.sample_work)
        begun: Ints = self.last[work] + 1 - ints(plan.counts)[work]
        return begun

    def hidden_rows(self, tokens: Ints) -> Ints:
        """Where the hidden states of these packed tokens lie among those that were computed."""
        return tokens if self.wanted is None else np.searchsorted(self.wanted, tokens).astype(np.int32)

    @property
    def leading(self) -> int:
        """As AttentionInputs has it; 0, too, where they are few, or all there are. Captured steps do without: last
        bits may differ."""
        lengths = np.diff(self.query_start)
        longer = np.flatnonzero(lengths != 1)
        if not len(longer) or longer[0] < LEAST_LEADING or (lengths[longer[0] :] <= MOST_FEW).any():
            return 0
        return int(longer[0])


def pack(plan: StepPlan, *, padded: bool, prune: bool = False, first: bool = False) -> Packing:
    """``prune``: only hidden states that are sampled from are wanted, or with ``first`` those that begin their chunks.
    A step that scores prompts wants all, and so does one whose chunks are single tokens: captured steps compute
    those, sampled or not."""
    packing = _pack(plan, padded)
    if not prune or plan.prompt_logprobs or len(packing.chunk) == len(plan.rows):
        return packing
    wanted = packing.begun(plan) if first else packing.sampled(plan)
    if (wanted[1:] <= wanted[:-1]).any():  # seldom; sorting them takes longer than all else here
        wanted = np.unique(wanted)
    if len(wanted) == len(packing.chunk):
        return packing
    # kernels take no empty tensors
    return replace(packing, wanted=wanted if len(wanted) else np.zeros(1, dtype=np.int32))


def _pack(plan: StepPlan, padded: bool) -> Packing:
    starts, counts = ints(plan.starts), ints(plan.counts)
    if (counts == 1).all():  # a decode step: nothing to lay out
        every = iota(len(counts) + 1)
        return Packing(every, starts + 1, every[:-1], starts)
    if (counts == counts[0]).all():  # as steps that verify drafts are
        laid = even(len(counts), count := int(counts[0]))
        return Packing(laid.query_start, starts + count, laid.chunk, (starts[:, None] + laid.inside).ravel())
    lengths = np.full_like(counts, counts.max()) if padded else counts
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_start[1:])
    chunk = np.repeat(iota(len(counts)), lengths)
    context = starts + counts
    # The last token of a chunk sits at context - 1, and each packed token before it one position lower.
    offset = iota(query_start[-1]) - query_start[1:][chunk]
    position = context[chunk] + offset
    return Packing(query_start, context, chunk, np.where(position >= starts[chunk], position, -1).astype(np.int32))


class Gather:
    """Builds the tensors of a step: what the plan says is shipped in one copy, the rest is gathered from rows on the
    device."""

    def __init__(self, rows: Rows, kernels: Kernels, tables: Sequence[Tensor] | None = None, ahead: int = 0) -> None:
        """``tables``: instead of the rows' block tables; a draft's, which has all keys on every rank. ``ahead``: by so many a
        token stands after its position."""
        self._rows = rows
        self._ids = rows.token_ids[:, ahead:]
        self._tables = rows.tables if tables is None else tables
        self._share = rows.share if tables is None else None
        # where ranks share the keys, a step that is spread always has them
        self._least_queries = LEAST_QUERIES[rows.device.type] if self._share is None else sys.maxsize
        self._least_spread = LEAST_SPREAD[rows.device.type]
        self._gather = kernels.choose(GATHER_INPUTS, Facts(torch.int32))

    def inputs(self, plan: StepPlan, packing: Packing, slots: Ints | None = None) -> ForwardInputs:
        """At least one chunk. ``slots``: of its adapter, or none, for each; None: no chunk has one."""
        if self._share is not None and self._spreads(packing):
            return self._spread(self._share, plan, packing, slots)
        parts = [
            ints(plan.rows),
            packing.query_start,
            packing.context,
            packing.chunk,
            packing.position,
        ]
        tree, queries = packing.tree, len(packing.chunk) >= self._least_queries and packing.tree is None
        if packing.wanted is not None:
            parts += [packing.wanted, *(packing.queries if queries else ())]
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
            gathered = as_tree(gathered, position, TreeInputs(first, ancestors.view(torch.int64)))
        adapters = None if slots is None else self._adapters(packing, slots)
        own = Queries(*rest[1:]) if rest[1:] else None
        return replace(gathered, wanted=rest[0] if rest else None, queries=own, adapters=adapters)

    def _spreads(self, packing: Packing) -> bool:
        """Whether ranks that share the keys compute different rows."""
        tokens, chunks = len(packing.chunk), len(packing.context)
        return tokens > chunks and tokens >= self._least_spread and packing.position.min() >= 0

    def _spread(self, share: KeyShare, plan: StepPlan, packing: Packing, slots: Ints | None) -> ForwardInputs:
        wanted = iota(len(packing.chunk)) if packing.wanted is None else packing.wanted
        found = spread_rows(share, packing.context, packing.chunk, packing.position, wanted)
        real = found.tokens >= 0
        parts = (
            ints(plan.rows)[found.sequence],
            found.query_start,
            found.context,
            np.where(real, packing.chunk[found.tokens], 0).astype(np.int32),
            np.where(real, packing.position[found.tokens], -1).astype(np.int32),
            found.own_context,
            found.wanted,
            found.order,
            found.passed_start,
            found.passed_context,
            packing.chunk[wanted],
            share.keys(packing.position[wanted]),
            iota(len(wanted) + 1),
        )
        row, start, ends, chunk, position, context, picked, order, *passed = ship_all(self._rows.device, *parts)
        *passed, queries = *passed[:2], Queries(*passed[2:])
        longest = int(packing.context.max())
        inputs = self.gathered(row, start, ends, chunk, position, found.longest, longest, whole=True)
        attention = tuple(of_ranks(share, each, context, found.longest) for each in inputs.attention)
        if share.passes_keys(plan):
            windows = share.windows or (None,) * len(attention)
            attention = tuple(
                self._passed(share, each, packing, window, *passed)
                for each, window in zip(attention, windows, strict=True)
            )
        adapters = None
        if slots is not None:  # they may be others' rows, whose results come here in the last layer
            own = np.where(real, slots[packing.chunk[found.tokens]], NO_SLOT).astype(np.int32)
            adapters = slot_rows(own, self._rows.device)
            adapters = replace(adapters, wanted=adapter_rows(slots[packing.chunk[wanted]], self._rows.device))
        few = queries if len(wanted) <= len(packing.context) else None  # that are sampled from, and no prompt's scores
        return replace(inputs, attention=attention, wanted=picked, queries=few, order=order.long(), adapters=adapters)

    def _passed(
        self,
        share: KeyShare,
        inputs: AttentionInputs,
        packing: Packing,
        window: int | None,
        start: Tensor,
        seen: Tensor,
    ) -> AttentionInputs:
        """The same where keys go to the queries."""
        begun, chunks = packing.position[packing.query_start[:-1]], len(packing.context)
        first = np.zeros_like(begun) if window is None else np.maximum(begun - window + 1, 0)
        *places, table = given_blocks(share, first, packing.context, inputs.block_size * share.size)
        chunk, place, flat = ship_all(self._rows.device, *places, table)
        blocks = inputs.block_table[chunk.long(), place.long()].long()
        own = replace(
            inputs,
            block_table=inputs.block_table[: chunks + 1],
            query_start=start[: chunks + 2],
            context_len=seen[: chunks + 1],
        )
        others = replace(inputs, block_table=flat.view(table.shape), query_start=start, context_len=seen[chunks + 1 :])
        return replace(inputs, passed=PassedKeys(blocks, own, others))

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
        whole: bool = False,
    ) -> ForwardInputs:
        """The same from what is on the device already; ``whole``: over the scheduler's blocks also where ranks share
        the keys."""
        share = None if whole else self._share
        rows, attention = self._rows, []
        for table, block_size in zip(self._tables, rows.block_sizes, strict=True):
            width = -(-longest_context // block_size)
            ids, positions, slots, block_table = self._gather(
                self._ids, table, row, chunk, position, context, block_size, width
            )
            longest = longest_query, longest_context
            found = AttentionInputs(
                block_table, query_start, context, slots, block_size, *longest, shared_tokens, leading, chained
            )
            attention.append(found if share is None else of_tokens(share, found, chunk, position))
        return ForwardInputs(ids, positions, tuple(attention))

    def wanting(self, inputs: ForwardInputs, wanted: Tensor, chunk: Tensor, position: Tensor) -> ForwardInputs:
        """``inputs`` of a step of which only ``wanted`` [n] int32 are read, from what is on the device already."""
        queries = queries_of(wanted, chunk, position) if len(chunk) >= self._least_queries else None
        return replace(inputs, wanted=wanted, queries=queries)


def as_tree(inputs: ForwardInputs, position: Tensor, tree: TreeInputs) -> ForwardInputs:
    """``inputs`` gathered by the places of tokens that stand at ``position`` [tokens] int32, and form trees."""
    attention = tuple(replace(each, tree=tree) for each in inputs.attention)
    return replace(inputs, positions=position.long(), attention=attention)


def queries_of(wanted: Tensor, chunk: Tensor, position: Tensor) -> Queries:
    """As ``Packing.queries``, from what is on the device already (shapes as in ``Gather.gathered``), for a step that is
    captured.

    A token that is said again, to fill ``wanted`` [n] up, sees no keys: its result is read once.
    """
    new = torch.ones_like(wanted)
    new[1:] = wanted[1:] != wanted[:-1]
    start = torch.arange(len(wanted) + 1, dtype=torch.int32, device=wanted.device)
    return Queries(chunk[wanted], (position[wanted] + 1) * new, start)
