"""Products with quantised weights on the card: every format and form against what the format means, and engines from
start to token."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from headrace.kernels.candidate import Shape
from headrace.kernels.linear import reference
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.forms import Form
from headrace.kernels.linear.packed import packed_moe
from headrace.kernels.linear.packing import Coding, Packed
from headrace.kernels.norm.reference import gated_activation, rms_norm
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.floats import MXFP4
from headrace.quant.integers import AWQ, PackedIntegers
from headrace.quant.rotated import Rotated
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.card import check, require_card
from tests.support.codings import FORMATS, random_piece
from tests.support.kernel_cases import called, using

require_card()

from headrace.kernels import Kernels  # noqa: E402
from headrace.kernels.linear.coded import CodedProduct, lay  # noqa: E402  (needs Triton)
from headrace.kernels.linear.coded_forms import forms_for  # noqa: E402
from headrace.kernels.linear.triton_ends import make_scratch  # noqa: E402
from headrace.layers.packed import Piece  # noqa: E402

CUDA = torch.device("cuda")
PROCESSORS = torch.cuda.get_device_properties(CUDA).multi_processor_count
SIZES = ((1024, 4096), (1056, 1280))
pytestmark = pytest.mark.timeout(240)  # the first one builds for all
ROTATED = Rotated(MXFP4(), 32)
EIGHTS = (
    ScaledWeight("float8_e4m3fn", (WHOLE, WHOLE), activations=Activations("fp8", static=True)),
    ScaledWeight("float8_e4m3fn", (1, WHOLE), activations=Activations("fp8")),
    ScaledWeight("float8_e4m3fn", (128, 128), activations=Activations("fp8", group=128)),
    ScaledWeight("int8", (1, WHOLE), activations=Activations("int8")),
    PackedIntegers(4, 128, zero=False, activations=Activations("int8")),
    PackedIntegers(6, 128, zero=False, activations=Activations("int8")),
    PackedIntegers(4, 128, activations=Activations("int8")),
)


def on_card(form: Format, outs: int, ins: int, seed: int = 0, copies: int = 0) -> Piece:
    piece = random_piece(form, outs, ins, seed=seed, copies=copies)
    piece.tensors = tuple({name: each.cuda() for name, each in tensors.items()} for tensors in piece.tensors)
    return piece


def arounds(tokens: int, outs: int, ins: int) -> tuple[Epilogue, ...]:
    squares = torch.rand(300, tokens, device=CUDA) * ins / 150
    behind = Epilogue(residual=torch.randn(tokens, outs, device=CUDA).bfloat16(), scale=torch.rand(outs, device=CUDA))
    return Epilogue(), Epilogue(squares, 1e-5), behind


def cases(shape: Shape, coding: Coding) -> Iterator[tuple[Form, tuple[int, ...]]]:
    """The forms that are chosen, each with which of ``arounds``; a number of K's parts that is chosen nowhere; of
    uneven shapes two."""
    forms = {most: form for most, form in forms_for(shape, shape.outs, coding, PROCESSORS, {}) if form is not None}
    if shape == Shape(*SIZES[0]):
        yield from (
            (forms[16], (0, 1, 2)),
            (forms[32], (0,)),
            (forms[64], (0, 2)),
            (forms[128], (0,)),
            (replace(forms[32], ways=1), (1,)),
        )
    else:
        yield from ((forms[16], (2,)), (forms[64], (0,)))


def product_of(coding: Coding, packed: Packed, form: Form) -> CodedProduct:
    forms = ((form.rows, form),)
    return CodedProduct(packed, None, forms, make_scratch(Shape(packed.outs, packed.ins), forms, CUDA), pdl=True)


def build(test: Callable[..., None], form: Format) -> None:
    """What the test compiles is in the compiler's cache from then on; what it finds out, it says where it is a test."""
    torch.set_num_threads(1)
    with suppress(Exception):
        test(form)


@pytest.fixture(scope="module")
def built() -> None:
    """One behind the other they would take ten minutes."""
    wanted = {(multiplies, form.coding): form for form in FORMATS} | {
        (gates, (form.coding, form.eight)): form for form in (*FORMATS, *EIGHTS, ROTATED)
    }
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(build, test, form) for (test, _), form in wanted.items()]:
            future.result()


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
def test_every_form_multiplies_as_the_format_means(form: Format, built: None) -> None:
    multiplies(form)


def multiplies(form: Format) -> None:
    for size in SIZES:
        multiplies_by(form, *size)


def multiplies_by(form: Format, outs: int, ins: int) -> None:
    torch.manual_seed(outs)
    piece = on_card(form, outs, ins)
    weight, coding = piece.dense(slice(0, outs), torch.float32), form.coding
    parts = lay([piece], gated=False)
    assert parts is not None and coding is not None
    twin = reference.fused_linear(weight, None)
    for kernel, which in cases(Shape(outs, ins), coding):
        product = product_of(coding, parts[0], kernel)
        for tokens in (1, kernel.rows - 3, kernel.rows):
            x = torch.randn(tokens, ins, device=CUDA).bfloat16()
            for epilogue in (arounds(tokens, outs, ins)[each] for each in which):
                got, want = product.launch(kernel, x, epilogue), twin(x, epilogue)
                check(got[0], want[0])
                assert torch.equal(got[0], product.launch(kernel, x, epilogue)[0]), f"{kernel}: other bits"
    x = torch.randn(700, ins, device=CUDA).bfloat16()
    check(replace(product, forms=((0, None),))(x), (x.float() @ weight.T).bfloat16())


@pytest.mark.parametrize("form", (*FORMATS, *EIGHTS, ROTATED), ids=lambda each: each.label)
def test_gates_through_the_registry(form: Format, built: None) -> None:
    gates(form)


def gates(form: Format) -> None:
    torch.manual_seed(2)
    ins, half = 2048, 1024
    pieces = [on_card(form, half, ins, seed=seed) for seed in ((1, 1) if form.label.endswith("order") else (1, 2))]
    for piece in pieces[1:] if "static" in form.label else ():
        piece.tensors[0]["input_scale"].copy_(pieces[0].tensors[0]["input_scale"])
    weight = torch.cat([piece.dense(slice(0, half), torch.float32) for piece in pieces])
    given = {"in_features": ins, "out_features": 2 * half, "gated": True, "formats": (form.label,) * 2}
    facts = {**given, "codings": (form.coding,) * 2, "eights": (form.eight,) * 2}
    kernels, epilogue = (
        Kernels(CUDA, techniques=using(programmatic_launch=True)),
        Epilogue(torch.rand(64, 16, device=CUDA) * ins / 32, 1e-5, Activation.SILU),
    )
    fused = kernels.choose(*called("packed_fused_linear", dtype=torch.bfloat16, **facts))(pieces, None)
    product = kernels.choose(*called("packed_linear", dtype=torch.bfloat16, **facts))(pieces, None)
    name, ring = (
        "codes" if form.coding else "w8a8",
        form.coding is None or (form.eight is None and form.coding.ring),
    )
    assert {choice.chosen for choice in kernels.choices} == {f"{name}_ring" if ring else name}
    x = torch.randn(16, ins, device=CUDA).bfloat16()
    normed = (
        (x.float() * torch.rsqrt(epilogue.squares.sum(0) / ins + 1e-5).unsqueeze(1)).bfloat16()
        if epilogue.squares is not None
        else x
    )
    inputs = form.activated(normed, pieces[0].tensors[0])
    assert (fused is None) == (form.label.startswith("bitsandbytes")), (
        "each half has a random table of its own: no one matrix"
    )
    if fused is not None:
        check(fused(x, epilogue)[0], reference.fused_linear(weight, None)(inputs, Epilogue(gate=Activation.SILU))[0])
    for tokens in (1, 16, 64, 128, 1000):
        x = torch.randn(tokens, ins, device=CUDA).bfloat16()
        inputs = form.activated(x, pieces[0].tensors[0])
        check(product(x), (inputs.float() @ weight.T).bfloat16())
    if form.eight:
        composed(product, pieces, facts)


def composed(product: Callable[[torch.Tensor], torch.Tensor], pieces: list[Piece], facts: dict[str, Any]) -> None:
    """A norm or a gate in the kernel that rounds: as part by part, but for codes that a last bit of float32 moves."""
    kernels = Kernels(CUDA, techniques=using(programmatic_launch=True))
    normed, activated = (
        kernels.choose(*called(op, dtype=torch.bfloat16, **facts))(pieces, None)
        for op in ("normed_linear", "activated_linear")
    )
    wanted = "codes" if any(facts["codings"]) else "w8a8_ring"
    assert all(choice.chosen == wanted for choice in kernels.choices)
    for tokens in (1, 100, 1000):
        x, residual, gate, up = torch.randn(4, tokens, facts["in_features"], device=CUDA).bfloat16()
        y, total = rms_norm(x, x[0], 1e-5, residual)
        got, both = normed(x, x[0], 1e-5, residual), torch.cat((gate, up), 1)
        check(got[0], product(y))
        assert torch.equal(got[1], total)
        check(activated(both, Activation.SILU), product(gated_activation(both, Activation.SILU)))


@pytest.mark.parametrize(
    "form",
    (PackedIntegers(4, 128, zero=False), AWQ(4, 32), ScaledWeight("float8_e4m3fn", (WHOLE, WHOLE)), *EIGHTS[1:5]),
    ids=lambda each: each.label,
)
def test_experts_compute_as_the_format_means(form: Format) -> None:
    """A few tokens' two launches, which begin early, and the grouped products of more; some experts are another
    rank's."""
    torch.manual_seed(4)
    hidden, inner, experts, top_k = 1024, 384, 16, 4
    pieces = [on_card(form, 2 * inner, hidden, 1, experts), on_card(form, hidden, inner, 2, experts)]
    names, codings = tuple(each.form.label for each in pieces), tuple(each.form.rounded_coding for each in pieces)
    places = torch.stack([torch.randperm(experts, device=CUDA) for _ in range(3)]).int()
    places[places % 3 == 0] = -1
    given = [
        (torch.randn(tokens, hidden, device=CUDA).bfloat16(), torch.randn(tokens, experts, device=CUDA).bfloat16(), held)
        for held in (None, places)
        for tokens in (1, 3, 4, 9, 40)
    ]  # fmt: skip

    def apply(sparse: Callable[..., torch.Tensor], x: torch.Tensor, router: torch.Tensor, held: Any) -> torch.Tensor:
        return sparse(x, router, pieces[:1], pieces[1:], top_k, True, Activation.SILU, held)

    wanted = [apply(packed_moe, *each) for each in given]  # before pieces are laid out for the kernel
    for held in (None, experts):
        kernels = Kernels(CUDA, techniques=using(programmatic_launch=True))
        facts = {
            "num_experts": experts,
            "top_k": top_k,
            "formats": names,
            "codings": tuple(each.form.coding for each in pieces),
        }
        facts |= {"eights": tuple(each.form.eight for each in pieces), "rounded": codings, "held": held}
        sparse = kernels.choose(*called("packed_moe", dtype=torch.bfloat16, **facts))
        assert kernels.choices[-1].chosen == "codes"
        mine = [(each, want) for each, want in zip(given, wanted, strict=True) if (each[2] is None) == (held is None)]
        found = [apply(sparse, *each) for _ in range(3) for each, _ in mine]  # none waits for the one before
        for index, got in enumerate(found):
            each, want = mine[index % len(mine)]
            peak = want.abs().max().clamp(min=1e-3)
            check(got / peak, want / peak, factor=4.0)  # a last bit of what is rounded moves codes
            assert len(each[0]) > 4 or torch.equal(got, found[index % len(mine)]), "other bits"
