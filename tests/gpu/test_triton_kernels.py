"""Every Triton kernel but attention on the card, compiled, against its torch twin on the same card, at the shapes of
real models."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.attention import reference as attention_twins
from headrace.kernels.moe import reference as moe_twins
from headrace.kernels.norm import reference as norm_twins
from headrace.kernels.rows import reference as rows_twins
from headrace.kernels.rows.reference import write_rows
from headrace.kernels.sampling import reference as twin
from headrace.spec import Activation
from tests.support.card import check, chosen, require_card
from tests.support.kernel_cases import DTYPES

require_card()

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, width in ((1, 4096), (300, 8192), (7, 2048), (5, 72)):
        x, residual, weight, bias = (
            torch.randn(shape, device=CUDA).to(dtype) for shape in ((rows, width), (rows, width), (width,), (width,))
        )
        for added in (None, residual):
            for got, want in zip(
                chosen("rms_norm", dtype=dtype)(x, weight, 1e-5, added),
                norm_twins.rms_norm(x, weight, 1e-5, added),
                strict=True,
            ):
                check(got, want)
            results = (
                norm(x, weight, bias, 1e-5, added)
                for norm in (chosen("layer_norm", dtype=dtype), norm_twins.layer_norm)
            )
            for got, want in zip(*results, strict=True):
                check(got, want)
        for kind in Activation:
            check(chosen("gated_activation", dtype=dtype)(x, kind), norm_twins.gated_activation(x, kind))
            check(chosen("activation", dtype=dtype)(x, kind), norm_twins.activation(x.float(), kind).to(dtype))
        ids = torch.randint(rows, (33,), device=CUDA)
        assert torch.equal(chosen("embedding", dtype=dtype)(ids, x, 3.0), rows_twins.embedding(ids, x, 3.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(128, 128), (64, 64), (80, 32), (96, 96), (256, 256), (64, 0)])
def test_rotary_write(dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    torch.manual_seed(dim)
    kernel = chosen("rotary_write", dtype=dtype, head_dim=dim, num_heads=12, num_kv_heads=4)
    cos_sin = torch.randn(5000, rotary_dim, device=CUDA) if rotary_dim else None
    slots, positions = torch.randperm(64 * 16, device=CUDA)[:777], torch.randint(0, 5000, (777,), device=CUDA)
    slots[::7] = -1
    packed, results = torch.randn(777, 20, dim, device=CUDA).to(dtype), []
    for write in (kernel, attention_twins.rotary_write):
        q, k, v = packed.clone().split((12, 4, 4), dim=1)
        caches = torch.zeros(64, 3, 2, 4, 16, dim, dtype=dtype, device=CUDA)
        results.append((write(q, k, v, positions, cos_sin, caches[:, 1, 0], caches[:, 1, 1], slots), caches))
    for got, want in zip(*results, strict=True):
        check(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "crowded"), [(1, False), (30, False), (700, False), (3000, False), (90, True), (1500, True)]
)
def test_moe(dtype: torch.dtype, tokens: int, crowded: bool) -> None:
    """``crowded``: most tokens take the same experts, as those of one prompt may, and some experts, of broken weights,
    have none."""
    torch.manual_seed(tokens)
    experts, hidden, inner = 32, 512, 352
    x, router = torch.randn(tokens, hidden, device=CUDA), torch.randn(tokens, experts, device=CUDA)
    gate_up = torch.randn(experts, 2 * inner, hidden, device=CUDA) * hidden**-0.5
    down = torch.randn(experts, hidden, inner, device=CUDA) * inner**-0.5
    if crowded:
        router[: tokens - 37, 3:7] += 9.0
        router[:, -2:] -= 30.0
        gate_up[-2:], down[-2:] = float("nan"), float("nan")
    arguments = (*(each.to(dtype) for each in (x, router, gate_up, down)), 4, True, Activation.SILU)
    check(chosen("moe", dtype=dtype, num_experts=experts, top_k=4)(*arguments), moe_twins.moe(*arguments), factor=2.0)
    if dtype is torch.bfloat16 and tokens > 1:
        kernel = chosen("moe", dtype=dtype, num_experts=experts, top_k=4, batch_invariant=True)
        together = kernel(*arguments)
        for row in (5, tokens - 1):
            assert torch.equal(
                together[row : row + 1],
                kernel(arguments[0][row : row + 1], arguments[1][row : row + 1], *arguments[2:]),
            )


def test_picks() -> None:
    """Noise word for word the twin's: a pick differs only where two sums are within rounding of each other."""
    vocab, rows = 128256, 64
    logits = torch.randn(rows, vocab, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)) * 3
    seeds, positions = torch.arange(rows, device=CUDA) * 0x123456789AB - 7, torch.arange(rows, device=CUDA)
    peak, tokens = chosen("greedy_tokens", dtype=torch.float32)(logits)
    assert torch.equal(peak, logits.amax(-1)) and torch.equal(logits.gather(1, tokens[:, None])[:, 0], peak)
    got = chosen("gumbel_argmax", dtype=torch.float32)(logits, None, seeds, positions)
    noisy = logits + twin.vocabulary_noise(seeds, positions, vocab)
    lost = noisy.amax(-1) - noisy.gather(1, got[:, None])[:, 0]
    assert float(lost.max()) < 2e-5 and int((lost > 0).sum()) <= 2
    alone = chosen("gumbel_argmax", dtype=torch.float32)(logits[9:10], None, seeds[9:10], positions[9:10])
    assert torch.equal(alone, got[9:10])


@pytest.mark.parametrize("spread", [3.0, 0.01, 12.0])
def test_filters(spread: float) -> None:
    vocab, rows = 128256, 12
    logits = torch.randn(rows, vocab, device=CUDA, generator=torch.Generator(CUDA).manual_seed(2)) * spread
    logits[3, 100:90000] = float("-inf")
    peak, heat = logits.amax(-1), torch.linspace(0.5, 1.5, rows, device=CUDA)
    scores = (logits - peak[:, None]) / heat[:, None]
    filters = (
        torch.tensor([0, 1, 50, 50, 3000, 0, 0, 0, 20, 0, 100000, 50], device=CUDA),
        torch.tensor([0.9, 1.0, 1.0, 0.8, 1.0, 1.0, 0.5, 1.0, 0.9, 0.99, 0.9, 1.0], device=CUDA),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.01, 0.0, 0.0, 0.2], device=CUDA),
    )
    seeds, positions = torch.arange(rows, device=CUDA), torch.arange(rows, device=CUDA)
    from headrace.kernels.sampling.triton_thresholds import keep_thresholds

    got, want = keep_thresholds(logits, *filters, scale=(peak, heat)), twin.keep_thresholds(scores, *filters)
    kept, wanted = scores >= got[:, None], scores >= want[:, None]
    exact = filters[1] >= 1.0
    assert torch.equal(kept[exact], wanted[exact])
    mass = scores.double().exp()  # the twin sums top-p in float32; float64 is the judge
    difference = ((mass * kept).sum(-1) - (mass * wanted).sum(-1)).abs() / mass.sum(-1)
    assert float(difference.max()) < 1e-3
    picked = chosen("pick_tokens", dtype=torch.float32)(logits, peak, heat, filters, seeds, positions)
    assert bool(kept.gather(1, picked[:, None]).all())
    again = keep_thresholds(logits[4:7], *(f[4:7] for f in filters), scale=(peak[4:7], heat[4:7]))
    assert torch.equal(again, got[4:7])


def test_scores() -> None:
    logits = torch.randn(33, 128256, device=CUDA) * 4
    targets = torch.randint(0, 128256, (33,), device=CUDA)
    got, want = chosen("score_tokens", dtype=torch.float32)(logits, targets, 5), twin.score_tokens(logits, targets, 5)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize(
    "lengths",
    [[1], [0], [0, 5, 0], [2112] * 248, [4097, 1, 0, 1023, 1024, 1025]],
    ids=lambda lengths: f"{len(lengths)} rows",
)
def test_new_rows(lengths: list[int]) -> None:
    torch.manual_seed(0)
    begin = torch.tensor([0, *lengths], device=CUDA).cumsum(0).int()
    written = torch.randint(99, (300, 4097), dtype=torch.int32, device=CUDA)
    ids, row = (
        torch.randint(2**31 - 1, (sum(lengths),), dtype=torch.int32, device=CUDA),
        torch.randperm(300, device=CUDA)[: len(lengths)],
    )
    wanted = written.clone()
    write_rows(wanted, ids, row, begin, max(lengths))
    chosen("write_rows", dtype=torch.int32)(written, ids, row, begin, max(lengths))
    assert torch.equal(written, wanted)
