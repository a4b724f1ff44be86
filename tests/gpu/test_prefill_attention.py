"""Prompts' attention in CUDA C++ on the card, against its torch twin: any lengths, groups and blocks, scores of any
size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.kernels import Kernels
from headrace.kernels.attention import reference
from headrace.kernels.build import nvrtc as compiler
from headrace.kernels.inputs import AttentionInputs
from tests.support.card import check, require_card
from tests.support.kernel_cases import PagedCase, called, using
from tests.support.quantized_kv import FORMATS, QuantizedCase

require_card()

from headrace.kernels.attention.cuda_prefill import Prompts  # noqa: E402  (a card's packages)
from headrace.kernels.attention.triton_widen import WidePrompts  # noqa: E402

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("its matrix instruction is that of compute capability 9.0", allow_module_level=True)

ODD = [
    (1, 1),
    (2, 2),
    (127, 127),
    (128, 128),
    (129, 129),
    (300, 900),
    (700, 3000),
    (1, 2000),
    (130, 130),
    (5, 300),
    (65, 4096 - 63),
    (17, 1040),
]
HEADS = [(32, 8, 128), (32, 8, 64), (12, 12, 128), (8, 1, 64), (24, 8, 128), (10, 2, 64), (64, 1, 128)]


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def on_card(case: PagedCase, *, beyond: int = 0) -> tuple[PagedCase, AttentionInputs]:
    """Queries as a merged product has them, ``beyond`` of no sequence behind them."""
    case.poison(None)
    case.k_cache, case.v_cache, case.table = (x.cuda() for x in (case.k_cache, case.v_cache, case.table))
    tokens, heads, dim = case.q.shape
    merged = torch.full(
        (tokens + beyond, heads + 2 * case.k_cache.shape[1], dim), 3.0, device="cuda", dtype=torch.bfloat16
    )
    merged[:tokens, :heads] = case.q
    case.q, made = merged[:, :heads], case.inputs
    return case, replace(
        made, query_start=made.query_start.cuda(), context_len=made.context_len.cuda(), slots=made.slots.cuda()
    )


def prompts_of(heads: int, kv_heads: int, dim: int) -> Prompts:
    return Prompts(dim, heads // kv_heads, torch.device("cuda"))


def attend(prompts: Prompts, case: PagedCase, inputs: AttentionInputs, few: int = 0) -> torch.Tensor:
    out = torch.full(case.q.shape, 7.0, device="cuda", dtype=torch.bfloat16)
    assert prompts.attend(case.q, out, case.k_cache, case.v_cache, inputs, case.q.shape[2] ** -0.5, few)
    return out


def twin(case: PagedCase, inputs: AttentionInputs) -> torch.Tensor:
    return reference.paged_attention(case.q, case.k_cache, case.v_cache, inputs, case.q.shape[2] ** -0.5, None, None)


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_every_length_is_the_twins_to_the_bit_again(heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    """And the ticket is as the next launch wants it."""
    prompts = prompts_of(heads, kv_heads, dim)
    for lengths in (ODD, [(700, 3000)], [(1, 1)], [(40 + row, 40 + 9 * row) for row in range(70)]):
        case, inputs = on_card(
            PagedCase(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, block_size=block_size),
            beyond=3,
        )
        got = attend(prompts, case, inputs)
        check(got, twin(case, inputs))
        assert all(torch.equal(attend(prompts, case, inputs), got) for _ in range(3))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_the_log_of_the_sum_is_the_twins(heads: int, kv_heads: int, dim: int) -> None:
    """Also of rows that see nothing, which are -inf, and of tokens of no sequence; and the answer keeps its bits."""
    lengths = [*ODD, (200, 130), (70, 0)]
    case, inputs = on_card(
        PagedCase(lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, block_size=64), beyond=3
    )
    case.q[::5] *= 20.0
    out, prompts = torch.empty(case.q.shape, device="cuda", dtype=torch.bfloat16), prompts_of(heads, kv_heads, dim)
    got, want = (torch.full(case.q.shape[:2], 5.0, device="cuda") for _ in range(2))
    of = case.q, case.k_cache, case.v_cache, inputs, dim**-0.5
    assert prompts.attend(case.q, out, *of[1:], 0, got)
    reference.paged_attention(*of, None, None, lse=want)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=3e-3)
    assert got.isneginf().any() and torch.equal(out, attend(prompts, case, inputs))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(32, 8, 128, 128), (12, 12, 64, 16)])
def test_over_codes_prompts_are_the_twins(heads: int, kv_heads: int, dim: int, block_size: int, name: str) -> None:
    """The single queries before them are left as they are; steps of few queries, and too long ones, to others."""
    lengths = [(1, 900), (1, 17), (300, 900), (700, 3000), (129, 129), (65, 4031)]
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    coded = QuantizedCase(name, lengths, **sizes, dtype=torch.bfloat16)
    case, made = on_card(coded, beyond=3)
    inputs, held = replace(made, leading=2), coded.quantized
    scales = [None if each is None else each.cuda() for each in (held.k_scales, held.v_scales)]
    held = replace(held, k_scales=scales[0], v_scales=scales[1])
    prompts = WidePrompts(prompts_of(heads, kv_heads, dim).attend, kv_heads, dim, "cuda")
    arguments = case.k_cache, case.v_cache, inputs, dim**-0.5
    out = torch.full(case.q.shape, 7.0, device="cuda", dtype=torch.bfloat16)
    assert prompts.attend(case.q, out, *arguments, 1, None, held)
    want = reference.paged_attention(case.q, *arguments, None, None, held)
    check(out[2:], want[2:])
    assert bool((out[:2] == 7.0).all())
    for other in (replace(inputs, max_query_len=100), replace(inputs, max_context_len=2**20)):
        assert not prompts.attend(case.q, out, *arguments[:2], other, dim**-0.5, 1, None, held)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("scale", [80.0, 1000.0])
def test_scores_that_grow_beyond_a_base(dim: int, scale: float) -> None:
    """Some queries, one block of keys; and keys that grow along a sequence, or before it, by any factor."""
    prompts = prompts_of(8, 2, dim)
    case, inputs = on_card(PagedCase(ODD, heads=8, kv_heads=2, dim=dim, dtype=torch.bfloat16, block_size=128))
    case.q[::3] *= scale
    case.k_cache[case.table[6, 2].long(), ..., 0] += scale
    case.k_cache[case.table[10, 0].long()] *= scale
    for index in range(20):
        case.k_cache[case.table[10, 31 - index].long(), :, :, 1] -= index
        case.k_cache[case.table[6, index].long(), :, :, 1] += index * 0.5
    check(attend(prompts, case, inputs), twin(case, inputs), factor=2.0)


@pytest.mark.parametrize("dim", [64, 128])
def test_few_queries_are_somebody_elses(dim: int) -> None:
    lengths = [(1, 70), (400, 2100), (4, 4), (5, 5), *[(1, 300)] * 50, (2000, 2000), (1, 1)]
    case, inputs = on_card(
        PagedCase(lengths, heads=32, kv_heads=8, dim=dim, dtype=torch.bfloat16, block_size=128), beyond=2
    )
    got, want = attend(prompts_of(32, 8, dim), case, inputs, few=4), twin(case, inputs)
    many = torch.cat(
        [torch.full((count,), count > 4) for count, _ in lengths] + [torch.ones(2, dtype=torch.bool)]
    ).cuda()
    check(got[many], want[many])
    assert (got[~many] == 7.0).all()
    case, inputs = on_card(
        PagedCase([(1, 9), (3, 3)], heads=32, kv_heads=8, dim=dim, dtype=torch.bfloat16, block_size=128)
    )
    assert (attend(prompts_of(32, 8, dim), case, inputs, few=4) == 7.0).all()


def test_a_query_before_its_sequence_sees_nothing() -> None:
    case, inputs = on_card(
        PagedCase([(200, 130), (70, 0), (3, 200)], heads=4, kv_heads=2, dim=128, dtype=torch.bfloat16, block_size=64)
    )
    check(attend(prompts_of(4, 2, 128), case, inputs), twin(case, inputs))


@pytest.mark.parametrize("dim", [64, 128])
def test_a_broken_query_breaks_nobody_else(dim: int) -> None:
    case, inputs = on_card(
        PagedCase([(300, 500), (200, 200)], heads=8, kv_heads=2, dim=dim, dtype=torch.bfloat16, block_size=128)
    )
    want = attend(prompts_of(8, 2, dim), case, inputs)
    case.q[77, 3] = float("nan")
    got = attend(prompts_of(8, 2, dim), case, inputs)
    broken = ~got.isfinite().all(2)
    assert broken.nonzero().tolist() == [[77, 3]]
    check(got[~broken], want[~broken])


def test_lengths_are_read_on_the_device() -> None:
    case, inputs = on_card(
        PagedCase([(300, 900), (200, 700)], heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16, block_size=128)
    )
    prompts, out = prompts_of(8, 2, 128), torch.empty(case.q.shape, device="cuda", dtype=torch.bfloat16)
    attend(prompts, case, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert prompts.attend(case.q, out, case.k_cache, case.v_cache, inputs, 128**-0.5, 0)
    for contexts in ([900, 700], [300, 200], [640, 699]):
        inputs.context_len.copy_(torch.tensor(contexts))
        graph.replay()
        check(out, twin(case, inputs))


def chosen() -> Any:
    in_use = using(cuda_prefill=True, cascade_attention=False, fused_rope_attention=False)
    kernels = Kernels(torch.device("cuda"), strict=True, techniques=in_use)
    return kernels.choose(*called("paged_attention", dtype=torch.bfloat16, head_dim=128, num_heads=32, num_kv_heads=8))


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (500, None), (None, 30.0)])
def test_in_the_engines_place(window: int | None, soft_cap: float | None) -> None:
    """Mixed steps, with the decode kernel beside it; a window or a cap is Triton's."""
    lengths = [(1, 2000), (300, 900), (4, 4), (1, 17), (130, 130)]
    case, inputs = on_card(PagedCase(lengths, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, block_size=128))
    arguments = (case.q, case.k_cache, case.v_cache, inputs, 128**-0.5, window, soft_cap)
    check(chosen()(*arguments), reference.paged_attention(*arguments))


def test_without_a_compiler_triton_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> bytes:
        raise compiler.CompileError("there is no compiler")

    monkeypatch.setattr(compiler, "build", refuse)
    case, inputs = on_card(PagedCase([(300, 900)], heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, block_size=128))
    arguments = (case.q, case.k_cache, case.v_cache, inputs, 128**-0.5, None, None)
    kernel = chosen()
    for _ in range(2):
        check(kernel(*arguments), reference.paged_attention(*arguments))
    assert caplog.text.count("there is no compiler") == 1


SINGLES = {
    "uneven": [(1, each) for each in (1, 0, 5, 64, 65, 1000, 4097, 17, 129, 300, 2500, 63, 128, 192, 900, 31, 77)],
    "alike": [(1, 300 + row % 20) for row in range(140)],
}


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("lengths", SINGLES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (32, 8, 64), (16, 16, 128), (32, 4, 128)])
def test_single_queries_before_prompts(heads: int, kv_heads: int, dim: int, lengths: str, block_size: int) -> None:
    """They have a launch of their own, and nobody else attends to them: blanks would show."""
    first, prompts = SINGLES[lengths], [(300, 900), (17, 17), (130, 2130)]
    case, inputs = on_card(
        PagedCase(
            [*first, *prompts], heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16, block_size=block_size
        )
    )
    in_use = using(cuda_prefill=True, cascade_attention=False)
    kernels = Kernels(torch.device("cuda"), strict=True, techniques=in_use)
    kernel = kernels.choose(
        *called("paged_attention", dtype=torch.bfloat16, head_dim=dim, num_heads=heads, num_kv_heads=kv_heads)
    )
    step = replace(inputs, leading=len(first))
    arguments = (case.q, case.k_cache, case.v_cache)
    got = kernel(*arguments, step, dim**-0.5, None, None)
    assert kernel.singles._plan[0] is step and not kernel._plans
    check(got, reference.paged_attention(*arguments, inputs, dim**-0.5, None, None))
    assert torch.equal(kernel(*arguments, replace(step), dim**-0.5, None, None), got)


@pytest.mark.parametrize(
    ("flags", "window", "shared"), [({}, 500, 0), ({"fused_rope_attention": False}, None, 0), ({}, None, 5000)]
)
def test_who_else_attends_to_single_queries_before_prompts(
    flags: dict[str, bool], window: int | None, shared: int
) -> None:
    """Windows, the switch, keys that may be shared."""
    lengths = [*SINGLES["uneven"], (300, 900)]
    case, inputs = on_card(PagedCase(lengths, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, block_size=128))
    kernels = Kernels(torch.device("cuda"), strict=True, techniques=using(cuda_prefill=True, **flags))
    kernel = kernels.choose(
        *called("paged_attention", dtype=torch.bfloat16, head_dim=128, num_heads=32, num_kv_heads=8)
    )
    step = replace(inputs, leading=17, shared_tokens=shared)
    arguments = (case.q, case.k_cache, case.v_cache)
    check(
        kernel(*arguments, step, 128**-0.5, window, None),
        reference.paged_attention(*arguments, inputs, 128**-0.5, window, None),
    )
    assert kernel._plans and (kernel.singles is None or kernel.singles._plan is None)
