"""The batch-invariant linear layer in Triton against its torch twin, in the interpreter, and its choice of tiles."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.linear import reference
from headrace.kernels.linear import triton_linear as linear
from headrace.kernels.linear.triton_linear import ONE, InvariantLinear, Tile, tile_for
from tests.support.kernel_cases import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = Tile(16, 16, 32, 4, 2)


def operands(tokens: int, outs: int, ins: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    return (
        torch.randn(tokens, ins).to(dtype),
        (torch.randn(outs, ins) * ins**-0.5).to(dtype),
        torch.randn(outs).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bulk", [False, True], ids=["rows loaded", "copy engine"])
@pytest.mark.parametrize(("tokens", "outs", "ins"), [(1, 40, 72), (19, 130, 200), (70, 33, 64)])
def test_linear_equals_its_twin(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bulk: bool, tokens: int, outs: int, ins: int
) -> None:
    monkeypatch.setattr(linear, "tile_for", lambda *shape, **device: SMALL)
    x, weight, bias = operands(tokens, outs, ins, dtype)
    for given in (bias, None):
        got = InvariantLinear(weight, given, 4, one_order=True, bulk=bulk)(x)
        want = reference.linear(weight.float(), None if given is None else given.float())(x.float())
        assert_close(got, want.to(dtype), dtype)


@pytest.mark.parametrize("tokens", [1, 9, 40, 100])
def test_every_tile_that_a_shape_may_choose_covers_it(tokens: int) -> None:
    x, weight, _ = operands(tokens, 200, 96, torch.bfloat16)
    for processors in (1, 2, 132):
        got = InvariantLinear(weight, None, processors, one_order=True, bulk=True)(x)
        assert_close(got, reference.linear(weight.float(), None)(x.float()).bfloat16(), torch.bfloat16)


def test_rows_that_the_copy_engine_cannot_read_are_loaded() -> None:
    """Strided rows, odd widths, an odd beginning; leading dimensions are kept."""
    x, weight, bias = operands(12, 24, 37, torch.bfloat16)
    product, twin = InvariantLinear(weight, bias, 132, one_order=True, bulk=True), reference.linear(weight, bias)
    wide = torch.randn(12, 3, 41).bfloat16()
    for given in (x, x[3:5], wide[..., 2:39], wide[:, 1, :37], x.T.contiguous().T):
        assert_close(product(given), twin(given), torch.bfloat16)
    assert product(x[:0]).shape == (0, 24)


def test_only_a_device_whose_tiles_agree_chooses_by_rows() -> None:
    shapes = [(tokens, outs) for tokens in (1, 16, 17, 64, 65, 300, 8192) for outs in (512, 6144, 128256)]
    assert {tile_for(torch.bfloat16, *shape, processors=132, one_order=False) for shape in shapes} == {ONE}
    chosen = {shape: tile_for(torch.bfloat16, *shape, processors=132, one_order=True) for shape in shapes}
    assert len(set(chosen.values())) > 5
    assert all(tile.rows <= 64 for (tokens, _), tile in chosen.items() if tokens <= 64)
