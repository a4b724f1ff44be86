"""The sampling twins: published Philox vectors, sampled frequencies, filters and penalties against plain
re-statements."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.build.c_compiler import native_library
from headrace.kernels.candidate import Declined
from headrace.kernels.sampling.reference import (
    apply_penalties,
    best_tokens,
    gumbel_argmax,
    keep_thresholds,
    philox4x32,
    pick_tokens,
    score_tokens,
    token_noise,
    vocabulary_noise,
)
from tests.support.kernel_cases import called


def _words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(_words(*counter), _words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def test_noise_of_the_vocabulary_is_the_noise_of_its_tokens() -> None:
    seeds = torch.tensor([0, -1, 2**62 + 12345])
    positions = torch.tensor([0, 7, 100_000])
    whole = vocabulary_noise(seeds, positions, 1001)
    for row in range(3):
        single = token_noise(
            seeds[row].expand(1001).contiguous(), positions[row].expand(1001).contiguous(), torch.arange(1001)
        )
        assert torch.equal(whole[row], single)
    assert torch.equal(whole[1:2], vocabulary_noise(seeds[1:2], positions[1:2], 1001))
    assert not torch.equal(whole[0], vocabulary_noise(seeds[:1], positions[:1] + 1, 1001)[0])


def test_noise_is_gumbel_distributed() -> None:
    noise = vocabulary_noise(torch.arange(8), torch.zeros(8, dtype=torch.int64), 16_000).double()
    for level in (-1.0, 0.0, 1.0, 3.0, 6.0):
        share, expected = float((noise < level).double().mean()), math.exp(-math.exp(-level))
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / noise.numel())


def _filters(rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    return torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)


def _draw(
    logits: Tensor,
    temperature: float,
    filters: tuple[Tensor, Tensor, Tensor] | None,
    first_position: int = 0,
    argmax: Callable[..., Tensor] = gumbel_argmax,
) -> Tensor:
    rows = len(logits)
    seeds, positions = torch.full((rows,), 1234567891011), torch.arange(first_position, first_position + rows)
    return pick_tokens(logits, logits.amax(-1), torch.full((rows,), temperature), filters, seeds, positions, argmax)


NATIVE = native_library()
needs_native = pytest.mark.skipif(isinstance(NATIVE, Declined), reason="no C compiler here")


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("vocab_size", [1, 15, 64, 257, 1000, 20_000])
def test_the_native_pick_equals_its_twin(vocab_size: int, threads: int) -> None:
    """Logarithms may differ in the last bit, so a draw may differ where two sums are closer than that: none of these
    is."""
    native = Kernels(torch.device("cpu"), strict=True).choose(*called("gumbel_argmax", dtype=torch.float32))
    generator, before = torch.Generator().manual_seed(vocab_size), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for spread in (0.0, 1.0, 6.0):
            scores = torch.randn(40, vocab_size, generator=generator) * spread
            seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
            positions = torch.randint(0, 2**20, (40,), generator=generator)
            for thresholds in (None, scores.amax(-1) - spread, torch.full((40,), float("-inf"))):
                for rows in (slice(0, 40), slice(5, 6)):
                    cut = None if thresholds is None else thresholds[rows]
                    expected = gumbel_argmax(scores[rows], cut, seeds[rows], positions[rows])
                    assert torch.equal(native(scores[rows], cut, seeds[rows], positions[rows]), expected)
    finally:
        torch.set_num_threads(before)


@needs_native
def test_the_native_pick_survives_rows_that_keep_nothing() -> None:
    native = Kernels(torch.device("cpu")).choose(*called("gumbel_argmax", dtype=torch.float32))
    scores = torch.full((3, 300), float("nan"))
    scores[1] = float("-inf")
    scores[2] = torch.arange(300.0)
    picked = native(scores, None, torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert picked[:2].tolist() == [0, 0] and int(picked[2]) > 250


@pytest.mark.parametrize("op", ["twin", "chosen"])
@pytest.mark.parametrize("filtered", [False, True])
def test_frequencies_follow_the_probabilities(filtered: bool, op: str) -> None:
    """Pearson's chi-square over 20,000 draws; 99.99 % point of 11 degrees of freedom is 38.9."""
    draws = 20_000
    logits = torch.linspace(-2, 1.3, 12)
    probabilities = (logits / 0.7).softmax(-1)
    argmax = (
        gumbel_argmax
        if op == "twin"
        else Kernels(torch.device("cpu")).choose(*called("gumbel_argmax", dtype=torch.float32))
    )
    picked = _draw(
        logits.expand(draws, 12).contiguous(), 0.7, _filters(draws, top_k=12) if filtered else None, argmax=argmax
    )
    counts = picked.bincount(minlength=12)
    chi_square = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    assert chi_square < 38.9


def _kept_plainly(scores: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, one token at a time: best first, ties together."""
    probabilities = scores.double().softmax(-1).tolist()
    best = max(probabilities)
    order = sorted(
        (t for t in range(len(probabilities)) if probabilities[t] >= min_p * best), key=lambda t: -probabilities[t]
    )
    if top_k > 0:
        order = [t for t in order if probabilities[t] >= probabilities[order[min(top_k, len(order)) - 1]]]
    total, before, kept = sum(probabilities[t] for t in order), 0.0, []
    for token in order:
        if before >= top_p * total and probabilities[token] < probabilities[kept[-1]]:
            break
        kept.append(token)
        before += probabilities[token]
    return set(kept)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.9, 0.0), (50, 1.0, 0.0), (50, 0.7, 0.0), (3000, 0.999, 0.0), (0, 1.0, 0.3), (20, 0.8, 0.05), (1, 1.0, 0.0)],
)
def test_kept_tokens_are_those_of_the_definition(spread: float, top_k: int, top_p: float, min_p: float) -> None:
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(3)) * spread
    scores[1] = (scores[1] * 4).round() / 4  # many ties
    scores -= scores.amax(-1, keepdim=True)
    thresholds = keep_thresholds(scores, *_filters(2, top_k, top_p, min_p))
    for row in range(2):
        kept = set((scores[row] >= thresholds[row]).nonzero()[:, 0].tolist())
        assert kept == _kept_plainly(scores[row], top_k, top_p, min_p)


@pytest.mark.parametrize("spread", [0.3, 5.0])
def test_picking_among_the_kept_equals_masking_the_rest(spread: float) -> None:
    """The laid-out pick, the dense pick and each row alone agree: noise belongs to the token, not to its place."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(5)) * spread
    filters = (
        torch.tensor([0, 40, 0, 5, 2900, 0]),
        torch.tensor([0.9, 1.0, 1.0, 0.5, 0.99, 1.0]),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.0]),
    )
    picked = _draw(logits, 0.8, filters)
    scores = (logits - logits.amax(-1, keepdim=True)) / 0.8
    masked = scores.masked_fill(scores < keep_thresholds(scores, *filters)[:, None], float("-inf"))
    noise = vocabulary_noise(torch.full((6,), 1234567891011), torch.arange(6), 3000)
    assert torch.equal(picked, (masked + noise).argmax(-1))
    for row in range(6):
        alone = _draw(logits[row : row + 1], 0.8, tuple(f[row : row + 1] for f in filters), first_position=row)  # type: ignore[arg-type]
        assert int(alone) == int(picked[row])


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(_draw(logits, 1e-30, None), logits.argmax(-1))


def test_penalties_follow_their_formula() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5], [1.0, -1.0, 2.0, 0.5]])
    ids = torch.tensor([[0, 1, 2, 2]])  # prompt 0, output 1 2 2
    counts = torch.tensor([[0.0, 1.0, 2.0, 2.0]])
    apply_penalties(
        logits, torch.tensor([1]), ids, counts, torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([2.0])
    )
    assert logits[0].tolist() == [1.0, -1.0, 2.0, 0.5]
    assert logits[1].tolist() == pytest.approx([0.5, -2.0 - 0.75, 1.0 - 1.0, 0.5])


def test_scores_are_log_softmax_and_ranks() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ids, logprobs, rank = score_tokens(logits, torch.tensor([2]), 2)
    assert ids.tolist() == [[2, 1, 3]] and rank.tolist() == [3]
    assert torch.allclose(logprobs[0], logits.log_softmax(-1)[0, [2, 1, 3]])


@pytest.mark.parametrize("vocab", [7, 3000])
def test_of_equal_logits_the_lower_id_comes_first_however_many_are_asked_for(vocab: int) -> None:
    """Logits of bfloat16 are often equal; an answer must not show how many its neighbours asked for."""
    logits = (torch.randn(40, vocab) * 2).round() / 2
    logits[3, ::2], logits[4], logits[5] = float("-inf"), 0.0, -0.0
    wanted = torch.sort(logits, dim=-1, descending=True, stable=True)
    for count in (0, 1, 5, 7):
        best, ids = best_tokens(logits, count)
        assert torch.equal(best, wanted.values[:, :count]) and torch.equal(ids, wanted.indices[:, :count])
