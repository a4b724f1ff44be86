"""Experts on the card, against the twin: of few tokens with what stands around them, in one launch (experts.cu) and in
Triton's, each begun while the one before still runs; of many, grouped (grouped.cu)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.packed import packed_moe
from headrace.kernels.linear.reference import fused_linear
from headrace.kernels.moe import reference
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.floats import MXFP4
from headrace.quant.integers import AWQ, PackedIntegers
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.card import check, require_card
from tests.support.codings import random_packed, random_piece
from tests.support.kernel_cases import called, using

require_card()

from headrace.kernels import Kernels  # noqa: E402

CUDA = torch.device("cuda")
TOKENS = (1, 2, 5, 8, 9, 32, 33)
SHAPES = ((1024, 384, 16, 4), (2048, 768, 128, 8), (4096, 256, 8, 2))  # hidden, inner, experts, chosen
FORMATS: tuple[Format, ...] = (
    PackedIntegers(4, 128, zero=False), AWQ(4, 32), PackedIntegers(4, 64), ScaledWeight("float8_e4m3fn", (WHOLE, WHOLE)),
    *(ScaledWeight("float8_e4m3fn", (rows, columns), activations=Activations("fp8", group=group))
      for rows, columns, group in ((1, WHOLE, 0), (128, 128, 128))),
    ScaledWeight("int8", (1, WHOLE), activations=Activations("int8")), PackedIntegers(4, 128, activations=Activations("int8")), MXFP4(),
)  # fmt: skip
ONE = frozenset({"experts", "coded_experts"})
pytestmark = pytest.mark.timeout(240)


def given(
    tokens: int, hidden: int, experts: int, seed: int, crowded: bool
) -> tuple[tuple[torch.Tensor, ...], Epilogue]:
    """``crowded``: all tokens take the first experts, two of which a router prefers equally."""
    torch.manual_seed(seed)
    x, logits = (torch.randn(tokens, each, device=CUDA).bfloat16() for each in (hidden, experts))
    if crowded:
        logits[:, 1:4], logits[:, 5] = 9.0, logits[:, 6]
    squares = torch.rand(37, tokens, device=CUDA) * hidden / 20
    residual, scale = torch.randn(tokens, hidden, device=CUDA).bfloat16(), torch.rand(hidden, device=CUDA)
    return (x, logits), Epilogue(squares, 1e-5, None, residual, scale if seed % 2 else scale.bfloat16())


def offered(op: str, disabled: frozenset[str], **facts: Any) -> tuple[Any, str]:
    kernels = Kernels(CUDA, techniques=using(programmatic_launch=True, joined_experts=True), disabled=disabled)
    found = kernels.offer(*called(op, dtype=torch.bfloat16, **facts))
    assert found is not None
    return found, next(each.chosen for each in kernels.choices if each.behind is None)


def agree(run: Callable[..., Any], twin: Callable[..., Any], hidden: int, experts: int, factor: float) -> None:
    """Calls follow each other without waiting, twice: the same bits again."""
    cases = [given(tokens, hidden, experts, tokens, crowded) for tokens in TOKENS for crowded in (False, True)]
    found = [[run(*inputs, epilogue) for inputs, epilogue in cases] for _ in range(2)]
    for (inputs, epilogue), once, again in zip(cases, *found, strict=True):
        y, scaled, _ = twin(*inputs, epilogue)
        peak = y.float().abs().max().clamp(min=1.0).bfloat16()
        check(once[0] / peak, y / peak, factor=factor)
        check(once[1] / peak, scaled / peak, factor=factor)
        torch.testing.assert_close(once[2].sum(0), once[0].float().square().sum(1), rtol=1e-4, atol=1e-4)
        if len(y) <= reference.MOST_CODED:
            assert all(torch.equal(one, other) for one, other in zip(once[:2], again[:2], strict=True)), len(y)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("disabled", (frozenset(), ONE), ids=("one launch", "triton"))
def test_experts(shape: tuple[int, int, int, int], disabled: frozenset[str]) -> None:
    hidden, inner, experts, top_k = shape
    torch.manual_seed(1)
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=CUDA) * hidden**-0.5).bfloat16()
    down = (torch.randn(experts, hidden, inner, device=CUDA) * inner**-0.5).bfloat16()
    run, name = offered("fused_moe", disabled, num_experts=experts, top_k=top_k)
    assert name == ("fused" if disabled else "experts")
    for renormalize, kind in ((True, Activation.SILU), (False, Activation.GELU_TANH)):
        assert disabled or run.function(run.most, hidden, inner, renormalize, kind) is not None, "others served"

        def both(call: Callable[..., Any], x: Any, router: Any, epilogue: Epilogue) -> Any:
            return call(x, router, gate_up, down, top_k, renormalize, kind, epilogue)  # noqa: B023

        agree(partial(both, run), partial(both, reference.fused_moe), hidden, experts, 1.0)


@pytest.mark.parametrize(
    ("shape", "width", "form"), ((SHAPES[0], 384, None), (SHAPES[1], 4096, None), *((SHAPES[0], 384, each) for each in FORMATS[:2])), ids=str
)  # fmt: skip
def test_behind_attention(shape: tuple[int, int, int, int], width: int, form: Format | None) -> None:
    """With attention's last product and the router's in the launch. Tokens whose last choice is a close one are left out."""
    hidden, inner, experts, top_k = shape
    torch.manual_seed(2)
    gate_up, down, output, router, qkv = (
        (torch.randn(*size, device=CUDA) * by * size[-1] ** -0.5).bfloat16()
        for *size, by in ((experts, 2 * inner, hidden, 1), (experts, hidden, inner, 1), (hidden, width, 1), (experts, hidden, 4), (656, hidden, 1))
    )  # fmt: skip
    twin, both, facts, around = reference.fused_moe, (gate_up, down), {}, (output, qkv)  # type: Any, Any, Any, Any
    if form is not None:
        pieces, facts = coded(form, hidden, inner, experts)
        twin, both = partial(reference.fused_moe, apply=packed_moe), (pieces[:1], pieces[1:])
        packed = [random_packed(facts["rounded"][0], *each.shape, CUDA) for each in (output, qkv)]
        around, (output, qkv) = tuple(each for each, _ in packed), (each.bfloat16() for _, each in packed)
    run, _ = offered("fused_moe", frozenset(), num_experts=experts, top_k=top_k, **facts)
    norm, weights, compared = torch.rand(hidden, device=CUDA).bfloat16() + 0.5, (True, Activation.SILU), 0
    assert run.function(1, hidden, inner, *weights, width) is not None, "others served"
    few = reference.MOST_CODED if form is None else 2
    assert [run.takes(each) for each in around] == [few] * 2
    cases = []
    for tokens in (each for each in (1, 2, 5, 8) if each <= few):
        epilogue = given(tokens, hidden, experts, tokens, False)[1]
        attended = torch.randn(tokens, width, device=CUDA).bfloat16()
        x, scaled, squares = fused_linear(output, None)(attended, Epilogue(residual=epilogue.residual, scale=norm))
        logits, _, _ = fused_linear(router, None)(scaled, Epilogue(squares, epilogue.eps))
        wanted = twin(scaled, logits, *both, top_k, *weights, Epilogue(squares, epilogue.eps, None, x, epilogue.scale))
        best = logits.float().sort(dim=1, descending=True).values
        cases.append((epilogue, attended, wanted, best[:, top_k - 1] - best[:, top_k] > 0.15))
    for epilogue, attended, wanted, clear in 2 * cases:
        compared += int(clear.sum())
        for next_weight in (None, around[1]):
            found = run.behind(attended, around[0], router, *both, *weights, norm, epilogue, next_weight)
            if next_weight is None:
                torch.testing.assert_close(found[2].sum(0), found[0].float().square().sum(1), rtol=1e-4, atol=1e-4)
                second = wanted[1]
            else:
                second = fused_linear(qkv, None)(wanted[1], Epilogue(wanted[2], epilogue.eps))[0]
            for got, want in ((found[0], wanted[0]), (found[1], second)):
                peak = want.float().abs().max().clamp(min=1.0).bfloat16()
                if clear.any():
                    check(got[clear] / peak, want[clear] / peak, factor=2.0 if form is None else 4.0)
    assert compared >= 1.5 * few


def coded(form: Format, hidden: int, inner: int, experts: int) -> tuple[list[Any], dict[str, Any]]:
    """Of all experts, what a gate and what it gates are in, and the rest; what a call site says of it."""
    pieces = []
    for seed, size in enumerate(((2 * inner, hidden), (hidden, inner))):
        piece = random_piece(form, *size, seed=seed, copies=experts)
        piece.tensors = tuple({name: each.cuda() for name, each in tensors.items()} for tensors in piece.tensors)
        pieces.append(piece)
    names = {"formats": "label", "codings": "coding", "eights": "eight", "rounded": "rounded_coding"}
    return pieces, {name: tuple(getattr(each.form, own) for each in pieces) for name, own in names.items()}


@pytest.mark.parametrize("shape", SHAPES[:1], ids=str)
@pytest.mark.parametrize("disabled", (frozenset(), ONE), ids=("one launch", "triton"))
@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
def test_experts_in_codes(form: Format, disabled: frozenset[str], shape: tuple[int, int, int, int]) -> None:
    hidden, inner, experts, top_k = shape
    pieces, facts = coded(form, hidden, inner, experts)
    run, name = offered("fused_moe", disabled, num_experts=experts, top_k=top_k, **facts)
    served = pieces[0].form.rounded_coding is not None and pieces[0].form.rounded_coding.plain
    assert name == ("coded_experts" if served and not disabled else "codes")
    if name == "coded_experts":
        assert run.function(run.most, hidden, inner, True, Activation.SILU) is not None, "others served"
    wanted: list[Any] = []

    def twin(x: torch.Tensor, router: torch.Tensor, epilogue: Epilogue) -> Any:
        given = x, router, pieces[:1], pieces[1:], top_k, True, Activation.SILU, epilogue
        return reference.fused_moe(*given, apply=packed_moe)

    for tokens in TOKENS:  # before pieces are laid out for a kernel
        for crowded in (False, True):
            inputs, epilogue = given(tokens, hidden, experts, tokens, crowded)
            wanted.append(twin(*inputs, epilogue))
    answers = iter(wanted)
    agree(
        lambda x, router, epilogue: run(x, router, pieces[:1], pieces[1:], top_k, True, Activation.SILU, epilogue),
        lambda *_: next(answers), hidden, experts, 4.0,  # a last bit of what is rounded moves codes
    )  # fmt: skip


def counted(counts: tuple[int, ...], top_k: int) -> torch.Tensor:
    """Logits for which so many tokens take each expert, most by its first place."""
    tokens = sum(counts) // top_k
    chosen = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)])
    logits = torch.full((tokens, len(counts)), -4.0)
    logits[torch.arange(tokens * top_k) % tokens, chosen[: tokens * top_k]] = torch.rand(tokens * top_k)
    return logits.bfloat16().cuda()


@pytest.mark.parametrize(
    ("counts", "hidden", "inner"),
    [
        ((257, 0, 1, 64, 65, 127, 128, 129, 191, 193, 256, 585), 256, 192),
        ((300,) * 8, 512, 320),
        ((0, 0, 800, 0, 800, 0, 0, 800), 192, 128),
    ],
    ids=str,
)
def test_experts_of_many_tokens(counts: tuple[int, ...], hidden: int, inner: int) -> None:
    """The same bits every time, in whichever order pairs were listed."""
    torch.manual_seed(3)
    top_k, experts = 2 if len(counts) == 12 else 3, len(counts)
    logits = counted(counts, top_k)
    x = torch.randn(len(logits), hidden, device=CUDA).bfloat16()
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=CUDA) * hidden**-0.5).bfloat16()
    down = (torch.randn(experts, hidden, inner, device=CUDA) * inner**-0.5).bfloat16()
    kernels = Kernels(CUDA, techniques=using(), disabled=frozenset())
    run = kernels.choose(*called("moe", dtype=torch.bfloat16, num_experts=experts, top_k=top_k))
    given = x, logits, gate_up, down, top_k, True, Activation.SILU
    torch.empty(2 * len(x) * top_k, max(hidden, inner), device=CUDA).fill_(torch.nan)
    found = run.computed(*given, None)
    assert found is not None, "others served"
    check(found, reference.moe(*given), factor=2.0)
    places = torch.arange(experts, dtype=torch.int32, device=CUDA).flip(0).unsqueeze(0)
    turned = run.computed(*given[:2], gate_up.flip(0), down.flip(0), *given[4:], places)
    for again in (turned, *(run.computed(*given, None) for _ in range(3))):
        assert torch.equal(found, again)
