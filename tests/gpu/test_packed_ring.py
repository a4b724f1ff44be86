"""Products of few rows with weights of few bits, or of 8 bits as their inputs, on the card: every form against what the
codes mean."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.kernels.candidate import Shape
from headrace.kernels.linear import reference
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.packing import Coding
from headrace.kernels.linear.ring_forms import MANY_ROWS, RingForm
from headrace.spec import Activation
from tests.support.card import check, require_card
from tests.support.codings import CODINGS, random_packed

require_card()

from headrace.kernels.linear.cuda_ring import RingLinear, kernels_of, machine_code  # noqa: E402  (needs Triton's cache, so a card's packages)
from headrace.kernels.linear.rings import ManyRing  # noqa: E402

CUDA = torch.device("cuda")
PROCESSORS = torch.cuda.get_device_properties(CUDA).multi_processor_count
ROWS = (8, 16, 32, 64)
EIGHTS = ("fp8", "int8", "blocks")


def forms(coding: Coding | None, eight: str = "", *, gated: bool = False) -> list[RingForm]:
    """256 columns leave no registers for 64 rows; products alone are of more rows, too."""
    shared = (1,) if gated else (1, 2, 4) if coding is None or coding.many else (1, 4)
    sizes = [(rows, columns, ways) for rows in ROWS for columns in (64, 128, 256) for ways in shared]
    few = [RingForm(*size, late, coding, eight) for size in sizes if size[:2] != (64, 256) for late in (False, True)]
    if gated or (coding is not None and not coding.many):
        return few
    if coding is None:
        return few + [RingForm(128, columns, ways, eight=eight) for columns in (64, 128) for ways in (1, 2)]
    cut = ((128, 1, False), (128, 2, True), (128, 3, False), (256, 1, True), (64, 2, False), (64, 4, True))
    return few + [RingForm(rows, *size, coding) for rows in MANY_ROWS for size in cut if rows == 128 or size[0] == 128]


def layer(
    coding: Coding, outs: int, ins: int, bias: torch.Tensor | None = None, *, gated: bool = False
) -> tuple[RingLinear, torch.Tensor]:
    packed, meant = random_packed(coding, outs * (2 if gated else 1), ins, CUDA, gated=gated)
    none: Any = None
    return RingLinear(packed, bias, Shape(outs, ins, gated), (), kernels_of(0), True, none, {}), meant


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """One behind the other they would take minutes."""
    kinds = [*((coding, "") for coding in CODINGS), *((None, eight) for eight in EIGHTS)]
    plain = {(form, None, False) for kind in kinds for form in forms(*kind) if not form.late}
    gates = {(form, Activation.SILU, False) for kind in kinds for form in forms(*kind, gated=True) if not form.late}
    turned = {(form, None, True) for coding in CODINGS for form in forms(coding) if not form.late and form.rows >= 64}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda each: machine_code(*each), sorted(plain | gates | turned, key=str)))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize(("outs", "ins"), [(6144, 4096), (1000, 2112), (72, 264)], ids=str)
def test_products_with_what_stands_around_them(coding: Coding, outs: int, ins: int) -> None:
    torch.manual_seed(outs)
    for bias in (None, torch.randn(outs, device=CUDA).bfloat16()):
        product, weight = layer(coding, outs, ins, bias)
        twin = reference.fused_linear(weight, bias)
        for form in (form for form in forms(coding) if form.fits(product.shape, PROCESSORS)):
            for tokens in (1, form.rows - 3, form.rows):
                x, residual, scale = (
                    torch.randn(tokens, ins, device=CUDA).bfloat16(),
                    torch.randn(tokens, outs, device=CUDA).bfloat16(),
                    torch.rand(outs, device=CUDA),
                )
                squares = torch.rand(300, tokens, device=CUDA) * ins / 150
                fused = () if form.many else (Epilogue(squares, 1e-5), Epilogue(residual=residual, scale=scale))
                for epilogue in (Epilogue(), *fused):
                    got, want = product.compute(x, epilogue, form), twin(x, epilogue)
                    check(got[0], want[0])
                    assert torch.equal(got[0], product.compute(x, epilogue, form)[0]), f"{form}: other bits"
                    if epilogue.scale is not None and got[1] is not None and got[2] is not None and want[1] is not None:
                        check(got[1], want[1])
                        torch.testing.assert_close(got[2].sum(0), got[0].float().square().sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize(("outs", "ins"), [(14336, 4096), (1000, 1088)], ids=str)
def test_gates(coding: Coding, outs: int, ins: int) -> None:
    torch.manual_seed(outs)
    product, weight = layer(coding, outs, ins, gated=True)
    twin = reference.fused_linear(weight, None)
    for form in (form for form in forms(coding, gated=True) if form.fits(product.shape, PROCESSORS)):
        for tokens in (1, form.rows):
            epilogue, x = (
                Epilogue(torch.rand(64, tokens, device=CUDA) * ins / 32, 1e-5, Activation.SILU),
                torch.randn(tokens, ins, device=CUDA).bfloat16(),
            )
            check(product.compute(x, epilogue, form)[0], twin(x, epilogue)[0])


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize(("outs", "ins"), [(2048, 4096), (1000, 1088)], ids=str)
def test_a_gate_as_one_matrix(coding: Coding, outs: int, ins: int) -> None:
    """Its rows take turns, and its columns do not."""
    torch.manual_seed(outs)
    packed, weight = random_packed(coding, 2 * outs, ins, CUDA, gated=True)
    bias, none, shape = torch.randn(2 * outs, device=CUDA).bfloat16(), None, Shape(2 * outs, ins)
    product = RingLinear(packed, bias, shape, (), kernels_of(0), True, none, {})  # type: ignore[arg-type]
    for form in (form for form in forms(coding) if form.rows >= 64 and form.fits(shape, PROCESSORS)):
        for tokens in (form.rows - 3, form.rows):
            x = torch.randn(tokens, ins, device=CUDA).bfloat16()
            check(product.compute(x, Epilogue(), form)[0], reference.fused_linear(weight, bias)(x, Epilogue())[0])
            if form.many and form.ways == 1:
                ring = ManyRing(replace(product, forms=((form.rows, form),)), none)  # type: ignore[arg-type]
                want = reference.gated_linear(weight, bias.float())(x.float(), Activation.SILU)
                check(ring.gated(x, Activation.SILU), want.bfloat16())


def codes(kind: str, *size: int) -> torch.Tensor:
    made = torch.randint(0, 256, size, dtype=torch.uint8, device=CUDA)
    return made.view(torch.int8) if kind == "int8" else (made & 0xBF).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("gated", [False, True], ids=["alone", "gate"])
@pytest.mark.parametrize("kind", EIGHTS)
@pytest.mark.parametrize(("outs", "ins"), [(6144, 4096), (1024, 2176), (256, 272)], ids=str)
def test_inputs_of_8_bits(kind: str, outs: int, ins: int, gated: bool) -> None:
    torch.manual_seed(outs)
    shape, whole, blocks = Shape(outs, ins, gated), outs * (1 + gated), kind == "blocks"
    weight, bias = codes(kind, whole, ins), torch.randn(whole, device=CUDA).bfloat16()
    usual = (74.0 if kind == "int8" else 0.5) * ins**0.5
    units = (torch.rand((-(-whole // 128), -(-ins // 128)) if blocks else (whole,), device=CUDA) + 0.5) / usual
    spread = units.repeat_interleave(128, 0).repeat_interleave(128, 1)[:whole, :ins] if blocks else units.unsqueeze(1)
    none: Any = None
    product = RingLinear(weight.view(torch.bfloat16), bias, shape, (), kernels_of(0), True, none, {}, units=units)
    twin = reference.fused_linear(weight.float() * spread, bias)
    for form in (form for form in forms(None, kind, gated=gated) if form.fits(shape, PROCESSORS)):
        for tokens in (1, form.rows - 3, form.rows):
            x = codes(kind, tokens, ins)
            scale = torch.rand((tokens, -(-ins // 128) if blocks else 1), device=CUDA) + 0.5
            wide = x.float() * (scale.repeat_interleave(128, 1)[:, :ins] if blocks else scale)
            epilogue = (
                Epilogue(gate=Activation.SILU)
                if gated
                else Epilogue(residual=torch.randn(tokens, outs, device=CUDA).bfloat16())
            )
            epilogue = epilogue if gated else replace(epilogue, scale=torch.rand(outs, device=CUDA))
            given = replace(epilogue, squares=scale if blocks else scale.view(1, -1))
            got, want = product.compute(x.view(torch.bfloat16), given, form)[0], twin(wide, epilogue)[0].bfloat16()
            check(got, want)
            assert torch.equal(got, product.compute(x.view(torch.bfloat16), given, form)[0]), f"{form}: other bits"
