"""Gate, up and activation as one product, on the card: against the twin, at every edge of its tiles."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.cuda.gated_measured import TILES, Tile
from headrace.spec import Activation
from tests.support.card import require_card

require_card()

from headrace.kernels.cuda.gated import GatedLinear, Kernels  # noqa: E402  (needs Triton's cache, so a card's packages)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("outs", "ins"), [(1024, 512), (1000, 4096), (72, 64), (8192, 2048), (1024, 1000)])
def test_the_product_is_the_twins(tile: Tile, outs: int, ins: int) -> None:
    """Tiles beyond the last row and column, K that ends within a stage, more tiles than processors, fewer stages than the ring has."""
    weight = torch.randn(2 * outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5)
    layer = GatedLinear(weight, Kernels(weight.device), (), {})
    for tokens in (1, 65, 127, 128, 129, 300, 512, 2100, 5000):
        x = torch.randn(tokens, ins, device="cuda", dtype=torch.bfloat16)
        y = layer.compute(x, Activation.SILU, tile)
        want = reference.gated_activation((x.float() @ weight.float().t()), Activation.SILU)
        assert float((y.float() - want).norm() / want.norm()) < 5e-3, tokens
        assert torch.equal(y, layer.compute(x, Activation.SILU, tile))
        assert torch.equal(y[:1], layer.compute(x[:1].clone(), Activation.SILU, tile)), "a row hangs on the others"


@pytest.mark.parametrize("tile", [Tile(128), Tile(176, turns=True)])
@pytest.mark.parametrize("activation", Activation)
def test_every_activation_and_large_values(activation: Activation, tile: Tile) -> None:
    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    layer = GatedLinear(weight, Kernels(weight.device), (), {})
    x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16) * torch.logspace(-3, 2, 200, device="cuda").bfloat16()[:, None]
    y, want = layer.compute(x, activation, tile), reference.gated_activation((x.float() @ weight.float().t()), activation)
    assert y.isfinite().all()
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("tile", [Tile(224), Tile(192, turns=True)])
def test_memory_beyond_the_result_stays_as_it_was(tile: Tile) -> None:
    weight = torch.randn(2 * 1000, 512, device="cuda", dtype=torch.bfloat16)
    layer = GatedLinear(weight, Kernels(weight.device), (), {})
    x = torch.randn(130, 512, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    held = torch.full((8 * 130 * 1000,), 7.0, device="cuda", dtype=torch.bfloat16)
    for _ in range(8):
        layer.compute(x, Activation.SILU, tile)
    torch.cuda.synchronize()
    assert (held == 7.0).all()
    del held
    assert torch.cuda.memory_allocated() <= before + 2**20
