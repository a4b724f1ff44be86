"""Picking tokens in Triton against its torch twins, in the interpreter."""

from __future__ import annotations

import pytest
import torch

import tests.support.triton_interpreter
from headrace.kernels.sampling import reference as twin
from headrace.kernels.sampling import triton_pick as sampling
from headrace.kernels.sampling import triton_thresholds as thresholds

triton, tl = tests.support.triton_interpreter.triton, tests.support.triton_interpreter.tl


def logits_of(rows: int, vocab: int, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread


@triton.jit
def _noise_kernel(words_ptr, noise_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(noise_ptr + at, sampling._gumbel(tl.load(words_ptr + at).to(tl.uint32)))


def test_noise_is_the_twins() -> None:
    some = torch.randint(0, 2**32, (4089,), generator=torch.Generator().manual_seed(3))
    words = torch.cat((torch.tensor([0, 1, 2, 2**32 - 1, 2**31, 2**24, 2**25]), some))
    got = torch.empty(4096)
    _noise_kernel[(1,)](words, got, BLOCK=4096)
    uniform = ((words.double() + 0.5) * 2.0**-32).float().clamp(max=1 - 2.0**-24).double()
    want = -torch.log(-torch.log1p(-uniform))
    assert float(((got.double() - want).abs() / want.abs().clamp(min=1.0)).max()) < 5e-7
    assert got.argmax() == 0  # the smallest word is the largest noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_best_and_shows_nan(dtype: torch.dtype) -> None:
    logits = logits_of(4, 3000).to(dtype)
    logits[1, [7, 2900]] = 99.0
    logits[2, 1500] = float("nan")
    peak, tokens = sampling.greedy_tokens(logits)
    want_peak, want = twin.greedy_tokens(logits.float())
    assert peak.dtype == torch.float32
    torch.testing.assert_close(peak, want_peak, equal_nan=True, rtol=0, atol=0)
    assert tokens[1] == 7 and peak[2].isnan()
    assert torch.equal(tokens[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("vocab", [50, 256, 1100])
@pytest.mark.parametrize("filtered", [False, True])
def test_the_pick_is_the_twins(vocab: int, filtered: bool) -> None:
    scores, seeds, positions = logits_of(4, vocab), torch.arange(4) * 0x123456789AB - 5, torch.arange(4) + 2**20
    kept = torch.full((4,), 0.5) if filtered else None
    got = sampling.gumbel_argmax(scores, kept, seeds, positions)
    assert torch.equal(got, twin.gumbel_argmax(scores, kept, seeds, positions))


FILTERS = {
    "top-k": (40, 1.0, 0.0),
    "top-1": (1, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "min-p": (0, 1.0, 0.05),
    "all": (40, 0.7, 0.01),
    "many": (580, 0.99, 0.0),
    "off": (0, 1.0, 0.0),
    "no mass": (0, 0.0, 0.0),
}


@pytest.mark.parametrize(("name", "spread"), [*((name, 6.0) for name in FILTERS), ("top-p", 0.05), ("many", 0.05)])
@pytest.mark.parametrize("depth", [1, 32])
def test_thresholds_keep_what_the_twins_keep(
    name: str, spread: float, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "_DEPTH", depth)  # 1: most rows have too many
    logits = logits_of(3, 600, spread)
    logits[1, 5:25] = logits[1].amax()  # ties at the top
    logits[2, 100:450] = float("-inf")
    peak, heat = logits.amax(-1), torch.tensor([1.0, 0.7, 1.3])
    scores = (logits - peak[:, None]) / heat[:, None]
    top_k, top_p, min_p = FILTERS[name]
    filters = (torch.full((3,), top_k), torch.full((3,), top_p), torch.full((3,), min_p))
    want = twin.keep_thresholds(scores, *filters)
    got = thresholds.keep_thresholds(logits, *filters, scale=(peak, heat))
    different = (scores >= got[:, None]) != (scores >= want[:, None])
    # top-p: the twin sums in float32, so that a token at the very edge may fall on either side
    assert int(different.sum(-1).max()) <= (2 if 0 < top_p < 1 else 0)
    if name == "all":
        assert torch.equal(thresholds.keep_thresholds(scores, *filters), got)


def test_odd_rows_keep_what_the_twins_keep() -> None:
    """Fewer tokens than top-k asks for; equal scores; one far ahead; a long tail that a sample sees nothing of."""
    logits = torch.full((5, 900), float("-inf"))
    logits[0, [3, 500, 899]] = torch.tensor([1.0, 2.0, 0.5])
    logits[1] = 4.0
    logits[2], logits[2, 77] = logits_of(1, 900)[0] - 500.0, 0.0
    logits[3] = -torch.arange(900.0) / 8
    logits[4], logits[4, :600] = -30.0, -2.0
    filters = (torch.tensor([50, 7, 100, 0, 650]), torch.tensor([1.0, 0.5, 0.999, 0.99, 0.9]), torch.zeros(5))
    scores = logits - logits.amax(-1, keepdim=True)
    got, want = thresholds.keep_thresholds(scores, *filters), twin.keep_thresholds(scores, *filters)
    assert torch.equal(scores >= got[:, None], scores >= want[:, None])


def test_picks_from_logits_are_the_twins() -> None:
    logits = logits_of(6, 700)
    filters = (
        torch.tensor([0, 40, 0, 5, 680, 0]),
        torch.tensor([0.9, 1.0, 1.0, 0.5, 0.99, 1.0]),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0]),
    )
    arguments = (logits, logits.amax(-1), torch.tensor([0.8, 1.0, 0.5, 2.0, 1.0, 1e-30]))
    for chosen in (filters, None):
        got = sampling.pick_tokens(*arguments, chosen, torch.arange(6) * 977, torch.arange(6))
        assert torch.equal(
            got, twin.pick_tokens(*arguments, chosen, torch.arange(6) * 977, torch.arange(6), twin.gumbel_argmax)
        )


@pytest.mark.parametrize("num_best", [0, 3])
def test_scores_are_the_twins(num_best: int) -> None:
    logits = logits_of(5, 5000)
    logits[0, 9] = float("-inf")
    chosen = torch.tensor([3, 0, 4999, 17, 256])
    got, want = sampling.score_tokens(logits, chosen, num_best), twin.score_tokens(logits, chosen, num_best)
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-6)
