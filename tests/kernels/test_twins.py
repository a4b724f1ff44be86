"""The torch twins against other people's mathematics: they are the oracle of every kernel, so they need one
themselves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.attention import reference as attention_twins
from headrace.kernels.attention.candidates import sequence_attention
from headrace.kernels.inputs import AttentionInputs
from headrace.kernels.moe import reference as moe_twins
from headrace.kernels.norm import reference as norm_twins
from headrace.spec import Activation
from tests.support.kernel_cases import PagedCase


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_paged_attention_is_masked_attention(heads: int, kv_heads: int, window: int | None) -> None:
    case = PagedCase([(1, 19), (6, 6), (4, 21)], heads=heads, kv_heads=kv_heads, dim=8, dtype=torch.float32)
    out, token = case.run(attention_twins.paged_attention, window), 0
    for row, (count, context) in enumerate(case.lengths):
        blocks = case.table[row, : -(-context // case.block_size)].long()
        k, v = (
            cache[blocks].transpose(0, 1).reshape(kv_heads, -1, 8)[:, :context].repeat_interleave(heads // kv_heads, 0)
            for cache in (case.k_cache, case.v_cache)
        )
        at, key = torch.arange(context - count, context)[:, None], torch.arange(context)
        mask = (key <= at) & (key > at - (window or context))
        want = F.scaled_dot_product_attention(case.q[token : token + count].transpose(0, 1), k, v, attn_mask=mask)
        torch.testing.assert_close(out[token : token + count], want.transpose(0, 1))
        token += count


def test_paged_attention_caps_scores() -> None:
    case = PagedCase([(1, 9)], heads=1, kv_heads=1, dim=4, dtype=torch.float32)
    blocks = case.table[0, :2].long()
    k, v = (cache[blocks, 0].reshape(-1, 4)[:9] for cache in (case.k_cache, case.v_cache))
    weights = torch.softmax(0.3 * torch.tanh(case.q[0] @ k.T * 0.5 / 0.3), -1)
    torch.testing.assert_close(case.run(attention_twins.paged_attention, None, 0.3)[0], weights @ v)


@pytest.mark.parametrize("attend", [attention_twins.whole_attention, sequence_attention])
def test_whole_attention_is_unmasked_attention_of_each_sequence(attend: Any) -> None:
    """Neighbours that are equally long, an empty one, views of one matrix."""
    torch.manual_seed(0)
    starts = [0, 3, 6, 6, 7, 20]
    q, k, v = torch.randn(20, 12, 8).split_with_sizes((4, 4, 4), dim=1)
    edges = torch.tensor(starts, dtype=torch.int32)
    inputs = AttentionInputs(edges, edges, edges.diff(), edges, 16, 13, 13)
    out = attend(q, k, v, inputs, 0.3)
    for begin, end in pairwise(starts):
        heads = [each[begin:end].transpose(0, 1) for each in (q, k, v)]
        want = torch.softmax(heads[0] @ heads[1].mT * 0.3, dim=-1) @ heads[2]
        torch.testing.assert_close(out[begin:end], want.transpose(0, 1))


def test_queries_that_see_nothing_give_zeros() -> None:
    case = PagedCase([(5, 2), (2, 0), (1, 3)], heads=2, kv_heads=1, dim=4, dtype=torch.float32)
    out = case.run(attention_twins.paged_attention)
    assert out.isfinite().all()
    assert not out[:3].any() and not out[5:7].any()  # positions -3 … -1; an empty context
    assert out[3:5].all() and out[7].all()


def test_rotary_is_a_complex_product_and_writes_where_slots_say() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 6), torch.randn(3, 1, 6), torch.randn(3, 1, 6)
    angles = torch.randn(10, 2)
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.tensor([7, 0, 3])
    k_cache, v_cache = torch.zeros(2, 1, 4, 6), torch.zeros(2, 1, 4, 6)
    turned = attention_twins.rotary_write(
        q.clone(), k.clone(), v, positions, cos_sin, k_cache, v_cache, torch.tensor([5, -1, 0])
    )

    def by_complex(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(
            torch.ones(3, 1, 2), angles[positions].unsqueeze(1)
        )
        return torch.cat((pairs.real, pairs.imag, x[..., 4:]), -1)

    torch.testing.assert_close(turned, by_complex(q))
    torch.testing.assert_close(k_cache[1, :, 1], by_complex(k)[0])
    torch.testing.assert_close(k_cache[0, :, 0], by_complex(k)[2])
    torch.testing.assert_close(v_cache[1, :, 1], v[0])
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == 12  # the token at slot -1 went nowhere


def test_norms_add_the_residual_first() -> None:
    x, residual, weight, bias = (torch.randn(3, 8, dtype=torch.float64).float() for _ in range(4))
    y, total = norm_twins.rms_norm(x, weight[0], 1e-5, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, F.rms_norm(x + residual, (8,), weight[0], 1e-5))
    y, total = norm_twins.layer_norm(x, weight[0], bias[0], 1e-5, None)
    assert total is x
    torch.testing.assert_close(y, F.layer_norm(x, (8,), weight[0], bias[0], 1e-5))


@pytest.mark.parametrize("kind", list(Activation))
def test_gated_activation_splits_gate_from_up(kind: Activation) -> None:
    x = torch.randn(3, 10)
    act = {
        Activation.SILU: F.silu,
        Activation.GELU: F.gelu,
        Activation.GELU_TANH: lambda g: F.gelu(g, approximate="tanh"),
    }[kind]
    want = act(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(norm_twins.gated_activation(x, kind), want)


@pytest.mark.parametrize("renormalize", [True, False])
def test_moe_is_the_weighted_sum_over_all_experts(renormalize: bool) -> None:
    torch.manual_seed(1)
    x, router = torch.randn(5, 6), torch.randn(5, 4)
    gate_up, down = torch.randn(4, 14, 6), torch.randn(4, 6, 7)
    weights = torch.softmax(router, -1)
    kept = weights * (weights >= weights.topk(2).values[:, 1:])
    kept = kept / kept.sum(-1, keepdim=True) if renormalize else kept
    inner = torch.einsum("th,eih->tei", x, gate_up)
    every = torch.einsum("tei,ehi->teh", F.silu(inner[..., :7]) * inner[..., 7:], down)
    torch.testing.assert_close(
        moe_twins.moe(x, router, gate_up, down, 2, renormalize, Activation.SILU),
        (every * kept.unsqueeze(-1)).sum(1),
        atol=1e-4,
        rtol=1e-4,
    )


def test_equal_experts_are_taken_in_order() -> None:
    assert moe_twins.route(torch.zeros(1, 6), 3, True)[1].tolist() == [[0, 1, 2]]
