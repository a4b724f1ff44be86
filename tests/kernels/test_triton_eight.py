"""8-bit inputs and weights in Triton's interpreter: rows that are rounded, and their products, against what the formats
mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.support.triton_interpreter  # before any kernel: it fixes the mode
from headrace.kernels.candidate import EightBits, Shape
from headrace.kernels.linear import reference
from headrace.kernels.linear.eight_bits import TALL, Composed, EightBitLinear, Maker
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.forms import FLAT, Form
from headrace.kernels.linear.triton_ends import make_scratch
from headrace.kernels.norm import triton_activation, triton_norm
from headrace.kernels.norm.reference import gated_activation, rms_norm
from headrace.kernels.norm.triton_rounded import Rounding
from headrace.quant.codes import Activations
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.codings import random_piece
from tests.support.kernel_cases import assert_close

FP8, INT8 = "float8_e4m3fn", "int8"
FORMATS = (
    ScaledWeight(FP8, (WHOLE, WHOLE), activations=Activations("fp8", static=True)),
    ScaledWeight(FP8, (1, WHOLE), activations=Activations("fp8")),
    ScaledWeight(FP8, (128, 128), activations=Activations("fp8", group=128)),
    ScaledWeight(FP8, (128, 128), activations=Activations("fp8", group=128, powers=True)),
    ScaledWeight(INT8, (1, WHOLE), activations=Activations("int8")),
)


def product(form: ScaledWeight, *outs: int, ins: int, ways: int = 1, bias: bool = False) -> tuple[EightBitLinear, Any]:
    """And the twin's: rounded inputs times the weights that are meant, float32."""
    pieces = [random_piece(form, each, ins, seed=index) for index, each in enumerate(outs)]
    if form.activations is not None and form.activations.static:
        for piece in pieces:
            piece.tensors[0]["input_scale"].fill_(0.03)
    weight = torch.cat([piece.dense(slice(0, piece.outs), torch.float32) for piece in pieces])
    forms, total, eight = ((64, Form(FLAT, 16, 32, 128, ways, 4, 1)),), sum(outs), form.eight
    assert eight is not None
    site: Any = type(
        "Site",
        (),
        {"pdl": bias, "empty": staticmethod(lambda shape, dtype, device: torch.empty(shape, dtype=dtype))},
    )
    made = Maker(site, eight, forms, make_scratch(Shape(total, ins), forms, "cpu")).made(
        pieces, torch.randn(total).bfloat16() if bias else None
    )
    assert made is not None
    return made, lambda x: (pieces[0].activated(x), weight)


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
def test_rows_are_rounded_as_the_format_says(form: ScaledWeight) -> None:
    torch.manual_seed(1)
    x, inputs, static = torch.randn(5, 384).bfloat16() * 3, form.activations, None
    x[3] = 0
    assert inputs is not None and form.eight is not None
    if inputs.static:
        static = torch.tensor(0.02)
    assert torch.equal(widened(Rounding(form.eight, static).rows(x)), inputs.rounded(x, static))


def widened(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    codes, scale = found
    return (codes.float().view(*scale.shape, -1) * scale.unsqueeze(-1)).view(codes.shape).bfloat16()


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_and_a_gate_leave_what_rounding_their_results_would(form: ScaledWeight, dtype: torch.dtype) -> None:
    """To the bit: the norm's and the gate's own kernels, and then the one for rows."""
    torch.manual_seed(8)
    assert form.eight is not None
    rounding = Rounding(form.eight, torch.tensor(0.02) if form.eight.static else None)
    x, residual, both = (torch.randn(3, width).to(dtype) * 3 for width in (384, 384, 768))
    x[1], residual[1], both[2] = 0, 0, 0
    for weight in (torch.randn(384).to(dtype), torch.randn(384)):
        for added in (None, residual):
            y, total = triton_norm.rms_norm(x, weight, 1e-5, added)
            *got, sum_ = rounding.normed(x, weight, 1e-5, added)
            assert torch.equal(sum_, total)
            assert all(a.float().equal(b.float()) for a, b in zip(got, rounding.rows(y), strict=True))
    for kind in Activation:
        want = rounding.rows(triton_activation.gated_activation(both, kind))
        assert all(a.float().equal(b.float()) for a, b in zip(rounding.activated(both, kind), want, strict=True))
    assert [len(each) for each in rounding.normed(x[:0], x[0], 1e-5, None)] == [0, 0, 0]
    assert [len(each) for each in rounding.activated(both[:0], Activation.SILU)] == [0, 0]


@pytest.mark.parametrize("rows", [3, 70])
def test_a_product_with_its_norm_or_gate_equals_its_twin(rows: int) -> None:
    torch.manual_seed(9)
    layer, twin = product(FORMATS[2], 160, ins=256)
    composed = Composed(layer.rounding, layer.multiplied)
    x, residual, both, weight = (
        torch.randn(*shape).bfloat16() for shape in ((rows, 256), (rows, 256), (rows, 512), (256,))
    )
    y, total = composed.normed(x, weight, 1e-5, residual)
    normed, summed = rms_norm(x, weight, 1e-5, residual)
    for got, by in ((y, normed), (composed.activated(both, Activation.SILU), gated_activation(both, Activation.SILU))):
        inputs, wide = twin(by)
        assert_close(got, (inputs.float() @ wide.T).bfloat16(), torch.bfloat16)
    assert torch.equal(total, summed) and composed.activated(both[:0], Activation.SILU).shape == (0, 160)


def test_a_norm_is_completed_before_rows_are_rounded() -> None:
    torch.manual_seed(2)
    x, squares = torch.randn(4, 96).bfloat16(), torch.rand(70, 4) * 3
    normed = (x.float() * torch.rsqrt(squares.sum(0) / 96 + 1e-5).unsqueeze(1)).bfloat16()
    rounding = Rounding(EightBits("int8"))
    got, want = rounding.rows(x, squares, 1e-5, pdl=True), rounding.rows(normed)
    assert (got[0].int() - want[0].int()).abs().max() <= 1
    torch.testing.assert_close(got[1], want[1], rtol=1e-2, atol=0)


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
@pytest.mark.parametrize("ways", [1, 2])
def test_products_equal_their_twin(form: ScaledWeight, ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, ways)
    torch.manual_seed(3)
    layer, twin = product(form, 128, 48, ins=256, ways=ways, bias=True)
    x = torch.randn(9, 256).bfloat16()
    inputs, weight = twin(x)
    want = (inputs.float() @ weight.T + layer.bias.float()).bfloat16() if layer.bias is not None else None
    assert want is not None
    assert_close(layer(x), want, torch.bfloat16)
    epilogue = Epilogue(residual=torch.randn(9, 176).bfloat16(), scale=torch.rand(176))
    got, twins = layer.fused(x, epilogue), reference.fused_linear(weight, layer.bias)(inputs, epilogue)
    assert got[1] is not None and got[2] is not None and twins[1] is not None
    assert_close(got[0], twins[0], torch.bfloat16)
    assert_close(got[1], twins[1], torch.bfloat16)
    assert_close(got[2].sum(0), got[0].float().square().sum(1), torch.float32)


@pytest.mark.parametrize("form", FORMATS[1:3] + FORMATS[4:], ids=lambda each: each.label)
def test_gates_equal_their_twin(form: ScaledWeight) -> None:
    torch.manual_seed(4)
    layer, twin = product(form, 128, 128, ins=256)
    x = torch.randn(4, 256).bfloat16()
    inputs, weight = twin(x)
    want = reference.fused_linear(weight, None)(inputs, Epilogue(gate=Activation.SILU))[0]
    assert_close(layer.fused(x, Epilogue(gate=Activation.SILU))[0], want, torch.bfloat16)


def test_many_rows_with_scales_of_blocks_go_through_tall_tiles() -> None:
    torch.manual_seed(5)
    layer, twin = product(FORMATS[2], 160, ins=256)
    x = torch.randn(70, 256).bfloat16()
    inputs, weight = twin(x)
    assert_close(layer(x), (inputs.float() @ weight.T).bfloat16(), torch.bfloat16)
    assert TALL.rows == 64 and layer(x[:0]).shape == (0, 160)


def test_weights_are_joined_once() -> None:
    pieces = [random_piece(FORMATS[1], outs, 64, seed=outs) for outs in (32, 16)]
    eight = FORMATS[1].eight
    assert eight is not None
    site: Any = type("Site", (), {"pdl": False, "empty": None})
    maker = Maker(site, eight, (), make_scratch(Shape(48, 64), (), "cpu"))
    first, second = maker.made(pieces, None), maker.made(pieces, None)
    assert first is not None and second is not None and first.weight.data_ptr() == second.weight.data_ptr()
    assert first.weight.shape == (48, 64)
