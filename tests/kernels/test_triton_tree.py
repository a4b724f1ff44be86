"""Attention over trees in Triton against its torch twin, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.attention import reference
from headrace.kernels.attention.paged import PagedAttention
from headrace.kernels.inputs import TreeInputs
from tests.support.kernel_cases import PagedCase, assert_close
from tests.support.tree_cases import tree_inputs

MIXED = [(9, 70), (1, 30), (21, 50), (17, 17)]


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, 30.0), (40, None)])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 2, 64), torch.bfloat16), ((3, 1, 33), torch.float32)], ids=["bfloat16", "float32"]
)
def test_a_tree_beside_rows_equals_its_twin(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    heads, kv_heads, dim = shape
    case = PagedCase(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=16)
    given = case.q, case.k_cache, case.v_cache, tree_inputs(case, (True, False, False, True)), 0.3, window, soft_cap
    run = PagedAttention(dim, heads // kv_heads, 2, False)
    assert_close(run(*given), reference.paged_attention(*given), dtype)


def test_a_trees_tokens_may_be_sequences_of_their_own() -> None:
    """As a captured step has them: the answer is that of the trees, and one of no sequence sees nothing."""
    case = PagedCase(MIXED, heads=4, kv_heads=2, dim=64, dtype=torch.float32, block_size=16)
    trees = tree_inputs(case, (True, False, False, True))
    assert trees.tree is not None
    tokens = len(case.q) + 1
    chunk = torch.cat(
        [torch.repeat_interleave(torch.arange(len(MIXED)), torch.diff(trees.query_start)), torch.zeros(1).long()]
    )
    place = torch.cat([*(torch.arange(end - count, end) for count, end in MIXED), torch.full((1,), -1)]).int()
    bits = torch.cat([trees.tree.ancestors, torch.zeros(1).long()])
    seen = torch.where(bits == 0, place + 1, trees.context_len[chunk])
    starts, tree = torch.arange(tokens + 1).int(), TreeInputs(trees.tree.first[chunk], bits)
    more = {"query_start": starts, "context_len": seen, "slots": torch.full((tokens,), -1), "max_query_len": 1}
    apart = replace(trees, block_table=trees.block_table[chunk], shared_tokens=0, tree=tree, **more)
    run = PagedAttention(64, 2, 2, False)
    q = torch.cat([case.q, case.q[:1]])
    found = run(q, case.k_cache, case.v_cache, apart, 0.3, None, None)
    wanted = reference.paged_attention(case.q, case.k_cache, case.v_cache, trees, 0.3, None, None)
    assert_close(found[:-1], wanted, torch.float32)
