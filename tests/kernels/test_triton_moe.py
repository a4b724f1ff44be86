"""The sparse feed-forward in Triton against its torch twin, in the interpreter."""

from __future__ import annotations

import pytest
import torch

import support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels import reference
from headrace.kernels.triton.moe import Moe, _routed, tiles_for
from headrace.spec import Activation
from support.kernel_cases import TOLERANCE


def inputs(tokens: int, dtype: torch.dtype, *, experts: int = 6, hidden: int = 72, inner: int = 40) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(tokens)
    x, router = torch.randn(tokens, hidden), torch.randn(tokens, experts)
    weights = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5, torch.randn(experts, hidden, inner) * inner**-0.5
    return tuple(each.to(dtype) for each in (x, router, *weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (5, 2), (17, 6)])
@pytest.mark.parametrize(("renormalize", "bulk"), [(True, False), (False, True)])
def test_moe_equals_its_twin(dtype: torch.dtype, tokens: int, top_k: int, renormalize: bool, bulk: bool) -> None:
    arguments = (*inputs(tokens, dtype), top_k, renormalize, Activation.SILU)
    got, want = Moe(False, bulk)(*arguments), reference.moe(*arguments)
    assert got.dtype == dtype
    assert float((got.float() - want.float()).abs().max()) <= 2 * TOLERANCE[dtype] * float(want.float().abs().max().clamp(min=1.0))


@pytest.mark.parametrize("tokens", [40, 70, 100])
def test_every_tile_equals_the_twin(tokens: int) -> None:
    arguments = (*inputs(tokens, torch.bfloat16, experts=4), 2, True, Activation.SILU)
    arguments[1][:, 0] += 3.0  # an expert that all take: its list is longer than the mean
    tiles = {tiles_for(torch.bfloat16, count * 2, 4, invariant=False) for count in (16, 40, 70, 100)}
    assert len(tiles) == 4
    got, want = Moe(False, True)(*arguments).float(), reference.moe(*arguments).float()
    assert float((got - want).abs().max()) <= 2 * TOLERANCE[torch.bfloat16] * float(want.abs().max())


def test_equal_experts_are_taken_in_order_and_unchosen_ones_are_not_read() -> None:
    x, router, gate_up, down = inputs(4, torch.float32)
    router.fill_(1.0)
    gate_up[2:], down[2:] = float("nan"), float("nan")
    arguments = (x, router, gate_up, down, 2, True, Activation.GELU_TANH)
    torch.testing.assert_close(Moe(False)(*arguments), reference.moe(*arguments), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf"), float("inf")])
def test_a_broken_token_takes_experts_that_are_there_and_leaves_its_neighbours_alone(broken: float) -> None:
    x, router, gate_up, down = inputs(9, torch.float32)
    router[1] = broken  # inf − inf is a NaN whose sign hangs on the machine
    _, counts, _ = _routed(router, 2, True)
    assert int(counts.sum()) == 9 * 2
    rest = [row for row in range(9) if row != 1]
    arguments = (x, router, gate_up, down, 2, True, Activation.SILU)
    torch.testing.assert_close(Moe(False)(*arguments)[rest], reference.moe(*arguments)[rest], atol=1e-5, rtol=1e-5)


def test_invariant_bits_depend_on_nothing_else() -> None:
    x, router, gate_up, down = inputs(20, torch.bfloat16)
    rest = (gate_up, down, 2, True, Activation.SILU)
    assert torch.equal(Moe(True)(x, router, *rest)[7:8], Moe(True)(x[7:8], router[7:8], *rest))
