"""Gate, up and activation as one product, on the card: against the twin, at every edge of its tiles."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.linear.gated_tiles import EIGHT_TILES, TALL, TILES, Form, Tile
from headrace.kernels.norm import reference
from headrace.spec import Activation
from tests.support.card import require_card

require_card()

from headrace.kernels.linear.cuda_gated import EightBitGemm, GatedLinear, kernels_of  # noqa: E402  (needs Triton's cache, so a card's packages)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("outs", "ins"), [(1024, 512), (1000, 4096), (72, 64), (8192, 2048), (1024, 1000)])
def test_the_product_is_the_twins(tile: Tile, outs: int, ins: int) -> None:
    """Tiles beyond the last row and column, K that ends within a stage, more tiles than processors, fewer stages than
    the ring has."""
    if not tile.takes(ins):
        pytest.skip("too few steps of K, so that it is never asked for")
    weight = torch.randn(2 * outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5)
    layer = GatedLinear(weight, kernels_of(weight.device), (), {})
    for tokens in (1, 65, 127, 128, 129, 300, 512, 2100, 5000):
        x = torch.randn(tokens, ins, device="cuda", dtype=torch.bfloat16)
        y = layer.compute(x, Activation.SILU, tile)
        want = reference.gated_activation((x.float() @ weight.float().t()), Activation.SILU)
        assert float((y.float() - want).norm() / want.norm()) < 5e-3, tokens
        assert torch.equal(y, layer.compute(x, Activation.SILU, tile))
        assert torch.equal(y[:1], layer.compute(x[:1].clone(), Activation.SILU, tile)), "a row hangs on the others"


@pytest.mark.parametrize("tile", EIGHT_TILES, ids=str)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_gemm_of_8_bits_is_exact_but_for_one_rounding(kind: str, tile: Tile) -> None:
    """At every edge of its tiles; nothing is written beyond the result."""
    torch.manual_seed(tile.columns)
    held: list[torch.Tensor] = []

    def within(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        held.append(torch.full((shape[0] + 8, shape[1]), 7.0, dtype=dtype, device=device))
        return held[-1][4:-4]

    def numbers(*size: int) -> torch.Tensor:
        whole = torch.randint(-127, 128, size, device="cuda")
        return whole.to(torch.int8) if kind == "int8" else (whole / 64).to(torch.float8_e4m3fn)

    for outs, ins in ((4096, 1024), (208, 272), (16, 16), (1552, 4096)):
        weight, units = numbers(outs, ins), torch.rand(outs, device="cuda") + 0.5
        layer = EightBitGemm(kind, weight, units, kernels_of(weight.device), {}, within)
        for tokens in (1, 129, 256, 257, 2100):
            x, scale = numbers(tokens, ins), torch.rand(tokens, 1, device="cuda") + 0.5
            y = layer.compute(x, scale, tile)
            want = (x.double() @ weight.double().t() * scale * units).float()
            bound = want.abs() * 2**-8 + (0 if kind == "int8" else 2e-2 * want.abs().max())  # its sums keep 14 bits
            assert bool(((y.float() - want).abs() <= bound).all()), (outs, ins, tokens)
            assert bool((held[-1][:4] == 7).all() and (held[-1][-4:] == 7).all())


@pytest.mark.parametrize("tile", TALL)
@pytest.mark.parametrize(("outs", "ins"), [(384, 320), (448, 320), (128, 328), (200, 448), (8, 264)])
def test_tall_tiles_at_their_edges(tile: Tile, outs: int, ins: int) -> None:
    """Thin tiles beside full ones, alone, and a last pair that is full; as few steps as they take; the last rows of
    half a tile and of none; more pairs than clusters, and bands that are not full. A row hangs neither on the others
    nor on its place, and none is written beyond."""
    weight, around = torch.randn(2 * outs, ins, device="cuda", dtype=torch.bfloat16).mul_(ins**-0.5), 300  # rows
    held: list[torch.Tensor] = []

    def within(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        held.append(torch.full((shape[0] + 2 * around, shape[1]), 7.0, dtype=dtype, device=device))
        return held[-1][around:-around]

    layer = GatedLinear(weight, kernels_of(weight.device), (), {}, within)
    for tokens in (1, 127, 128, 129, 255, 256, 257, 1000, 2304, 8448):
        x = torch.randn(tokens, ins, device="cuda", dtype=torch.bfloat16)
        y = layer.compute(x, Activation.SILU, tile)
        want = reference.gated_activation((x.float() @ weight.float().t()), Activation.SILU)
        assert float((y.float() - want).norm() / want.norm()) < 5e-3, tokens
        assert float((y.float() - want).abs().max()) < 2e-2 * float(want.abs().max()), tokens
        assert torch.equal(layer.compute(x.roll(77, 0), Activation.SILU, tile), y.roll(77, 0)), (
            "a row hangs on its place"
        )
        assert torch.equal(layer.compute(x[-1:].clone(), Activation.SILU, tile), y[-1:]), "a row hangs on the others"
        for each in held:
            assert (each[:around] == 7.0).all() and (each[-around:] == 7.0).all(), tokens
        held.clear()


@pytest.mark.parametrize("tile", [Tile(192, Form.TURNS), *TALL])
def test_a_graph_replays_it(tile: Tile) -> None:
    weight = torch.randn(2 * 448, 512, device="cuda", dtype=torch.bfloat16).mul_(512**-0.5)
    layer = GatedLinear(weight, kernels_of(weight.device), (), {})
    x, inputs = (
        torch.zeros(2304, 512, device="cuda", dtype=torch.bfloat16),
        torch.randn(3, 2304, 512, device="cuda", dtype=torch.bfloat16),
    )
    want = [layer.compute(each, Activation.SILU, tile) for each in inputs]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.compute(x, Activation.SILU, tile)
    for each, result in zip(inputs, want, strict=True):
        x.copy_(each)
        graph.replay()
        assert torch.equal(y, result)


@pytest.mark.parametrize("tile", [Tile(128), Tile(176, Form.TURNS), *TALL])
@pytest.mark.parametrize("activation", Activation)
def test_every_activation_and_large_values(activation: Activation, tile: Tile) -> None:
    weight = torch.randn(512, 320, device="cuda", dtype=torch.bfloat16)
    layer = GatedLinear(weight, kernels_of(weight.device), (), {})
    x = (
        torch.randn(200, 320, device="cuda", dtype=torch.bfloat16)
        * torch.logspace(-3, 2, 200, device="cuda").bfloat16()[:, None]
    )
    y, want = (
        layer.compute(x, activation, tile),
        reference.gated_activation((x.float() @ weight.float().t()), activation),
    )
    assert y.isfinite().all()
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("tile", [Tile(224), Tile(192, Form.TURNS), *TALL])
def test_memory_beyond_the_result_stays_as_it_was(tile: Tile) -> None:
    weight = torch.randn(2 * 1000, 512, device="cuda", dtype=torch.bfloat16)
    layer = GatedLinear(weight, kernels_of(weight.device), (), {})
    x = torch.randn(130, 512, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    held = torch.full((8 * 130 * 1000,), 7.0, device="cuda", dtype=torch.bfloat16)
    for _ in range(8):
        layer.compute(x, Activation.SILU, tile)
    torch.cuda.synchronize()
    assert (held == 7.0).all()
    del held
    assert torch.cuda.memory_allocated() <= before + 2**20
