"""Runs of drafts in one C call against their twin, pass by pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.candidate import Declined, StepFacts
from headrace.kernels.inputs import ForwardInputs
from headrace.kernels.operations import DRAFT_TOKENS
from headrace.kernels.step.reference import DraftRows, StepWeights, draft_tokens
from headrace.layers.rotary import rotary_table
from headrace.spec import DecoderSpec, LayerSpec, RopeSpec
from tests.support.kernel_cases import PagedCase
from tests.support.specs import SMALL
from tests.support.tree_cases import tree_inputs

CPU = torch.device("cpu")
VOCAB, WIDTH, INNER, DIM, LONGEST, BLOCK = 203, 48, 80, 16, 64, 4


def _spec(heads: int, kv_heads: int, layers: int) -> DecoderSpec:
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "head_dim": DIM,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": VOCAB,
    }
    return replace(SMALL, layers=(LayerSpec(),) * layers, rope=RopeSpec(theta=1e4, rotary_dim=DIM), **sizes)


def _weights(spec: DecoderSpec, dtype: torch.dtype) -> StepWeights:
    torch.manual_seed(3)

    def made(*shape: int) -> Tensor:
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)

    heads = spec.num_heads * DIM
    shapes = ((sum(spec.qkv_heads) * DIM, WIDTH), (WIDTH, heads), (2 * INNER, WIDTH), (WIDTH, INNER))
    norms = [(1 + torch.randn(WIDTH) / 8).to(dtype) for _ in range(2)]
    layers = tuple((*(made(*shape) for shape in shapes), *norms) for _ in spec.layers)
    assert spec.rope is not None
    turns = rotary_table(spec.rope, LONGEST, CPU)
    return StepWeights(
        layers, made(VOCAB, WIDTH) * 4, norms[0], made(VOCAB, WIDTH), turns, spec.qkv_heads, spec.norm_eps, DIM**-0.5
    )


def _run(draft: object, spec: DecoderSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three of four rows, over blocks in any order: one is caught up from its beginning, one goes on, one drafts
    less."""
    torch.manual_seed(5)
    ids = torch.randint(VOCAB, (4, LONGEST), dtype=torch.int32)
    table = torch.randperm(4 * LONGEST // BLOCK).int().view(4, -1)
    cache = torch.zeros(table.numel(), len(spec.layers), 2, spec.num_kv_heads, BLOCK, DIM, dtype=dtype)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    for start, length, most in (
        (ints(0, 0, 0), ints(9, 21, 30), ints(1, 1, 1)),
        (ints(0, 20, 29), ints(10, 22, 31), ints(5, 3, 1)),
    ):
        temperature, seed = torch.tensor([0.0, 0.7, 1.3]), torch.tensor([1, 2**40 + 5, -3])
        draft(ids, table, DraftRows(ints(2, 0, 3), start, length, most, ints(4, 2, 9), temperature, seed), cache)  # type: ignore[operator]
    return ids, cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "layers"), [(2, 2, 1), (4, 2, 3)])
def test_tokens_and_keys_are_the_twins(dtype: torch.dtype, heads: int, kv_heads: int, layers: int) -> None:
    spec = _spec(heads, kv_heads, layers)
    kernels, weights = Kernels(CPU), _weights(spec, dtype)
    make = kernels.offer(DRAFT_TOKENS, StepFacts(dtype, spec))
    if make is None:
        pytest.skip("there is no C compiler here")
    ids, cache = _run(make(weights), spec, dtype)
    wanted, keys = _run(draft_tokens(weights), spec, dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 6e-2
    if dtype is torch.float32:
        assert torch.equal(ids, wanted)
        torch.testing.assert_close(cache, keys, rtol=tolerance, atol=tolerance)
    else:  # a near tie may fall the other way, and all behind it follows
        assert (ids != wanted).sum() <= 4
        first = ids.eq(wanted).all(1)
        assert first.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("branched", [False, True])
def test_hidden_states_of_one_pass_are_the_twins(dtype: torch.dtype, branched: bool) -> None:
    """Behind a cache that both have: two sequences, whose tokens stand in a row or in a tree."""
    spec = _spec(4, 2, 3)
    weights = _weights(spec, dtype)
    make = Kernels(CPU).offer(DRAFT_TOKENS, StepFacts(dtype, spec))
    if make is None:
        pytest.skip("there is no C compiler here")
    case = PagedCase([(9, 30), (5, 17)], heads=4, kv_heads=2, dim=DIM, dtype=dtype, block_size=BLOCK)
    places = torch.cat([torch.arange(context - count, context) for count, context in case.lengths])
    row = torch.tensor([0] * 9 + [1] * 5)
    slots = case.table[row, places // BLOCK].long() * BLOCK + places % BLOCK
    seen = replace(tree_inputs(case, [True, True]) if branched else case.inputs, slots=slots)
    positions = places if seen.tree is None else seen.tree.first[row] + _ones(seen.tree.ancestors) - 1
    cache = torch.randn(len(case.k_cache), 3, 2, 2, BLOCK, DIM).to(dtype)
    given = ForwardInputs(torch.randint(VOCAB, (len(row),)), positions, (seen,))
    (found, keys), (wanted, expected) = (
        (made.hidden(given, mine), mine)
        for made, mine in ((make(weights), cache.clone()), (draft_tokens(weights), cache.clone()))
    )
    tolerance = 1e-5 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(keys, expected, rtol=tolerance, atol=tolerance)


def _ones(bits: Tensor) -> Tensor:
    return torch.tensor([value.bit_count() for value in bits.tolist()])


@pytest.mark.parametrize(
    "change", [{"qk_norm": True}, {"qkv_bias": True}, {"sandwich_norm": True}, {"layers": (LayerSpec(window=4),)}]
)
def test_other_mathematics_is_declined(change: dict[str, object]) -> None:
    kernels = Kernels(CPU)
    spec = replace(_spec(2, 2, 1), **change)  # type: ignore[arg-type]
    assert kernels.offer(DRAFT_TOKENS, StepFacts(torch.float32, spec), reported=True) is None
    assert kernels.passed[0].declined and not isinstance(kernels.passed[0], Declined)
