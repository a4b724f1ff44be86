"""Products of few rows in Triton, alone and with what stands around them, against the torch twin, in the interpreter;
the table of forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tests.support.triton_interpreter  # before any kernel: it fixes the mode
from headrace.kernels.candidate import CallSite, Card, KernelContext, Shape
from headrace.kernels.linear import flat_linear, reference
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.flat_forms import MEASURED, flat, forms_for, vector
from headrace.kernels.linear.flat_linear import FlatLinear, FusedLinear, Product
from headrace.kernels.linear.forms import FLAT, VECTOR, Form
from headrace.kernels.linear.measured import SHIPPED, Measured
from headrace.kernels.linear.triton_ends import make_scratch
from headrace.spec import Activation
from tests.support.kernel_cases import assert_close, called

FORMS = (
    vector(4, 32, 0, 1),
    vector(2, 64, 1, 1),
    vector(4, 32, 2, 1, late=True),
    flat(16, 32, 32, 2),
    flat(16, 64, 32, 3, 2),
    flat(32, 32, 64, 2, 4),
)


def product(form: Form, outs: int, ins: int, *, gated: bool = False, bias: bool = False, pdl: bool = False) -> Product:
    shape, forms = Shape(outs, ins, gated), ((64, form),)
    torch.manual_seed(outs)
    rows = outs * (2 if gated else 1)
    weight = (torch.randn(rows, ins) * ins**-0.5).bfloat16()
    return Product(
        weight,
        torch.randn(rows).bfloat16() if bias else None,
        shape,
        forms,
        make_scratch(shape, forms, "cpu"),
        pdl,
    )


def epilogue(tokens: int, outs: int, *, gated: bool, everything: bool) -> Epilogue:
    if gated:
        return Epilogue(torch.rand(70, tokens), 1e-5, Activation.GELU_TANH if everything else Activation.SILU)
    if not everything:
        return Epilogue(squares=torch.rand(3, tokens), eps=1e-5)
    return Epilogue(
        torch.rand(1100, tokens), 1e-5, residual=torch.randn(tokens, outs).bfloat16(), scale=torch.rand(outs)
    )


def assert_equal_to_twin(layer: Product, x: torch.Tensor, given: Epilogue) -> None:
    got = FusedLinear(layer)(x, given)
    want = reference.fused_linear(layer.weight, layer.bias)(x, given)
    assert_close(got[0], want[0], torch.bfloat16)
    if given.scale is not None:
        assert got[1] is not None and got[2] is not None and want[1] is not None and want[2] is not None
        assert_close(got[1], want[1], torch.bfloat16)
        assert_close(got[2].sum(0), got[0].float().square().sum(1), torch.float32)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("outs", "everything"), [(32, False), (38, True)])
def test_products_with_what_stands_around_them_equal_their_twin(
    form: Form, outs: int, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, outs)
    tokens, ins = (1 if form.kind == VECTOR else form.rows - 3), 128
    layer = product(form, outs, ins, bias=everything, pdl=everything)
    x = torch.randn(tokens, ins).bfloat16()
    for _ in range(2):  # tickets are as they were
        assert_equal_to_twin(layer, x, epilogue(tokens, outs, gated=False, everything=everything))
    assert not layer.scratch.tickets.any()


@pytest.mark.parametrize("form", [form for form in FORMS if form.fits(Shape(24, 128, True))], ids=str)
@pytest.mark.parametrize("everything", [False, True])
def test_gates_equal_their_twin(form: Form, everything: bool) -> None:
    tokens = 1 if form.kind == VECTOR else form.rows
    layer = product(form, 24, 128, gated=True, bias=everything)
    assert_equal_to_twin(
        layer, torch.randn(tokens, 128).bfloat16(), epilogue(tokens, 24, gated=True, everything=everything)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_alone_takes_any_rows_and_leaves_many_to_the_vendor(dtype: torch.dtype) -> None:
    layer = product(FORMS[4], 48, 192)
    layer = replace(layer, weight=layer.weight.to(dtype), forms=((1, FORMS[1]), (16, FORMS[4])))
    vendors, left = reference.linear(layer.weight, None), list[int]()
    linear = FlatLinear(layer, lambda x: (left.append(len(x)), vendors(x))[1])
    for x in (torch.randn(1, 192), torch.randn(2, 5, 192), torch.randn(9, 400)[:, 3:195], torch.randn(40, 192)):
        assert_close(linear(x.to(dtype)), vendors(x.to(dtype)), dtype)
    assert linear(torch.randn(0, 192).to(dtype)).shape == (0, 48)
    assert left == [40, 0]


@pytest.mark.parametrize(
    "shape",
    [Shape(6144, 4096), Shape(14336, 4096, True), Shape(2048, 8192), Shape(1024, 448), Shape(151936, 1024)],
    ids=str,
)
def test_every_shape_has_a_form_that_fits_for_every_batch(shape: Shape) -> None:
    for table in ({}, MEASURED.read(SHIPPED, "NVIDIA H200")):
        forms = forms_for(shape, 132, table)
        assert forms[-1][0] == 64 and [most for most, _ in forms] == sorted(most for most, _ in forms)
        for most, form in forms:
            assert form is not None and form.fits(shape) and (form.rows >= most if form.kind == FLAT else most == 1)
            stages = form.stages * form.depth * 2 * (form.columns * (2 if shape.gated else 1) + form.rows)
            assert stages <= 232448 - 2048, form  # shared memory of an H200


def test_fused_products_serve_every_batch_where_the_vendor_was_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, form = Shape(3072, 2048), flat(16, 64, 128, 5)
    facts = {"dtype": torch.bfloat16, "out_features": shape.outs, "in_features": shape.ins, "gated": False}
    context = KernelContext(Card("A card", (9, 0), 132))
    site = CallSite("fused_linear", torch.device("cpu"), called("fused_linear", **facts)[1], context)
    for table in (((1, None), (16, form), (32, None), (64, None)), ((16, form),), ((64, None),)):
        monkeypatch.setattr(Measured, "table", lambda self, device, table=table: {shape: table})
        made = flat_linear.create_fused(site)(torch.zeros(1, 1), None).product
        assert form in [each for _, each in made.forms] or table == ((64, None),)
        for tokens in (1, 2, 16, 17, 32, 33, 64):
            chosen = made.form(tokens)
            assert chosen is not None and chosen.rows >= tokens and chosen.fits(shape)


def test_measured_forms_are_kept_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a" / "forms.json"
    found = {Shape(8, 16): ((1, vector(1, 16, 0, 4)), (64, None)), Shape(8, 16, True): ((64, flat(64, 64, 64, 4)),)}
    assert MEASURED.read(path, "card") == {}
    MEASURED.keep("card", found, path)
    MEASURED.keep("other", {Shape(1, 1): ((64, None),)}, path)
    assert MEASURED.read(path, "card") == found
    rows = (
        '["1"]',
        '[64, "flat", 64, 64, 64, 1, 4, 4.5, true]',
        '[64, "flat", 32, 64, 64, 1, 4, 4, true]',
        '[1, "x", 1]',
    )
    damaged = ('"8 by 16": [[1]]', *(f'"8 x 16": [{row}]' for row in rows))
    for each in (*(f'{{"flat": {{{row}}}}}' for row in damaged), "[" * 10**5):
        caplog.clear()
        path.write_text(f'{{"card": {each}}}')
        assert MEASURED.read(path, "card") == {} and "cannot be read" in caplog.text
