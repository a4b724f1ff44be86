"""What a rank holds of a model: every element of every weight is somebody's, and what cannot be shared is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from headrace.errors import ConfigError
from headrace.parallel.shares import Cut, cuts, share
from headrace.sites import Role, Split, weights
from headrace.spec import LayerSpec, MoESpec
from tests.support.specs import SMALL

SPEC = replace(SMALL, num_heads=8, num_kv_heads=2, head_dim=4, hidden_size=32, intermediate_size=24, vocab_size=50)
SPARSE = replace(SPEC, layers=(LayerSpec(), LayerSpec(moe=MoESpec(4, 2, 16, renormalize=True))))


def cells(cut: Cut) -> list[tuple[int, int]]:
    return [cell for rows in cut.rows for cell in product(rows, cut.columns)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("spec", [SPEC, SPARSE], ids=["dense", "sparse"])
def test_every_element_is_somebodys(spec: object, ranks: int) -> None:
    assert isinstance(spec, type(SPEC))
    mine = share(spec, ranks)
    held = [cuts(spec, mine, rank) for rank in range(ranks)]
    for weight, own in zip(weights(spec), weights(mine), strict=True):
        if weight.split is Split.NONE:
            assert own == weight and weight.name not in held[0]
            continue
        found = Counter(cell for each in held for cell in cells(each[weight.name]))
        assert set(found) == set(product(range(weight.outs), range(weight.ins)))
        copied = weight.role is Role.QKV and ranks > spec.num_kv_heads
        assert copied or set(found.values()) == {1}
        for each in held:
            size = sum(map(len, each[weight.name].rows)), len(each[weight.name].columns)
            assert size == (own.outs, own.ins) or weight.split is Split.VOCABULARY


def test_a_copied_kv_head_is_the_one_that_the_ranks_queries_look_at() -> None:
    for rank in range(8):
        q, k, v = cuts(SPEC, share(SPEC, 8), rank)["layers.0.attention.qkv"].rows
        query_head, kv_head = q.start // 4, (k.start - 32) // 4
        assert kv_head == query_head // 4 and v.start - k.start == 8 and len(k) == len(v) == 4


def test_pieces_of_a_merged_weight_are_found_in_the_tensors_that_it_is_stored_as() -> None:
    cut = Cut((range(4, 8), range(10, 12)), range(3), (14, 3), (14,), bias=True)
    assert list(cut.pieces(0, 14)) == [(0, slice(4, 8)), (4, slice(10, 12))]
    assert list(cut.pieces(0, 6)) == [(0, slice(4, 6))]
    assert list(cut.pieces(6, 8)) == [(2, slice(0, 2)), (4, slice(4, 6))]


@pytest.mark.parametrize(
    ("spec", "ranks", "words"),
    [
        (SPEC, 3, "8 attention heads do not divide by 3"),
        (replace(SPEC, num_heads=12, num_kv_heads=3), 4, "3 KV heads neither divide by 4"),
        (replace(SPEC, intermediate_size=26), 4, "26 inner values do not divide by 4"),
        (
            replace(SPARSE, layers=(LayerSpec(moe=MoESpec(4, 2, 18, renormalize=True)),)),
            4,
            "an expert's 18 inner values",
        ),
        (replace(SPEC, vocab_size=7), 8, "no more than 7 tokens"),
    ],
)
def test_what_does_not_divide_is_said(spec: object, ranks: int, words: str) -> None:
    assert isinstance(spec, type(SPEC))
    with pytest.raises(ConfigError, match=words):
        share(spec, ranks)
