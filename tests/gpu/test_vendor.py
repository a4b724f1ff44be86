"""Long products by cuBLASLt with algorithms of our choice, on the card, against the twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.bench.tune import WIDEST
from headrace.kernels import TWIN, Kernels
from headrace.kernels.candidate import Shape
from headrace.kernels.linear.candidates import FLAT, TUNED
from headrace.kernels.linear.cublaslt import Operands, Products
from headrace.kernels.linear.measured import SHIPPED, kept_file
from headrace.kernels.linear.tuned import MEASURED
from tests.support.kernel_cases import called

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "outs", "ins"), [(4096, 768, 512), (4099, 1024, 2048), (5000, 2048, 512)])
def test_every_algorithm_on_offer_computes_the_product_and_the_sum(
    tokens: int, outs: int, ins: int, dtype: torch.dtype
) -> None:
    products = Products(outs, ins, dtype, torch.cuda.current_device())
    offers, operands = products.offers(4096), Operands(tokens, outs, ins, dtype)
    assert len({settings for settings, _ in offers}) == len(offers) > 0
    x, weight = (torch.randn(rows, ins, device="cuda", dtype=dtype) for rows in (tokens, outs))
    residual, product = torch.randn(tokens, outs, device="cuda", dtype=dtype), x.float() @ weight.float().t()
    taken = 0
    for _, algorithm in offers:
        if products.takes(algorithm, operands):
            y, total = torch.full_like(residual, float("nan")), residual.clone()
            products.multiply(algorithm, operands, x, weight, y, add=False)
            products.multiply(algorithm, operands, x, weight, total, add=True)
            assert error(y, product) < 4e-3 and error(total, product + residual.float()) < 4e-3
            taken += 1
    assert taken


def test_what_was_measured_on_this_card_is_offered_and_serves_any_number_of_rows() -> None:
    """Red: another version of the library, whose table must be measured again."""
    device = torch.cuda.get_device_name()
    table = {**MEASURED.read(SHIPPED, device), **MEASURED.read(kept_file(), device)}
    if not table:
        pytest.skip("nothing was measured on this card")
    for shape, choices in table.items():
        outs, ins = shape.outs, shape.ins
        kernels = Kernels(torch.device("cuda"))
        facts = {"dtype": torch.bfloat16, "in_features": ins, "out_features": outs}
        pack = kernels.choose(*called("linear", shared=False, fused=True, **facts))
        assert kernels.choices[-1].chosen == TUNED, (outs, ins)
        weight = torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5)
        linear, add = pack(weight, None), kernels.choose(*called("added_linear", **facts))(weight, None)
        for tokens in (1, 100, *((4096, 5001, 8192, 12300) if outs < WIDEST else (500, 600))):
            x = torch.randn(tokens, ins, device="cuda", dtype=torch.bfloat16)
            want, residual = F.linear(x, weight).float(), torch.randn(tokens, outs, device="cuda", dtype=torch.bfloat16)
            assert error(linear(x), want) < 4e-3
            assert error(add(x, residual.clone()), want + residual.float()) < 4e-3
        for choice in choices:
            assert (linear.chooser.find(choice.measured) is not None) == bool(choice.settings)


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize(
    ("outs", "ins"), [(128256, 2048), (2048, 8192)]
)  # a head; a layer whose products are not fused
def test_rows_that_the_flat_kernels_leave_are_computed_by_what_stands_behind_them(
    outs: int, ins: int, tuned: bool
) -> None:
    kernels = Kernels(torch.device("cuda"), strict=True, disabled=frozenset() if tuned else frozenset({TUNED}))
    pack = kernels.choose(
        *called("linear", dtype=torch.bfloat16, in_features=ins, out_features=outs, shared=True, fused=False)
    )
    measured = Shape(outs, ins) in MEASURED.table(torch.cuda.get_device_name())
    behind = TUNED if tuned and measured else TWIN
    assert [(choice.behind, choice.chosen) for choice in kernels.choices] == [(FLAT, behind), (None, FLAT)]
    weight = torch.randn(outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5)
    linear = pack(weight, None)
    assert linear.product.weight.data_ptr() == weight.data_ptr(), "a shared weight is held once"
    for tokens in (1, 64, 65, 256, 300, 512):
        x = torch.randn(tokens, ins, device="cuda", dtype=torch.bfloat16)
        want, y = F.linear(x, weight), linear(x)
        assert y.shape == want.shape and error(y, want.float()) < 4e-3
        assert tuned or tokens <= 64 or torch.equal(y, want)
    if behind == TUNED:
        assert linear.behind.weight.data_ptr() == weight.data_ptr()
