"""Paged caches in which some sequences' new tokens are a tree's.

What lives here: the case, and each query of it alone. What may not: assertions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from headrace.kernels.inputs import AttentionInputs, TreeInputs
from tests.support.kernel_cases import PagedCase


def random_ancestors(count: int, draw: random.Random) -> list[int]:
    """Of a tree of so many tokens, its root first, each behind any of those before it."""
    masks = [1]
    masks += [0] * (count - 1)
    for token in range(1, count):
        masks[token] = masks[draw.randrange(token)] | 1 << token
    return masks


def tree_inputs(case: PagedCase, trees: Sequence[bool], seed: int = 0) -> AttentionInputs:
    """The case's, where the queries of some sequences are trees."""
    draw, ancestors = random.Random(seed), list[int]()
    for (count, _), is_tree in zip(case.lengths, trees, strict=True):
        ancestors += random_ancestors(count, draw) if is_tree else [0] * count
    first = torch.tensor([context - count for count, context in case.lengths], dtype=torch.int32)
    return replace(case.inputs, tree=TreeInputs(first, torch.tensor(ancestors)))


def alone(case: PagedCase, inputs: AttentionInputs) -> Iterator[tuple[int, AttentionInputs]]:
    """Each query with the keys that it sees in a row, of a case with blocks of one token."""
    assert inputs.tree is not None and inputs.block_size == 1
    token = 0
    for row, (count, context) in enumerate(case.lengths):
        for at in range(count):
            bits, first = int(inputs.tree.ancestors[token]), context - count
            behind = [first + bit for bit in range(64) if bits >> bit & 1] or range(first, first + at + 1)
            places = torch.tensor([*range(first), *behind])
            table, length = case.table[row][places][None].contiguous(), torch.tensor([len(places)], dtype=torch.int32)
            one = torch.tensor([0, 1], dtype=torch.int32)
            yield token, AttentionInputs(table, one, length, torch.tensor([-1]), 1, 1, len(places))
            token += 1
