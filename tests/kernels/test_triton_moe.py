"""The sparse feed-forward in Triton against its torch twin, in the interpreter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  before any kernel: it fixes the mode
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.moe import reference
from headrace.kernels.moe.triton_moe import Moe, _routed, tiles_for
from headrace.spec import Activation
from tests.support.expert_ranks import COPIED, UNEVEN, parts
from tests.support.kernel_cases import TOLERANCE


def inputs(
    tokens: int, dtype: torch.dtype, *, experts: int = 6, hidden: int = 72, inner: int = 40
) -> tuple[torch.Tensor, ...]:
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
    assert float((got.float() - want.float()).abs().max()) <= 2 * TOLERANCE[dtype] * float(
        want.float().abs().max().clamp(min=1.0)
    )


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_few_tokens_with_what_stands_around_them_equal_the_twin(tokens: int) -> None:
    x, router, gate_up, down = inputs(tokens, torch.float32)
    epilogue = Epilogue(torch.rand(7, tokens) * 99, 1e-5, None, torch.randn(tokens, 72), torch.rand(72))
    arguments = (x, router, gate_up, down, 2, True, Activation.SILU, epilogue)
    got, want = Moe(False).fused(*arguments), reference.fused_moe(*arguments)
    for one, other in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert got[2] is not None and want[2] is not None
    torch.testing.assert_close(got[2].sum(0, keepdim=True), want[2], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("experts", "batch_invariant"), [(6, False), (40, False), (6, True)])
def test_every_tile_of_uneven_experts_equals_the_twin(experts: int, batch_invariant: bool) -> None:
    """All tokens take the first expert, whose list is longer than a tile; tails of every size; experts nobody takes, of
    weights not to be read."""
    x, router, gate_up, down = inputs(150, torch.bfloat16, experts=experts)
    router.zero_()
    router[:, 0] = 6.0
    for expert, (first, end) in enumerate(pairwise((0, 70, 115, 140, 150)), start=1):
        router[first:end, expert] = 4.0
    gate_up[5:], down[5:] = float("nan"), float("nan")
    assert _routed(router, 2, True)[1].tolist() == [150, 70, 45, 25, 10] + [0] * (experts - 5)
    tile = tiles_for(torch.bfloat16, 300, experts, invariant=batch_invariant).expand
    assert (tile.rows, tile.halvings) == {(6, False): (128, 3), (40, False): (16, 0), (6, True): (64, 0)}[
        experts, batch_invariant
    ]
    arguments = (x, router, gate_up, down, 2, True, Activation.SILU)
    got, want = Moe(batch_invariant, True)(*arguments).float(), reference.moe(*arguments).float()
    assert float((got - want).abs().max()) <= 2 * TOLERANCE[torch.bfloat16] * float(want.abs().max())


@pytest.mark.parametrize("layer", [UNEVEN, COPIED], ids=["uneven", "copied"])
@pytest.mark.parametrize("tokens", [1, 4, 23])
def test_ranks_of_whole_experts_add_up_to_all_of_them(layer: tuple[tuple[int, ...], ...], tokens: int) -> None:
    """Each as its twin; what no program wrote is not read."""
    x, router, gate_up, down = inputs(tokens, torch.float32)
    rest = (2, True, Activation.SILU)

    def broken(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    total = torch.zeros_like(x)
    for experts, places in parts(layer, 6):
        arguments = (x, router, gate_up[experts], down[experts], *rest, places)
        got, want = Moe(False, empty=broken)(*arguments), reference.moe(*arguments)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        total += got
    torch.testing.assert_close(total, reference.moe(x, router, gate_up, down, *rest), atol=1e-5, rtol=1e-5)


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
    _, counts, *_ = _routed(router, 2, True)
    assert int(counts.sum()) == 9 * 2
    rest = [row for row in range(9) if row != 1]
    arguments = (x, router, gate_up, down, 2, True, Activation.SILU)
    torch.testing.assert_close(Moe(False)(*arguments)[rest], reference.moe(*arguments)[rest], atol=1e-5, rtol=1e-5)


def test_invariant_bits_depend_on_nothing_else() -> None:
    x, router, gate_up, down = inputs(20, torch.bfloat16)
    rest = (gate_up, down, 2, True, Activation.SILU)
    assert torch.equal(Moe(True)(x, router, *rest)[7:8], Moe(True)(x[7:8], router[7:8], *rest))
