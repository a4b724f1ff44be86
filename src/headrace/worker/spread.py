"""A step's inputs on one of several ranks that share the keys: its own of the keys, and in steps with prompts its own of
the rows.

What lives here: the mapping of block tables, slots and contexts, which rank computes which rows. What may not: which
rank has which key (parallel/context.py), meeting (layers/basic.py).

    few rows    every rank computes all of them; each token is a sequence of one query, since how many of a rank's keys
                it sees does not grow by one from token to token
    many        a rank computes the rows whose keys are its own, filled up to as many as the others have. All ranks'
                queries attend to the keys of each: those of one rank and one chunk are a sequence, for every next one
                of them sees one more key of each rank

                rank                     | 0                      | 1                      |
                sequences (- fills up)   | chunk 0 | chunk 1 | -  | chunk 0 | chunk 1 | -  |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.kernels.inputs import AttentionInputs
from headrace.parallel.context import KeyShare

Ints = NDArray[np.int32]

# Tokens of a step with prompts from which on ranks compute different ones, by device: of fewer, a GEMM takes as long.
LEAST_SPREAD = {"cpu": 16, "cuda": 256}


def of_tokens(share: KeyShare, inputs: AttentionInputs, chunk: Tensor, position: Tensor) -> AttentionInputs:
    """The rank's view of a step of which it computes every row. ``chunk``, ``position`` [tokens], int32: as a Packing
    has them. It reads nothing back."""
    table, start, count = inputs.block_table, inputs.query_start, len(position)
    if count != len(inputs.context_len):
        table = table.index_select(0, chunk)
        start = torch.arange(count + 1, dtype=torch.int32, device=chunk.device)
    found = replace(inputs, block_table=table, query_start=start, context_len=share.keys(position), max_query_len=1)
    return _own(share, found)


def of_ranks(share: KeyShare, inputs: AttentionInputs, context: Tensor, longest_query: int) -> AttentionInputs:
    """The same of a step whose rows are spread. ``context`` [sequences], int32: keys of the rank that each one's last
    query sees."""
    return _own(share, replace(inputs, context_len=context, max_query_len=longest_query, spread=True))


def _own(share: KeyShare, inputs: AttentionInputs) -> AttentionInputs:
    """``inputs`` whose slots and block size are the scheduler's, without what only one rank makes use of."""
    size, slots = inputs.block_size, inputs.slots
    offset = slots % size  # of a slot below 0, whatever
    mine = (slots >= 0) & (offset % share.size == share.rank)
    own = slots // size * (size // share.size) + offset // share.size
    return replace(
        inputs,
        slots=torch.where(mine, own, -1),
        block_size=size // share.size,
        max_context_len=-(-inputs.max_context_len // share.size),
        shared_tokens=0,
        leading=0,
        chained=False,
    )


@dataclass(frozen=True, slots=True)
class SpreadRows:
    """Which rows a rank computes; on the host. w = chunks, s = ranks · (w + 1) sequences, n = its rows."""

    sequence: Ints  # [s]: the chunk of each; of those that fill up, any
    query_start: Ints  # [s + 1]
    context: Ints  # [s]: keys of all ranks that come before the end of the chunk
    own_context: Ints  # [s]: keys of this rank that the last query sees
    tokens: Ints  # [n]: packed tokens; -1 where it is filled up
    wanted: Ints  # [m]: its own of the wanted ones, counted from its first; filled up with any
    order: Ints  # [wanted]: where they lie among those that all ranks give
    longest: int  # queries of a sequence
    passed_start: Ints  # [s - w]: where keys go to the queries: this rank's rows, once for each other rank's keys
    passed_context: Ints  # [s]: keys of this rank, then of each other, that the last of them sees


def spread_rows(share: KeyShare, context: Ints, chunk: Ints, position: Ints, wanted: Ints) -> SpreadRows:
    """Fields as of a Packing without dummies and trees. ``wanted``: packed tokens, at least one."""
    ranks, chunks = share.size, len(context)
    owner = position % ranks
    order = np.argsort(owner, kind="stable")  # packed tokens, rank by rank
    counts = np.bincount(owner, minlength=ranks)
    firsts, most = np.cumsum(counts) - counts, counts.max()
    lengths = np.empty((ranks, chunks + 1), dtype=np.int32)
    lengths[:, :chunks] = np.bincount(owner * chunks + chunk, minlength=ranks * chunks).reshape(ranks, chunks)
    lengths[:, chunks] = most - counts
    ends = np.tile(np.append(context, 0), ranks)
    rank = np.repeat(np.arange(ranks), chunks + 1)
    last = ends - 1 - (ends - 1 - rank) % ranks  # the position of the rank's last query
    own = np.where((lengths.ravel() > 0) & (ends > 0), share.keys(last), 0)

    place = np.empty(len(owner), dtype=np.int32)  # of a token among its rank's
    place[order] = np.arange(len(owner)) - firsts[owner[order]]
    of_wanted = owner[wanted]
    many = np.bincount(of_wanted, minlength=ranks)
    nth = np.empty(len(wanted), dtype=np.int64)  # of a wanted token among its rank's wanted ones
    by_rank = np.argsort(of_wanted, kind="stable")
    nth[by_rank] = np.arange(len(wanted)) - (np.cumsum(many) - many)[of_wanted[by_rank]]
    mine = place[wanted[of_wanted == share.rank]]
    first = firsts[share.rank]
    return SpreadRows(
        np.tile(np.append(np.arange(chunks), 0), ranks).astype(np.int32),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
        ends.astype(np.int32),
        own.astype(np.int32),
        _filled(order[first : first + counts[share.rank]], most, -1),
        _filled(mine, many.max(), 0),
        (of_wanted * many.max() + nth).astype(np.int32),
        int(lengths.max()),
        np.concatenate(([0], np.cumsum(np.tile(lengths[share.rank], ranks - 1)))).astype(np.int32),
        _seen(share, lengths[share.rank], np.append(context, 0)),
    )


def _seen(share: KeyShare, lengths: Ints, ends: Ints) -> Ints:
    """Keys of this rank, then of each other, that the last of this rank's queries of each chunk sees. ``lengths``: how
    many queries; ``ends``: of the chunks."""
    last = ends - 1 - (ends - 1 - share.rank) % share.size
    ranks = [share, *(replace(share, rank=rank) for rank in _others(share))]
    return np.concatenate([np.where((lengths > 0) & (ends > 0), each.keys(last), 0) for each in ranks]).astype(np.int32)


def _others(share: KeyShare) -> list[int]:
    return [rank for rank in range(share.size) if rank != share.rank]


def given_blocks(share: KeyShare, first: Ints, context: Ints, block_size: int) -> tuple[Ints, Ints, Ints]:
    """What each rank gives of a KV group's blocks: of each the chunk and the place in its table; and the table of all that
    others give, [s - w - 1, places], where of each rank values lie after keys. ``first``, ``context``: keys of each
    chunk from the first that a query sees on."""
    begins, ends = first // block_size, -(-context // block_size)
    counts = ends - begins
    firsts, total, width = np.cumsum(counts) - counts, int(counts.sum()), int(ends.max())
    chunk = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(total) - (firsts - begins)[chunk]
    table = np.clip(np.append(firsts - begins, 0)[:, None] + np.arange(width), 0, total - 1)
    every = np.concatenate([table + 2 * total * rank for rank in _others(share)])
    return chunk.astype(np.int32), place.astype(np.int32), every.astype(np.int32)


def _filled(values: NDArray[np.integer], count: int, value: int) -> Ints:
    found = np.full(count, value, dtype=np.int32)
    found[: len(values)] = values
    return found
