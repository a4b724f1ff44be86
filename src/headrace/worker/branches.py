"""Trees of drafts in a step: where their tokens stand while it is computed, and what is kept of them.

A tree's keys lie one after another behind its row's, whatever stands behind what. Of the accepted path they are moved to
the places that these tokens have in the text; what lies beyond is written over.

What lives here: both. What may not: growing trees (draft_tree.py), which path is accepted (speculative/tree.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.attention import kv_codes
from headrace.spec import KVFormat
from headrace.speculative.tree import Tree
from headrace.worker.rows import Ints, PackedTree, Packing, Rows, places_on


@dataclass(frozen=True, slots=True)
class Branch:
    """``tokens`` that row ``row`` got behind its first ``length``; the keys of those before the last lie at ``path``,
    counted from the last known token."""

    row: int
    length: int
    path: Sequence[int]
    tokens: Sequence[int]


def branched(packing: Packing, trees: Mapping[int, Tree]) -> Packing:
    """Where the chunks ``trees`` are a tree, each behind its root: tokens stand as deep as they have tokens before
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
    return np.array([value for part in parts for value in part], dtype=np.int32)
