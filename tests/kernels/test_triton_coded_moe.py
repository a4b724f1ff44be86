"""Sparse feed-forwards over experts in codes of few bits, in Triton's interpreter, against the twin that widens
them."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter  # before any kernel: it fixes the mode
from headrace.kernels.candidate import ExpertFacts
from headrace.kernels.linear.epilogue import Epilogue
from headrace.kernels.linear.packed import packed_moe
from headrace.kernels.moe.reference import fused_moe
from headrace.kernels.moe.triton_coded import CodedMoe, _packed_singly, _packed_together, lay, rounded_again
from headrace.quant import Format
from headrace.quant.codes import Activations
from headrace.quant.floats import MXFP4
from headrace.quant.gguf import GGUFBlocks
from headrace.quant.integers import AWQ, PackedIntegers
from headrace.quant.scaled import WHOLE, ScaledWeight
from headrace.spec import Activation
from tests.support.codings import random_piece
from tests.support.expert_ranks import COPIED, parts
from tests.support.kernel_cases import assert_close

EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 256, 160
FORMATS: tuple[Format, ...] = (
    PackedIntegers(4, 32, zero=False), AWQ(4, 32), MXFP4(), GGUFBlocks("Q8_0"), ScaledWeight("float8_e4m3fn", (1, WHOLE)),
    ScaledWeight("float8_e4m3fn", (1, WHOLE), activations=Activations("fp8")), ScaledWeight("int8", (1, WHOLE), activations=Activations("int8")),
)  # fmt: skip
FEW: tuple[Format, ...] = (
    PackedIntegers(4, 128, zero=False), ScaledWeight("float8_e4m3fn", (WHOLE, WHOLE), activations=Activations("fp8")),
    ScaledWeight("float8_e4m3fn", (128, 128), activations=Activations("fp8", group=128)), PackedIntegers(4, 128, activations=Activations("int8")),
)  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=lambda each: each.label)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_equal_the_twin(form: Format, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tests.support.triton_interpreter.shuffle_programs(monkeypatch, tokens)
    torch.manual_seed(tokens)
    up = [random_piece(form, INNER, HIDDEN, seed=seed, copies=EXPERTS) for seed in (1, 2)]
    down = [random_piece(form, HIDDEN, INNER, seed=3, copies=EXPERTS)]
    x, router = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(tokens, EXPERTS).bfloat16()
    want = packed_moe(x, router, up, down, TOP_K, True, Activation.SILU)
    pieces = [*up, *down]
    codings, eights = (tuple(getattr(each.form, name) for each in pieces) for name in ("rounded_coding", "eight"))
    moe = CodedMoe(ExpertFacts(torch.bfloat16, EXPERTS, TOP_K, eights=eights, rounded=codings))
    for _ in range(2):  # laid out once, and found again
        got = moe(x, router, up, down, TOP_K, True, Activation.SILU)
        assert_close(got, want, torch.bfloat16)
    if form.eight is None:  # what stands behind the kernel still reads them
        assert_close(packed_moe(x, router, up, down, TOP_K, True, Activation.SILU), want, torch.bfloat16)
    assert moe(x[:0], router[:0], up, down, TOP_K, True, Activation.SILU).shape == (0, HIDDEN)
    assert all("blocks" in tensors for piece in pieces for tensors in piece.tensors)


@pytest.mark.parametrize("form", FEW, ids=lambda each: each.label)
def test_a_few_tokens_take_two_launches_that_round_as_the_format_says(
    form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that a router prefers equally among them; to the bit in any order of programs."""
    torch.manual_seed(3)
    dtype = torch.bfloat16 if form.eight is None or form.eight.group else torch.float16
    pieces = [random_piece(form, *shape, dtype=dtype, copies=4) for shape in ((256, 128), (128, 128))]
    x, router = torch.randn(2, 128).to(dtype), torch.randn(2, 4).to(dtype)
    router[:, 1:] = router[:, :1]
    want = packed_moe(x, router, pieces[:1], pieces[1:], 2, False, Activation.SILU)
    codings, eights = (tuple(getattr(each.form, name) for each in pieces) for name in ("rounded_coding", "eight"))
    made: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.full(shape, torch.nan, dtype=dtype, device=device))
        return made[-1]

    moe, got = CodedMoe(ExpertFacts(dtype, 4, 2, eights=eights, rounded=codings), empty), []
    tests.support.triton_interpreter.PROGRAMS.clear()
    for seed in (1, 2):
        with monkeypatch.context() as patch:
            tests.support.triton_interpreter.shuffle_programs(patch, seed)
            got.append(moe(x, router, pieces[:1], pieces[1:], 2, False, Activation.SILU))
    assert tests.support.triton_interpreter.PROGRAMS == 2 * [4 * 4, 2 * 4]
    peak = 3 * want.abs().max()  # a last bit of what is rounded moves codes
    assert_close(got[0] / peak, want / peak, dtype)
    assert torch.equal(*got)
    if form.eight is not None:
        expanded, *rounded = made[1:4]
        for inputs, back in zip((x, expanded.flatten(0, 1)), rounded, strict=True):
            assert torch.equal(back.view_as(inputs), rounded_again(inputs, form.eight))


@pytest.mark.parametrize("tokens", [2, 6])
@pytest.mark.parametrize("form", FEW[:2], ids=lambda each: each.label)
def test_few_tokens_with_what_stands_around_them_equal_the_twin(form: Format, tokens: int) -> None:
    torch.manual_seed(5)
    pieces = [random_piece(form, *shape, copies=4) for shape in ((256, 128), (128, 128))]
    x, router = torch.randn(tokens, 128).bfloat16(), torch.randn(tokens, 4).bfloat16()
    epilogue = Epilogue(
        torch.rand(7, tokens) * 99, 1e-5, None, torch.randn(tokens, 128).bfloat16(), torch.rand(128).bfloat16()
    )
    arguments = (x, router, pieces[:1], pieces[1:], 2, True, Activation.SILU, epilogue)
    want = fused_moe(*arguments, apply=packed_moe)
    codings, eights = (tuple(getattr(each.form, name) for each in pieces) for name in ("rounded_coding", "eight"))
    got = CodedMoe(ExpertFacts(torch.bfloat16, 4, 2, eights=eights, rounded=codings)).fused(*arguments)
    peak = 3 * want[0].abs().max()  # a last bit of what is rounded moves codes
    for one, other in zip(got[:2], want[:2], strict=True):
        assert one is not None and other is not None
        assert_close(one / peak, other / peak, torch.bfloat16)
    assert got[2] is not None
    torch.testing.assert_close(got[2].sum(0), got[0].float().square().sum(1))


@pytest.mark.parametrize("form", [*FORMATS, PackedIntegers(4, 128)], ids=lambda each: each.label)
@pytest.mark.parametrize("merged", [False, True])
def test_experts_of_whole_blocks_are_laid_together_as_they_are_singly(form: Format, merged: bool) -> None:
    up = [
        random_piece(form, 256 if merged else 128, 256, seed=seed, copies=40) for seed in ((1,) if merged else (1, 2))
    ]
    down = [random_piece(form, 256, 256, seed=3, copies=40)]
    for pieces, gated in ((up, True), (down, False)):
        coding = pieces[0].form.rounded_coding
        assert coding is not None
        want = _packed_singly(pieces, coding, gated=gated)
        got = _packed_together(pieces, coding, gated=gated)
        assert torch.equal(got.blocks, want.blocks) and torch.equal(got.factor, want.factor)
        assert lay(pieces, coding, gated=gated).outs == want.outs == 256 and len(pieces[0].laid) == 40


def test_many_tokens_of_few_experts_fill_several_tiles() -> None:
    torch.manual_seed(5)
    form = PackedIntegers(4, 32, zero=False)
    up, down = [random_piece(form, 2 * INNER, HIDDEN, copies=2)], [random_piece(form, HIDDEN, INNER, seed=1, copies=2)]
    x, router = torch.randn(40, HIDDEN).bfloat16(), torch.randn(40, 2).bfloat16()
    want = packed_moe(x, router, up, down, 1, False, Activation.GELU)
    codings = tuple(each.form.rounded_coding for each in (*up, *down))
    moe = CodedMoe(ExpertFacts(torch.bfloat16, 2, 1, eights=(None, None), rounded=codings))
    assert_close(moe(x, router, up, down, 1, False, Activation.GELU), want, torch.bfloat16)


@pytest.mark.parametrize(
    "form", [*FEW[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in FORMATS)], ids=lambda each: each.label
)
def test_ranks_of_whole_experts_equal_the_twin(form: Format) -> None:
    torch.manual_seed(7)
    x, router = torch.randn(9, HIDDEN).bfloat16(), torch.randn(9, EXPERTS + 1).bfloat16()
    for experts, places in parts(COPIED, EXPERTS + 1):
        up = [random_piece(form, INNER, HIDDEN, seed=seed, copies=len(experts)) for seed in (1, 2)]
        down = [random_piece(form, HIDDEN, INNER, seed=3, copies=len(experts))]
        want = packed_moe(x, router, up, down, TOP_K, True, Activation.SILU, places)
        codings, eights = (
            tuple(getattr(each.form, name) for each in (*up, *down)) for name in ("rounded_coding", "eight")
        )
        facts = ExpertFacts(torch.bfloat16, EXPERTS + 1, TOP_K, eights=eights, rounded=codings, held=len(experts))
        for tokens in (9, 3):
            got = CodedMoe(facts)(x[:tokens], router[:tokens], up, down, TOP_K, True, Activation.SILU, places)
            assert_close(got, want[:tokens], torch.bfloat16)
