"""Products with quantised weights on the card: every format and form against what the format means, and engines from start to token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.kernels.candidate import Shape
from headrace.kernels.linear import reference
from headrace.kernels.linear.around import Around
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.card import check, require_card
from tests.support.codings import FORMATS, random_piece
from tests.support.kernel_cases import called

require_card()

from headrace.kernels import Kernels  # noqa: E402
from headrace.kernels.linear.coded import CodedProduct, lay  # noqa: E402  (needs Triton)
from headrace.kernels.linear.coded_forms import ROWS, candidate_forms  # noqa: E402
from headrace.kernels.linear.flat_linear import make_scratch  # noqa: E402
from headrace.layers.packed import Piece  # noqa: E402

CUDA = torch.device("cuda")
EIGHTS = (
    ScaledWeight("float8_e4m3fn", (WHOLE, WHOLE), activations=Activations("fp8", static=True)),
    ScaledWeight("float8_e4m3fn", (1, WHOLE), activations=Activations("fp8")),
    ScaledWeight("float8_e4m3fn", (128, 128), activations=Activations("fp8", group=128)),
    ScaledWeight("int8", (1, WHOLE), activations=Activations("int8")),
)


def on_card(form: Format, outs: int, ins: int, seed: int = 0) -> Piece:
    piece = random_piece(form, outs, ins, seed=seed)
    piece.tensors = tuple({name: each.cuda() for name, each in tensors.items()} for tensors in piece.tensors)
    return piece


def arounds(tokens: int, outs: int, ins: int) -> tuple[Around, ...]:
    squares = torch.rand(300, tokens, device=CUDA) * ins / 150
    behind = Around(residual=torch.randn(tokens, outs, device=CUDA).bfloat16(), scale=torch.rand(outs, device=CUDA))
    return Around(), Around(squares, 1e-5), behind


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
@pytest.mark.parametrize(("outs", "ins"), [(1024, 4096), (1056, 1280)], ids=str)
def test_every_form_multiplies_as_the_format_means(form: Format, outs: int, ins: int) -> None:
    torch.manual_seed(outs)
    piece = on_card(form, outs, ins)
    weight, coding = piece.dense(slice(0, outs), torch.float32), form.coding
    parts = lay([piece], gated=False)
    assert parts is not None and coding is not None
    shape, twin = Shape(outs, ins), reference.fused_linear(weight, None)
    for most in ROWS:
        for kernel in candidate_forms(shape, outs, coding, most):
            forms = ((most, kernel),)
            product = CodedProduct(parts[0], None, forms, make_scratch(shape, forms, CUDA), programmatic=True)
            for tokens in (1, most - 3, most):
                x = torch.randn(tokens, ins, device=CUDA).bfloat16()
                for around in arounds(tokens, outs, ins) if most <= 64 else (Around(),):
                    got, want = product.launch(kernel, x, around), twin(x, around)
                    check(got[0], want[0])
                    assert torch.equal(got[0], product.launch(kernel, x, around)[0]), f"{kernel}: other bits"
    x = torch.randn(700, ins, device=CUDA).bfloat16()
    check(replace(product, forms=((0, None),))(x), (x.float() @ weight.T).bfloat16())


@pytest.mark.parametrize("form", (*FORMATS, *EIGHTS), ids=lambda each: each.label)
def test_gates_through_the_registry(form: Format) -> None:
    torch.manual_seed(2)
    ins, half = 2048, 1024
    pieces = [on_card(form, half, ins, seed=seed) for seed in ((1, 1) if form.label.endswith("order") else (1, 2))]
    for piece in pieces[1:] if "static" in form.label else ():
        piece.tensors[0]["input_scale"].copy_(pieces[0].tensors[0]["input_scale"])
    weight = torch.cat([piece.dense(slice(0, half), torch.float32) for piece in pieces])
    given = {"in_features": ins, "out_features": 2 * half, "gated": True, "formats": (form.label,) * 2}
    facts = {**given, "codings": (form.coding,) * 2, "eights": (form.eight,) * 2}
    kernels, around = Kernels(CUDA, programmatic=True), Around(torch.rand(64, 16, device=CUDA) * ins / 32, 1e-5, Activation.SILU)
    fused = kernels.choose(*called("packed_fused_linear", dtype=torch.bfloat16, **facts))(pieces, None)
    product = kernels.choose(*called("packed_linear", dtype=torch.bfloat16, **facts))(pieces, None)
    assert {choice.chosen for choice in kernels.choices} == {"w8a8" if form.eight else "codes"} and fused is not None
    x = torch.randn(16, ins, device=CUDA).bfloat16()
    normed = (x.float() * torch.rsqrt(around.squares.sum(0) / ins + 1e-5).unsqueeze(1)).bfloat16() if around.squares is not None else x
    inputs = form.activated(normed, pieces[0].tensors[0]) if form.eight else normed
    check(fused(x, around)[0], reference.fused_linear(weight, None)(inputs, Around(gate=Activation.SILU))[0])
    for tokens in (1, 16, 64, 128, 1000):
        x = torch.randn(tokens, ins, device=CUDA).bfloat16()
        inputs = form.activated(x, pieces[0].tensors[0]) if form.eight else x
        check(product(x), (inputs.float() @ weight.T).bfloat16())
