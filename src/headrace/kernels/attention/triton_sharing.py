# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Which decoding sequences begin with the same blocks, found on the device once a step.

What lives here: finding them, and the layout of what is found. What may not: the launch (triton_plan.py), attention
over shared blocks.

    sequence        | 0        | 1        | 2    | 3        | 4        A block that two sequences have at the same place
    holds the same
    block table     | 7 8 9 .. | 7 8 9 .. | 3 .. | 7 8 9 .. | 7 5 ..   keys, made of the same tokens: all before it is
    equal, too. So
    shared blocks   | 3        | 3        | 0    | 3        | 0        columns are compared one by one, without looking
    back.

Each sequence chooses the depth at which most reading is saved, depth × (sequences that share it − 1); those that chose
the same block are a group, cut into chunks of as many as one tile of queries holds. No grouping is wrong: one is only
quicker than another.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 64  # queries × heads of a KV head in one tile over shared keys: what one wgmma takes
PAIRS = 512  # of chunk and KV head: what there is scratch memory for
UNIT = 128  # shared tokens are a multiple of it, so that any tile of keys begins and ends there
FEWEST = 16  # sequences: below, looking costs more than sharing gains
LEAST_SAVED = 1024  # tokens that need not be read again, or a group is not worth its merging
# Rows of what is found, [LINES, sequences] int32. Of each sequence: tokens it shares, its chunk, its place in it.
OWN, CHUNK, SLOT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Of each chunk: where its members begin in ORDER (sequences, by chunk), how many, shared tokens, those of chunks before
# it. QUERY: the packed token of each sequence in ORDER.
ORDER, FIRST, COUNT, TOKENS, AHEAD = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
# For itself: the block chosen; rank in the group, its size, its first member; chunks, members, tokens of groups before
# (of first members)
_KEY, _RANK, _SIZE, _LEADER, _CHUNKS, _MEMBERS, _BEFORE = (tl.constexpr(row) for row in range(8, 15))
QUERY = tl.constexpr(15)
LINES = 16


def members(group: int) -> int:
    """Sequences in one chunk."""
    return int(ROWS // triton.next_power_of_2(group))


@triton.jit
def _whole_blocks(query_start_ptr, context_ptr, each, inside, BLOCK_SIZE: tl.constexpr):
    """Blocks that every query of the sequence sees whole; 0 for sequences of more than one query."""
    queries = tl.load(query_start_ptr + each + 1, mask=inside, other=0) - tl.load(
        query_start_ptr + each, mask=inside, other=0
    )
    context = tl.load(context_ptr + each, mask=inside, other=0)
    return tl.where(queries == 1, tl.maximum(context - 1, 0) // BLOCK_SIZE, 0)


@triton.jit
def _best_depth(
    sequence, table_ptr, query_start_ptr, context_ptr, sequences, table_row,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Blocks to share, 0 if none, and the tokens that all who share them save."""
    whole = _whole_blocks(query_start_ptr, context_ptr, sequence, sequence < sequences, BLOCK_SIZE)
    best, most, column, going = whole * 0, whole * 0, whole * 0, whole > 0
    while going:
        each = column + tl.arange(0, BLOCK_K)
        own = tl.load(table_ptr + sequence.to(tl.int64) * table_row + each, mask=each < whole, other=-1)
        count = tl.zeros((BLOCK_K,), tl.int32)
        for some in range(0, sequences, BLOCK_S):
            other = some + tl.arange(0, BLOCK_S)
            theirs = _whole_blocks(query_start_ptr, context_ptr, other, other < sequences, BLOCK_SIZE)
            at = table_ptr + other.to(tl.int64)[:, None] * table_row + each[None, :]
            block = tl.load(at, mask=each[None, :] < tl.minimum(theirs, whole)[:, None], other=-2)
            count += tl.sum((block == own[None, :]).to(tl.int32), 0)
        saved = (each + 1) * BLOCK_SIZE // UNIT * UNIT * (count - 1)
        top = tl.max(saved, 0)
        best = tl.where(top > most, tl.max(tl.where(saved == top, each + 1, 0), 0), best)
        most = tl.maximum(most, top)
        column += BLOCK_K
        going = (column < whole) & (tl.max(tl.where(each == column - 1, count, 0), 0) > 1)
    return best, most


@triton.jit
def _get(out_ptr, out_row, LINE: tl.constexpr, at, mask, other):
    return tl.load(out_ptr + LINE * out_row + at, mask=mask, other=other)


@triton.jit
def _put(out_ptr, out_row, LINE: tl.constexpr, at, value, mask):
    tl.store(out_ptr + LINE * out_row + at, value, mask=mask)


@triton.jit
def _rank(out_ptr, out_row, sequences, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr):
    """Of each sequence that chose a depth: its rank among those that chose the same, how many they are, the first of
    them."""
    for begin in range(0, sequences, BLOCK_I):
        each = begin + tl.arange(0, BLOCK_I)
        tokens = _get(out_ptr, out_row, OWN, each, each < sequences, 0)
        key = _get(out_ptr, out_row, _KEY, each, each < sequences, -1)
        rank, size = tl.zeros((BLOCK_I,), tl.int32), tl.zeros((BLOCK_I,), tl.int32)
        leader = tl.full((BLOCK_I,), 2**30, tl.int32)
        for some in range(0, sequences, BLOCK_S):
            other = some + tl.arange(0, BLOCK_S)
            their_tokens = _get(out_ptr, out_row, OWN, other, other < sequences, -1)
            their_key = _get(out_ptr, out_row, _KEY, other, other < sequences, -2)
            same = (key[:, None] == their_key[None, :]) & (tokens[:, None] == their_tokens[None, :])
            size += tl.sum(same.to(tl.int32), 1)
            rank += tl.sum((same & (other[None, :] < each[:, None])).to(tl.int32), 1)
            leader = tl.minimum(leader, tl.min(tl.where(same, other[None, :], 2**30), 1))
        _put(out_ptr, out_row, _RANK, each, rank, each < sequences)
        _put(out_ptr, out_row, _SIZE, each, size, each < sequences)
        _put(out_ptr, out_row, _LEADER, each, leader, each < sequences)


@triton.jit
def _deal(
    out_ptr, out_row, sequences,
    MEMBERS: tl.constexpr, MOST_CHUNKS: tl.constexpr, LEAST: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Chunks, members and tokens of the groups before each; then every chunk as one of no keys, behind all others."""
    chunks, members, before = sequences * 0, sequences * 0, sequences * 0
    for some in range(0, sequences, BLOCK_S):
        each = some + tl.arange(0, BLOCK_S)
        inside = each < sequences
        tokens = _get(out_ptr, out_row, OWN, each, inside, 0)
        size = _get(out_ptr, out_row, _SIZE, each, inside, 0)
        first = inside & (_get(out_ptr, out_row, _RANK, each, inside, 1) == 0)
        first = first & (size > 1) & (tokens > 0) & (tokens * (size - 1) >= LEAST)
        needed = tl.where(first, tl.cdiv(size, MEMBERS), 0)
        upto = chunks + tl.cumsum(needed, 0)
        taken = first & (upto <= MOST_CHUNKS)
        size, spent = tl.where(taken, size, 0), tl.where(taken, needed * tokens, 0)
        _put(out_ptr, out_row, _CHUNKS, each, tl.where(taken, upto - needed, -1), inside)
        _put(out_ptr, out_row, _MEMBERS, each, members + tl.cumsum(size, 0) - size, inside)
        _put(out_ptr, out_row, _BEFORE, each, before + tl.cumsum(spent, 0) - spent, inside)
        chunks, members, before = chunks + tl.sum(needed, 0), members + tl.sum(size, 0), before + tl.sum(spent, 0)
    for some in range(0, sequences, BLOCK_S):
        each = some + tl.arange(0, BLOCK_S)
        _put(out_ptr, out_row, TOKENS, each, 0, each < sequences)
        _put(out_ptr, out_row, COUNT, each, 0, each < sequences)
        _put(out_ptr, out_row, AHEAD, each, before, each < sequences)


@triton.jit
def _seat(query_start_ptr, out_ptr, out_row, sequences, MEMBERS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Each sequence's chunk and place, and each chunk's description by its first member."""
    for some in range(0, sequences, BLOCK_S):
        each = some + tl.arange(0, BLOCK_S)
        inside = each < sequences
        tokens = _get(out_ptr, out_row, OWN, each, inside, 0)
        rank = _get(out_ptr, out_row, _RANK, each, inside, 0)
        size = _get(out_ptr, out_row, _SIZE, each, inside, 0)
        leader = _get(out_ptr, out_row, _LEADER, each, inside & (tokens > 0), 0)
        chunks = _get(out_ptr, out_row, _CHUNKS, leader, inside & (tokens > 0), -1)
        seated = chunks >= 0
        place = _get(out_ptr, out_row, _MEMBERS, leader, seated, 0) + rank
        ahead = _get(out_ptr, out_row, _BEFORE, leader, seated, 0) + rank // MEMBERS * tokens
        chunk = chunks + rank // MEMBERS
        _put(out_ptr, out_row, OWN, each, tl.where(seated, tokens, 0), inside)
        _put(out_ptr, out_row, CHUNK, each, chunk, seated)
        _put(out_ptr, out_row, SLOT, each, rank % MEMBERS, seated)
        _put(out_ptr, out_row, ORDER, place, each, seated)
        query = tl.load(query_start_ptr + each, mask=seated, other=0)
        _put(out_ptr, out_row, QUERY, place, query, seated)
        opens = seated & (rank % MEMBERS == 0)
        _put(out_ptr, out_row, FIRST, chunk, place, opens)
        _put(out_ptr, out_row, COUNT, chunk, tl.minimum(size - rank, MEMBERS), opens)
        _put(out_ptr, out_row, TOKENS, chunk, tokens, opens)
        _put(out_ptr, out_row, AHEAD, chunk, ahead, opens)


@triton.jit
def choose_depth(
    sequence, table_ptr, query_start_ptr, context_ptr, out_ptr, out_row, sequences, table_row,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, LEAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes what one sequence would share."""
    depth, saved = _best_depth(
        sequence, table_ptr, query_start_ptr, context_ptr, sequences, table_row, BLOCK_SIZE, UNIT, BLOCK_S, BLOCK_K
    )
    shares = (depth > 0) & (saved >= LEAST)
    block = tl.load(table_ptr + sequence.to(tl.int64) * table_row + depth - 1, mask=shares, other=-1)
    tl.store(out_ptr + OWN * out_row + sequence, tl.where(shares, depth * BLOCK_SIZE // UNIT * UNIT, 0))
    tl.store(out_ptr + _KEY * out_row + sequence, block)


@triton.jit
def form_groups(
    query_start_ptr, out_ptr, out_row, sequences,
    MEMBERS: tl.constexpr, MOST_CHUNKS: tl.constexpr, LEAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """From what each would share, by one program: chunks, and what each sequence does share. Returns the most that one
    does."""
    most = sequences * 0
    for some in range(0, sequences, BLOCK_S):
        each = some + tl.arange(0, BLOCK_S)
        most = tl.maximum(most, tl.max(_get(out_ptr, out_row, OWN, each, each < sequences, 0), 0))
    if most > 0:
        _rank(out_ptr, out_row, sequences, BLOCK_S, BLOCK_I)
        tl.debug_barrier()
        _deal(out_ptr, out_row, sequences, MEMBERS, MOST_CHUNKS, LEAST, BLOCK_S)
        tl.debug_barrier()
        _seat(query_start_ptr, out_ptr, out_row, sequences, MEMBERS, BLOCK_S)
        tl.debug_barrier()
    return most
