"""Norms, rotary embedding, activations and embedding in Triton, against their torch twins, in the interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.attention import reference as attention_twins
from headrace.kernels.attention import triton_rotary as rotary
from headrace.kernels.norm import reference as norm_twins
from headrace.kernels.norm import triton_activation as activation
from headrace.kernels.norm import triton_norm as norm
from headrace.kernels.rows import reference as rows_twins
from headrace.kernels.rows import triton_embedding as embedding
from headrace.spec import Activation
from tests.support.kernel_cases import DTYPES, assert_close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 72), (5, 64), (2, 3, 40)])
@pytest.mark.parametrize("with_residual", [True, False])
def test_norms_equal_their_twins(dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]]  # strided
    residual = torch.randn(shape).to(dtype) if with_residual else None
    bias = torch.randn(shape[-1]).to(dtype)
    for weight in (torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1])):
        for got, want in zip(
            norm.rms_norm(x, weight, 1e-5, residual), norm_twins.rms_norm(x, weight, 1e-5, residual), strict=True
        ):
            assert_close(got, want, dtype)
        for shift in (None, bias):
            results = (
                function(x, weight, shift, 1e-5, residual) for function in (norm.layer_norm, norm_twins.layer_norm)
            )
            for got, want in zip(*results, strict=True):
                assert_close(got, want, dtype)


def test_norms_of_heads_inside_a_merged_product() -> None:
    heads = torch.randn(3, 6, 16, dtype=torch.float32)[:, 1:4]
    assert_close(
        norm.rms_norm(heads, torch.ones(16), 1e-6, None)[0],
        norm_twins.rms_norm(heads, torch.ones(16), 1e-6, None)[0],
        torch.float32,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (40, 20), (80, 80), (33, 0)])
def test_rotary_write_equals_its_twin(dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    torch.manual_seed(dim)
    cos_sin = torch.randn(50, rotary_dim) if rotary_dim else None
    slots, positions = torch.randperm(48)[:15], torch.randint(0, 50, (15,))
    slots[::7] = -1
    packed, results = torch.randn(15, 5 + 2 * 2, dim).to(dtype), []
    for write in (rotary.rotary_write, attention_twins.rotary_write):
        q, k, v = packed.clone().split((5, 2, 2), dim=1)  # strided, as they come out of the merged product
        caches = torch.zeros(3, 3, 2, 2, 16, dim, dtype=dtype)
        results.append((write(q, k, v, positions, cos_sin, caches[:, 1, 0], caches[:, 1, 1], slots), caches, k))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", list(Activation))
def test_activations_equal_their_twins(dtype: torch.dtype, kind: Activation) -> None:
    x = torch.cat((torch.randn(5, 146) * 3, torch.tensor([[-100.0, 100.0, 0.0, 1e-4, -1e-4, 0.24] + [1.0] * 140]))).to(
        dtype
    )
    assert_close(activation.gated_activation(x, kind), norm_twins.gated_activation(x, kind), dtype)
    assert_close(activation.activation(x[:, 1:], kind), norm_twins.activation(x[:, 1:].float(), kind).to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 7.5])
def test_embedding_equals_its_twin(dtype: torch.dtype, scale: float | None) -> None:
    table, ids = torch.randn(20, 100).to(dtype), torch.tensor([19, 0, 3, 3])
    assert torch.equal(embedding.embedding(ids, table, scale), rows_twins.embedding(ids, table, scale))
