"""Linear layers: every candidate against the twin, what they hold, and the bits they promise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headrace.kernels import Kernels
from headrace.kernels.linear import native as products
from headrace.kernels.linear import reference
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.sites import Role, Split, Weight
from tests.support.kernel_cases import DTYPES, assert_close, called, native

CPU = torch.device("cpu")
SHAPES = ((5, 7), (64, 96), (130, 100), (67, 544))  # (out, in): tails of every tile and vector


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
@pytest.mark.parametrize("disabled", [(), ("onednn",)])
def test_every_candidate_equals_the_twin(dtype: torch.dtype, outs: int, ins: int, disabled: tuple[str, ...]) -> None:
    torch.manual_seed(outs)
    weight, bias = torch.randn(outs, ins).to(dtype), torch.randn(outs).to(dtype)
    pack = Kernels(CPU, disabled=frozenset(disabled)).choose(
        *called("linear", dtype=dtype, in_features=ins, out_features=outs)
    )
    for rows in (1, 2, 3, 4, 5, 8, 11, 16, 50):
        x = torch.randn(rows, ins * 2).to(dtype)[:, :ins]  # strided rows
        for given in (bias, None):
            wide = reference.linear(weight.float(), None if given is None else given.float())(x.float())
            assert_close(pack(weight, given)(x), wide.to(dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    product = native("linear", batch_invariant=True, dtype=dtype, in_features=200, out_features=70)(
        torch.randn(70, 200).to(dtype), None
    )
    x = torch.randn(70, 200).to(dtype)
    together = product(x)
    for first, end in ((0, 1), (3, 5), (7, 10), (10, 14), (1, 6), (20, 31), (0, 60)):
        assert torch.equal(product(x[first:end]), together[first:end])


def make(kernels: Kernels, *, bias: bool = True) -> Linear:
    site = Weight("layer", Role.OUTPUT, 0, (20,), 12, Split.ROW, bias)
    layer = Linear(site, LayerContext(torch.float32, CPU, kernels))
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def test_finish_loading_changes_no_result_and_leaves_no_plain_weight() -> None:
    kernels = Kernels(CPU)
    layer, x = make(kernels), torch.randn(2, 3, 12)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"weight": (20, 12), "bias": (20,)}
    before = layer(x)
    layer.finish_loading()
    torch.testing.assert_close(layer(x), before)
    assert not list(layer.named_parameters())
    assert layer.weight_bytes == 4 * (20 * 12 + 20)


def test_a_tied_head_reads_the_embedding_and_makes_no_copy() -> None:
    kernels = Kernels(CPU)
    embedding = nn.Parameter(torch.randn(20, 12), requires_grad=False)
    head = make(kernels, bias=False)
    head.tie_weight(embedding, nn.ModuleList())
    head.finish_loading()
    x = torch.randn(3, 12)
    torch.testing.assert_close(head(x), x @ embedding.T)
    embedding.data[7] = 0.0  # seen by the head: one storage
    assert not head(x)[:, 7].any() and head.weight_bytes == 0
    assert [name for name, reason in kernels.choices[-1].declined if "second copy" in reason] == ["onednn"]


def test_a_cpu_that_onednn_does_not_pack_for_takes_the_next_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 on a CPU without AVX-512, and on every AArch64 one: torch's operation is there, and refuses each
    weight."""

    def refuse(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx512bw\nand a long tail")

    monkeypatch.setattr(products, "pack_for_onednn", refuse)
    products._refusal.cache_clear()
    kernels = Kernels(CPU)
    weight, x = torch.randn(7, 5).bfloat16(), torch.randn(3, 5).bfloat16()
    pack = kernels.choose(*called("linear", dtype=torch.bfloat16, in_features=5, out_features=7))
    assert_close(pack(weight, None)(x), reference.linear(weight, None)(x), torch.bfloat16)
    assert "on this CPU: bf16 path needs the cpu support avx512bw" in str(kernels.choices)
    products._refusal.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_rows_without_instructions_for_their_type(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By float32's product over the weight widened part by part, biases with it, leading dimensions kept."""
    monkeypatch.setattr(products, "_multiplies", lambda dtype: False)
    monkeypatch.setattr(products, "_PART", 4 * 40)
    weight, bias, x = torch.randn(70, 40).to(dtype), torch.randn(70).to(dtype), torch.randn(3, 50, 40).to(dtype)
    for given in (None, bias):
        y = products.linear_of_many_rows(dtype)(x, weight, given)
        assert_close(y, reference.linear(weight, given)(x), dtype)
    assert products.linear_of_many_rows(torch.float32) is F.linear
