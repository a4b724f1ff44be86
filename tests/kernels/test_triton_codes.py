"""Products with weights in codes of few bits, in Triton's interpreter, against the weights that their formats mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tests.support.triton_interpreter  # before any kernel: it fixes the mode
from headrace.kernels.candidate import CallSite, EightBits, Shape, WeightFacts, plainly_empty
from headrace.kernels.linear import coded, reference
from headrace.kernels.linear.candidates import _uncoded
from headrace.kernels.linear.coded import TALL, CodedFused, CodedLinear, CodedProduct, lay
from headrace.kernels.linear.coded_forms import ROWS, candidate_forms, forms_for
from headrace.kernels.linear.eight_bits import Composed
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.forms import FLAT, Form
from headrace.kernels.linear.triton_ends import make_scratch
from headrace.kernels.norm.reference import rms_norm
from headrace.kernels.norm.triton_rounded import Rounding, rotate
from headrace.layers.packed import Piece
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.floats import MXFP4
from headrace.quant.gguf import GGUFBlocks
from headrace.quant.integers import AWQ, GPTQ, PackedIntegers
from headrace.quant.rotated import Rotated, rotated
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.codings import FORMATS, random_piece
from tests.support.kernel_cases import assert_close

ONE = Form(FLAT, 16, 64, 128, 1, late=True)
SHARED = Form(FLAT, 16, 128, 128, 2, late=True)


def products(
    pieces: list[Piece], form: Form | None, *, gated: bool = False, bias: bool = False
) -> tuple[list[CodedProduct], torch.Tensor]:
    """And the whole weight, as the format means it."""
    want = torch.cat([piece.dense(slice(0, piece.outs), torch.float32) for piece in pieces])
    parts = lay(pieces, gated=gated)
    assert parts is not None
    forms, found = ((1000, form),) if form is not None else ((0, None),), []
    for part in parts:
        scratch = make_scratch(Shape(part.outs, part.ins), forms, "cpu")
        found.append(CodedProduct(part, torch.randn(part.outs).bfloat16() if bias else None, forms, scratch, pdl=bias))
    return found, want


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
def test_every_format_is_multiplied_as_it_means(form: Format) -> None:
    torch.manual_seed(1)
    (product,), weight = products([random_piece(form, 96, 256)], ONE)
    x = torch.randn(3, 256).bfloat16()
    assert_close(product(x), (x.float() @ weight.T).bfloat16(), torch.bfloat16)
    assert_close(replace(product, forms=((0, None),))(x), (x.float() @ weight.T).bfloat16(), torch.bfloat16)  # widened


SOME: tuple[Format, ...] = (
    PackedIntegers(4, 128, zero=False), GPTQ(4, 64, act_order=True), AWQ(4, 128), GGUFBlocks("Q6_K"), GGUFBlocks("Q4_K"),
    ScaledWeight("int8", (1, WHOLE)),
)  # fmt: skip


@pytest.mark.parametrize("form", SOME, ids=lambda each: each.label)
@pytest.mark.parametrize("kernel", [ONE, SHARED], ids=["whole", "shared"])
def test_products_with_what_stands_around_them_equal_their_twin(
    form: Format, kernel: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, 3)
    torch.manual_seed(2)
    (product,), weight = products([random_piece(form, 160, 512)], kernel, bias=True)
    x, twin = torch.randn(13, 512).bfloat16(), reference.fused_linear(weight, product.bias)
    for epilogue in (
        Epilogue(),
        Epilogue(torch.rand(70, 13) * 8, 1e-5),
        Epilogue(residual=torch.randn(13, 160).bfloat16(), scale=torch.rand(160)),
    ):
        got, want = CodedFused(product)(x, epilogue), twin(x, epilogue)
        assert_close(got[0], want[0], torch.bfloat16)
        if epilogue.scale is not None:
            assert got[1] is not None and got[2] is not None and want[1] is not None
            assert_close(got[1], want[1], torch.bfloat16)
            assert_close(got[2].sum(0), got[0].float().square().sum(1), torch.float32)
    assert not product.scratch.tickets.any()


@pytest.mark.parametrize("form", SOME, ids=lambda each: each.label)
def test_gates_equal_their_twin_and_are_found_again_one_below_the_other(form: Format) -> None:
    torch.manual_seed(3)
    pieces = [random_piece(form, 96, 256, seed=7) for _ in range(2)]
    if not form.label.endswith("order"):
        pieces[1] = random_piece(form, 96, 256, seed=8)
    (product,), weight = products(pieces, SHARED, gated=True)
    x = torch.randn(5, 256).bfloat16()
    epilogue = Epilogue(torch.rand(3, 5) * 80, 1e-5, Activation.SILU)
    assert_close(
        CodedFused(product)(x, epilogue)[0], reference.fused_linear(weight, None)(x, epilogue)[0], torch.bfloat16
    )
    for each in (product, replace(product, forms=((0, None),))):  # alone, and widened
        assert_close(each(x), (x.float() @ weight.T).bfloat16(), torch.bfloat16)
    for piece, half in zip(pieces, weight.chunk(2), strict=True):
        torch.testing.assert_close(piece.dense(slice(32, 90), torch.float32), half[32:90], rtol=1e-3, atol=2e-3)


def test_parts_of_one_coding_are_one_launch_and_others_keep_their_own() -> None:
    torch.manual_seed(4)
    kinds: tuple[tuple[Format, int], ...] = (
        (GGUFBlocks("Q4_K"), 128),
        (GGUFBlocks("Q4_K"), 64),
        (GGUFBlocks("Q6_K"), 64),
    )
    found, weight = products(
        [random_piece(form, outs, 256, seed=index) for index, (form, outs) in enumerate(kinds)], ONE
    )
    assert [each.packed.outs for each in found] == [192, 64]
    x = torch.randn(2, 3, 256).bfloat16()
    got = CodedLinear(tuple(found))(x)
    assert got.shape == (2, 3, 256)
    assert_close(got, (x.float() @ weight.T).bfloat16(), torch.bfloat16)
    assert CodedLinear(tuple(found))(x[:0]).shape == (0, 3, 256)


def test_inputs_in_orders_of_their_own_are_not_brought_together() -> None:
    form = GPTQ(4, 64, act_order=True)
    found, weight = products([random_piece(form, 64, 256, seed=seed) for seed in (1, 2)], ONE)
    assert len(found) == 2
    x = torch.randn(4, 256).bfloat16()
    assert_close(CodedLinear(tuple(found))(x), (x.float() @ weight.T).bfloat16(), torch.bfloat16)


def test_groups_of_several_sizes_stay_with_the_twin() -> None:
    piece = random_piece(GPTQ(4, 64, act_order=True), 64, 256)
    piece.tensors[0]["g_idx"][:] = 0
    assert lay([piece], gated=False) is None and not piece.laid and "qweight" in piece.tensors[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outs", "ins"), [(40, 160), (264, 384)])
def test_odd_shapes_and_more_rows_than_one_tile(dtype: torch.dtype, outs: int, ins: int) -> None:
    torch.manual_seed(outs)
    (product,), weight = products(
        [random_piece(PackedIntegers(4, 32, zero=False), outs, ins, dtype=dtype)], SHARED if ins > 256 else ONE
    )
    for tokens in (1, 16, 17 if ins < 256 else 16):
        x = torch.randn(tokens, ins).to(dtype)
        assert_close(product(x), (x.float() @ weight.T).to(dtype), dtype)
    x = torch.randn(20, ins).to(dtype)
    assert_close(replace(product, forms=((0, None),))(x), (x.float() @ weight.T).to(dtype), dtype)


def test_a_wide_weight_is_widened_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "WIDENED", 64 * 256)
    for gated in (False, True):
        pieces = [random_piece(AWQ(4, 128), 96, 256, seed=seed) for seed in (5, 6)]
        found, weight = products(pieces, None, gated=gated, bias=True)
        x = torch.randn(7, 256).bfloat16()
        bias = torch.cat([each.bias for each in found if each.bias is not None])
        assert_close(CodedLinear(tuple(found))(x), (x.float() @ weight.T + bias.float()).bfloat16(), torch.bfloat16)


@pytest.mark.parametrize(
    "shape", [Shape(6144, 4096), Shape(14336, 4096, True), Shape(1024, 448), Shape(151936, 1024)], ids=str
)
def test_every_shape_has_forms_that_fit(shape: Shape) -> None:
    outs = shape.outs * (1 + shape.gated)
    for coding in (each.coding for each in FORMATS):
        assert coding is not None
        for table in ({}, {shape: ((16, ONE), (64, None))}):
            known: Any = table
            forms = forms_for(shape, outs, coding, 132, known)
            assert [most for most, _ in forms] == sorted(most for most, _ in forms)
            assert all(form is not None and form.rows >= most for most, form in forms if most <= 64)
            for form in (form for _, form in forms if form is not None):
                assert form.stages * (form.columns * 16 * coding.bits + form.rows * 256) <= 220_000, form
        for most in ROWS:
            assert all(form.rows == most for form in candidate_forms(shape, outs, coding, most))


@pytest.mark.parametrize("size", [2, 32, 256])
def test_rows_are_rotated_to_the_bit(size: int) -> None:
    torch.manual_seed(8)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(3, 1280).to(dtype)
        got = rotate(x, size, plainly_empty, pdl=True)
        assert torch.equal(got, rotated(x, size).to(dtype))
    assert rotate(x[:0], size, plainly_empty, pdl=False).shape == (0, 1280)


def test_rotated_weights_meet_rotated_inputs() -> None:
    """Alone, widened, and where the norm before is half done."""
    torch.manual_seed(9)
    form = Rotated(MXFP4(), 32)
    (product,), weight = products([random_piece(form, 96, 256)], ONE)
    x, squares = torch.randn(3, 256).bfloat16(), torch.rand(70, 3) * 8
    want = (form.activated(x, {}).float() @ weight.T).bfloat16()
    assert_close(product(x), want, torch.bfloat16)
    assert_close(replace(product, forms=((0, None),))(x), want, torch.bfloat16)
    twin = reference.fused_linear(weight, None)(form.activated(x, {}), Epilogue(squares, 1e-5))
    assert_close(CodedFused(product)(x, Epilogue(squares, 1e-5))[0], twin[0], torch.bfloat16)


INT8_INPUTS = Activations("int8")
ROUNDED = (
    PackedIntegers(4, 128, zero=False, activations=INT8_INPUTS), PackedIntegers(6, 128, zero=False, activations=INT8_INPUTS),
    PackedIntegers(3, 0, zero=False, activations=INT8_INPUTS), PackedIntegers(4, 128, activations=INT8_INPUTS),
    PackedIntegers(7, 128, activations=INT8_INPUTS), PackedIntegers(8, 0, zero=False, activations=INT8_INPUTS),
)  # fmt: skip


def whole(product: CodedProduct) -> CodedProduct:
    return replace(product, rounding=Rounding(EightBits("int8"), dealt=True))


@pytest.mark.parametrize("form", ROUNDED, ids=lambda each: each.label)
@pytest.mark.parametrize("kernel", [ONE, SHARED], ids=["whole", "shared"])
def test_rounded_inputs_are_multiplied_by_whole_numbers(
    form: PackedIntegers, kernel: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and with a norm, a sum and what the next norm wants: what the format means with inputs rounded by row."""
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, 3)
    torch.manual_seed(5)
    pieces = [random_piece(form, 160, 512)]
    assert form.coding is not None and form.coding.whole and form.eight == EightBits("int8")
    (found,), weight = products(pieces, kernel, bias=True)
    product, x = whole(found), torch.randn(13, 512).bfloat16()
    x[4] = 0
    twin, inputs = reference.fused_linear(weight, product.bias), form.activated(x, {})
    for epilogue in (Epilogue(), Epilogue(residual=torch.randn(13, 160).bfloat16(), scale=torch.rand(160))):
        got, want = CodedFused(product)(x, epilogue), twin(inputs, epilogue)
        assert_close(got[0], want[0], torch.bfloat16)
        if epilogue.scale is not None:
            assert got[1] is not None and got[2] is not None and want[1] is not None
            assert_close(got[1], want[1], torch.bfloat16)
            assert_close(got[2].sum(0), got[0].float().square().sum(1), torch.float32)
    squares = torch.rand(70, 13) * 8
    normed = (x.float() * torch.rsqrt(squares.sum(0) / 512 + 1e-5).unsqueeze(1)).bfloat16()
    assert_close(CodedFused(product)(x, Epilogue(squares, 1e-5))[0], product(normed), torch.bfloat16)


def test_rounded_inputs_meet_gates_and_any_number_of_rows() -> None:
    torch.manual_seed(6)
    form = ROUNDED[0]
    pieces = [random_piece(form, 96, 256, seed=seed) for seed in (7, 8)]
    (found,), weight = products(pieces, SHARED, gated=True)
    product, x = replace(whole(found), forms=((1000, TALL),)), torch.randn(130, 256).bfloat16()
    inputs, epilogue = form.activated(x, {}), Epilogue(gate=Activation.SILU)
    want = reference.fused_linear(weight, None)(inputs, epilogue)[0]
    assert_close(CodedFused(whole(found))(x[:5], epilogue)[0], want[:5], torch.bfloat16)
    y = (inputs.float() @ weight.T).bfloat16()
    assert_close(product(x), y, torch.bfloat16)
    residual, norm = torch.randn(130, 256).bfloat16(), torch.randn(256).bfloat16()
    composed = Composed(whole(found).rounding or Rounding(EightBits("int8")), product.multiplied)
    got, total = composed.normed(x, norm, 1e-5, residual)
    normed, summed = rms_norm(x, norm, 1e-5, residual)
    assert_close(got, (form.activated(normed, {}).float() @ weight.T).bfloat16(), torch.bfloat16)
    assert torch.equal(total, summed) and product(x[:0]).shape == composed.multiplied(
        x[:0].to(torch.int8), torch.ones(0, 1), torch.bfloat16
    ).shape == (0, 192)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (PackedIntegers(4, 32, zero=False, activations=INT8_INPUTS), "a scale for 128 and more"),
        (PackedIntegers(8, 128, activations=INT8_INPUTS), "a scale for 128 and more"),
        (PackedIntegers(4, 128, zero=False, activations=Activations("int8", static=True)), "by scales of their rows alone"),
        (PackedIntegers(4, 128, zero=False, activations=Activations("int8", group=128)), "computes with codes in groups"),
    ],
    ids=["groups of 32", "8 bits with zeros", "static", "groups of inputs"],
)  # fmt: skip
def test_what_whole_numbers_cannot_mean_is_declined(form: PackedIntegers, why: str) -> None:
    facts = WeightFacts(torch.bfloat16, 256, 96, formats=(form.label,), codings=(form.coding,), eights=(form.eight,))
    assert why in str(_uncoded(CallSite("packed_linear", torch.device("cpu"), facts)))
