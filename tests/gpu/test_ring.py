"""Products of few rows whose weights are under way early, on the card: every form against the twin, at every edge of
its tiles."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.kernels import Kernels
from headrace.kernels.candidate import Shape
from headrace.kernels.linear import reference
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.ring_forms import ROWS, RingForm, candidate_forms
from headrace.spec import Activation
from tests.support.card import check, require_card
from tests.support.kernel_cases import called, using

require_card()

from headrace.kernels.linear.cuda_ring import RingLinear, kernels_of, machine_code  # noqa: E402  (needs Triton's cache, so a card's packages)

CUDA = torch.device("cuda")
PROCESSORS = torch.cuda.get_device_properties(CUDA).multi_processor_count


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * scale).bfloat16()


def layer(
    outs: int, ins: int, bias: torch.Tensor | None = None, *, gated: bool = False, pdl: bool = True
) -> RingLinear:
    weight = random(outs * (2 if gated else 1), ins, scale=ins**-0.5)
    none: Any = None
    return RingLinear(weight, bias, Shape(outs, ins, gated), (), kernels_of(0), pdl, none, {})


def forms_for(shape: Shape, rows: int) -> list[RingForm]:
    """Also those that few programs compute, which nobody would choose."""
    forms = {RingForm(rows, columns, ways) for columns in (64, 128) for ways in (1, 2, 3, 4)} | set(
        candidate_forms(shape, rows, PROCESSORS)
    )
    return sorted((form for form in forms if form.fits(shape, PROCESSORS)), key=str)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """One behind the other they would take a minute."""
    every = forms_for(Shape(128, 1024), ROWS[0])
    forms = {(replace(form, rows=rows, late=False), None) for form in every for rows in ROWS}
    gates = {(form, kind) for form, _ in forms if form.ways == 1 for kind in Activation}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda each: machine_code(*each), sorted(forms | gates, key=str)))


@pytest.mark.parametrize(("outs", "ins"), [(6144, 4096), (4096, 14336), (2048, 2048), (1000, 2112), (72, 264)], ids=str)
def test_products_with_what_stands_around_them(outs: int, ins: int) -> None:
    """Tiles beyond the last column, K that ends within a step, fewer steps than the ring has stages, more tiles than
    processors."""
    torch.manual_seed(outs)
    for bias in (None, random(outs)):
        product = layer(outs, ins, bias)
        twin = reference.fused_linear(product.weight, bias)
        for rows in ROWS:
            for tokens in (rows - 15, rows - 7, rows):
                x, residual, scale = random(tokens, ins), random(tokens, outs), torch.rand(outs, device=CUDA) + 0.5
                squares = torch.rand(300, tokens, device=CUDA) * ins / 150
                for epilogue in (
                    Epilogue(squares, 1e-5),
                    Epilogue(residual=residual, scale=scale),
                    Epilogue(residual=residual, scale=scale.bfloat16()),
                ):
                    want = twin(x, epilogue)
                    for form in forms_for(product.shape, rows):
                        got = product.compute(x, epilogue, form)
                        check(got[0], want[0])
                        assert torch.equal(got[0], product.compute(x, epilogue, form)[0]), f"{form}: other bits"
                        if epilogue.scale is not None:
                            check(got[1], want[1])
                            assert got[2] is not None
                            torch.testing.assert_close(
                                got[2].sum(0), got[0].float().square().sum(1), rtol=1e-4, atol=1e-3
                            )


@pytest.mark.parametrize(("outs", "ins"), [(14336, 4096), (8192, 2048), (1000, 1088), (40, 64)], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_gates(outs: int, ins: int, biased: bool) -> None:
    torch.manual_seed(outs)
    product = layer(outs, ins, random(2 * outs) if biased else None, gated=True)
    twin = reference.fused_linear(product.weight, product.bias)
    for rows in ROWS:
        for kind in Activation:
            for tokens in (rows - 15, rows):
                epilogue, x = Epilogue(torch.rand(64, tokens, device=CUDA) * ins / 32, 1e-5, kind), random(tokens, ins)
                for form in forms_for(product.shape, rows):
                    check(product.compute(x, epilogue, form)[0], twin(x, epilogue)[0])


@pytest.mark.parametrize("tokens", [2, 16, 40, 64])
@pytest.mark.parametrize("ways", [2, 4])
def test_a_chain_in_a_graph_is_the_chain_launched_one_by_one(tokens: int, ways: int) -> None:
    """Kernels that begin before the one before has ended, over the same memory again and again: the same bits as when
    each ends first."""
    torch.manual_seed(tokens)
    hidden, inner, layers, rows = 2048, 8192, 12, -(-tokens // 16) * 16
    start, scale, results = random(tokens, hidden), random(hidden), []
    up, down = layer(inner, hidden, gated=True), layer(hidden, inner)
    for pdl, late in ((False, False), (True, False), (True, True)):
        pair = [
            RingLinear(each.weight, None, each.shape, (), each.kernels, pdl, each.others, {}) for each in (up, down)
        ]
        forms = RingForm(rows, 128, 1, late), RingForm(rows, 128, ways, late)

        def chain(pair: list[RingLinear] = pair, forms: tuple[RingForm, RingForm] = forms) -> torch.Tensor:
            residual, x, squares = start, start, start.float().square().sum(1)[None]
            for _ in range(layers):
                middle, _, _ = pair[0].compute(x, Epilogue(squares, 1e-5, Activation.SILU), forms[0])
                residual, x, squares = pair[1].compute(middle, Epilogue(residual=residual, scale=scale), forms[1])  # type: ignore[assignment]
            return residual

        eager = chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain()
        for _ in range(20):
            captured.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, eager)
        results.append(eager.clone())
    assert all(torch.equal(results[0], each) for each in results) and bool(results[0].isfinite().all())


def test_a_weight_of_the_table_is_served_for_every_number_of_rows() -> None:
    facts = {"dtype": torch.bfloat16, "in_features": 2048, "out_features": 2048, "gated": False}
    offered = Kernels(CUDA, techniques=using(programmatic_launch=True)).offer(*called("fused_linear", **facts))
    weight = random(2048, 2048, scale=2048**-0.5)
    assert offered is not None
    product, twin = offered(weight, None), reference.fused_linear(weight, None)
    for tokens in range(1, 65):
        x, residual, scale = random(tokens, 2048), random(tokens, 2048), random(2048)
        check(
            product(x, Epilogue(residual=residual, scale=scale))[0],
            twin(x, Epilogue(residual=residual, scale=scale))[0],
        )
