"""Choosing numbers of few bits: grids, GPTQ, scaled channels. Against brute force and against each other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from headrace.quant.floats import E2M1  # noqa: E402
from headrace.quantize.gptq import gptq, output_error  # noqa: E402
from headrace.quantize.grid import Grid, fit  # noqa: E402
from headrace.quantize.layer import activation_aware, smooth  # noqa: E402

GRIDS = [
    Grid(bits, group, symmetric)
    for bits in (1, 2, 3, 4, 8)
    for group in (0, 32)
    for symmetric in (True, False)
    if bits > 1 or not symmetric
]


def inputs(count: int, ins: int, *, outliers: int = 0) -> torch.Tensor:
    """Correlated, a few channels much larger."""
    x = torch.randn(count, ins // 4) @ torch.randn(ins // 4, ins) + 0.3 * torch.randn(count, ins)
    x[:, :outliers] *= 30
    return x


FLOATS = [
    Grid(8, 0, kind="fp8"), Grid(8, 32, kind="fp8"), Grid(8, 32, kind="fp8", rows=4),
    Grid(4, 32, kind="mxfp4"), Grid(4, 16, kind="nvfp4", whole=0.01),
]  # fmt: skip


@pytest.mark.parametrize("grid", [*GRIDS, *FLOATS], ids=str)
def test_no_other_code_is_nearer(grid: Grid) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 80)
    found = fit(weight, grid)
    off = (found.rounded(weight) - weight).abs()
    every = torch.arange(grid.lowest, grid.highest + 1.0)
    if grid.kind != "int":
        every = torch.tensor(E2M1)
    if grid.kind == "fp8":
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        every = every[every.isfinite()]
    for code in every:
        assert bool((off <= (found.dense(torch.full_like(weight, code)) - weight).abs() + 1e-6).all())


@pytest.mark.parametrize("grid", [*GRIDS, *FLOATS[3:]], ids=str)
def test_clipping_lessens_the_error_and_never_worsens_it(grid: Grid) -> None:
    torch.manual_seed(1)
    weight = torch.randn(16, 96).pow(3)
    plain, clipped = (fit(weight, grid, clip=clip) for clip in (False, True))
    errors = [float((each.rounded(weight) - weight).abs().pow(2.4).sum()) for each in (plain, clipped)]
    assert errors[1] <= errors[0] and (grid.bits not in (2, 3) or errors[1] < 0.95 * errors[0])


def test_scales_are_those_that_their_type_holds() -> None:
    torch.manual_seed(2)
    weight = torch.randn(6, 64)
    exponents = fit(weight, Grid(4, 32, kind="mxfp4")).scale.log2()
    assert torch.equal(exponents, exponents.round())
    most = weight.unflatten(1, (-1, 32)).abs().amax(-1) / exponents.exp2()
    assert bool(((most > 4) & (most <= 8)).all())
    blocks = fit(weight, Grid(8, 32, kind="fp8", rows=4, scales=torch.float32)).scale
    assert (
        torch.equal(blocks[0], blocks[3])
        and torch.equal(blocks[4], blocks[5])
        and not torch.equal(blocks[0], blocks[4])
    )
    assert float(blocks[4, 1]) == pytest.approx(float(weight[4:, 32:].abs().max()) / 448)
    small = fit(weight, Grid(4, 16, kind="nvfp4", whole=0.25)).scale / 0.25
    assert torch.equal(small, small.to(torch.float8_e4m3fn).float())


def test_zeros_and_groups_of_zeros_stay_zero() -> None:
    weight = torch.zeros(2, 64)
    weight[0, 40:] = 1.0
    for grid in GRIDS:
        if grid.bits > 1:
            assert (
                not fit(weight, grid).rounded(weight)[1].any() and not fit(weight, grid).rounded(weight)[0, :32].any()
            )


@pytest.mark.parametrize("grid", [Grid(2, 32, False), Grid(3, 32), Grid(4, 0), Grid(4, 32)], ids=str)
@pytest.mark.parametrize("order", [False, True])
def test_gptq_is_better_than_rounding_to_nearest_for_these_inputs(grid: Grid, order: bool) -> None:
    torch.manual_seed(2)
    x = inputs(512, 160)
    gram, weight = x.T @ x, torch.randn(24, 160)
    codes, found = gptq(weight, gram, grid, order=order)
    assert codes.min() >= grid.lowest and codes.max() <= grid.highest and torch.equal(codes, codes.round())
    nearest = output_error(weight, fit(weight, grid, clip=True).rounded(weight), gram)
    made = output_error(weight, found.dense(codes), gram)
    assert made < 0.6 * nearest
    assert made == pytest.approx(float((x @ (weight - found.dense(codes)).T).square().sum()), rel=1e-3)


def test_gptq_without_correlation_is_rounding_to_nearest() -> None:
    torch.manual_seed(3)
    weight, grid = torch.randn(8, 64), Grid(4, 32)
    codes, found = gptq(weight, torch.eye(64) * 7, grid, clip=False)
    assert torch.equal(codes, fit(weight, grid).codes(weight)) and torch.equal(found.scale, fit(weight, grid).scale)


def test_inputs_that_never_come_cost_nothing_and_break_nothing() -> None:
    torch.manual_seed(4)
    x = inputs(40, 64)
    x[:, 5] = 0.0
    weight = torch.randn(8, 64)
    codes, found = gptq(weight, x.T @ x, Grid(4, 32))
    assert not found.dense(codes)[:, 5].any() and bool(codes.isfinite().all())
    degenerate = torch.ones(64, 64)  # of rank one
    assert bool(gptq(weight, degenerate, Grid(4, 32))[0].isfinite().all())


def test_channels_with_outliers_are_rounded_finer() -> None:
    torch.manual_seed(5)
    x = inputs(256, 128, outliers=3)
    weights, grid, gram = [torch.randn(16, 128), torch.randn(8, 128)], Grid(4, 32), x.T @ x
    factors = activation_aware(weights, x.abs().mean(0), gram, grid)
    assert factors[:3].min() > factors[3:].max()
    errors = [0.0, 0.0]
    for weight in weights:
        scaled = weight * factors
        errors[0] += output_error(weight, fit(weight, grid).rounded(weight), gram)
        errors[1] += output_error(weight, fit(scaled, grid).rounded(scaled) / factors, gram)
    assert errors[1] < 0.85 * errors[0]


def test_smoothed_inputs_lose_their_outliers() -> None:
    torch.manual_seed(6)
    x = inputs(256, 128, outliers=3)
    factors = smooth([torch.randn(16, 128)], x.abs().amax(0))
    before, after = (each.abs().amax(0) for each in (x, x / factors))
    assert after.max() / after.median() < 0.4 * before.max() / before.median()
    assert torch.equal(smooth([torch.ones(2, 4)], torch.ones(4)), torch.ones(4))
