# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The lowest score that top-k, top-p and min-p keep, by search instead of a sort.

What lives here: the search. What may not: noise, picking (sampling.py).

Scores are 0 or less, so the bits of −score order them: bit 0 … 2³¹ counted from the best. A search over those bits ends at the exact score of
the last token kept. Probability mass is summed in integers (2⁻⁴⁰), so that no order of summation shows, here or in another batch.

1. One pass: the best score of each of COLUMNS strided columns, and the row's mass. The k-th of these, or as many as hold the mass p,
   bound the answer: what they reach, the row reaches too.
2. One pass gathers the scores within that bound.
3. The answer is searched among them, bit by bit; where they are too many, in the row itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_CANDIDATES = 8192  # room for them, a row
_COLUMNS = 2048
_WORST = tl.constexpr(0x7F800000)  # the bits of infinity: −score of a token that was ruled out
_UNIT = tl.constexpr(1099511627776.0)  # 2⁴⁰


@triton.jit
def scaled(x, peak, heat):
    """(x − peak) / heat, rounded as IEEE has it, so that every kernel sees the same score."""
    return tl.div_rn(x - peak, heat)


@triton.jit
def _bits(score):
    """The order of scores as integers, best first; NaN and what is above 0 count as the best and are not expected."""
    return tl.maximum(-score, 0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass(bits):
    """exp(score) in units of 2⁻⁴⁰, int64."""
    return (tl.exp(-bits.to(tl.float32, bitcast=True)) * _UNIT).to(tl.int64)


@triton.jit
def _read(source_ptr, at, count, peak, heat, HAS_SCALE: tl.constexpr):
    """Bits of the scores at ``at``; beyond ``count`` the worst."""
    x = tl.load(source_ptr + at, mask=at < count, other=float("-inf")).to(tl.float32)
    if HAS_SCALE:
        x = scaled(x, peak, heat)
    return tl.where(at < count, _bits(x), _WORST)


@triton.jit
def _reached(source_ptr, count, peak, heat, a, b, c, BY_MASS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the scores are at least as good as the limits a ≤ b ≤ c, or their mass. int64 each."""
    lane = tl.arange(0, BLOCK)
    to_a, to_b, to_c = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, count, BLOCK):
        bits = _read(source_ptr, begin + lane, count, peak, heat, HAS_SCALE)
        amount = tl.where(begin + lane < count, _mass(bits) if BY_MASS else tl.full((BLOCK,), 1, tl.int64), 0)
        to_a += tl.where(bits <= a, amount, 0)
        to_b += tl.where(bits <= b, amount, 0)
        to_c += tl.where(bits <= c, amount, 0)
    return tl.sum(to_a, 0), tl.sum(to_b, 0), tl.sum(to_c, 0)


@triton.jit
def _search(source_ptr, count, peak, heat, want, high, BY_MASS: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """The best limit in 0 … high at which count or mass reach ``want``; ``high`` if none does."""
    low = high * 0
    while low < high:  # three limits a pass: a quarter of the range is left
        step = (high - low) // 4
        a, b, c = low + step, low + 2 * step, low + 3 * step
        to_a, to_b, to_c = _reached(source_ptr, count, peak, heat, a, b, c, BY_MASS, HAS_SCALE, BLOCK)
        low = tl.where(to_a >= want, low, tl.where(to_b >= want, a + 1, tl.where(to_c >= want, b + 1, c + 1)))
        high = tl.where(to_a >= want, a, tl.where(to_b >= want, b, tl.where(to_c >= want, c, high)))
    return high


@triton.jit
def _bound(columns, want, BY_MASS: tl.constexpr):
    """As ``_search`` among the columns' best, in registers: what they reach, the row reaches too. The worst if they do not."""
    low = tl.min(columns, 0) * 0
    high = low + _WORST
    while low < high:
        middle = low + (high - low) // 2
        inside = columns <= middle
        reached = tl.sum(tl.where(inside, _mass(columns), 0), 0) if BY_MASS else tl.sum(inside.to(tl.int64), 0)
        high = tl.where(reached >= want, middle, high)
        low = tl.where(reached >= want, low, middle + 1)
    return high


@triton.jit
def _threshold_kernel(
    scores_ptr, peak_ptr, heat_ptr, top_k_ptr, top_p_ptr, min_p_ptr, candidates_ptr, counters_ptr, threshold_ptr, row_stride, vocab,
    HAS_SCALE: tl.constexpr, CANDIDATES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
    peak, heat = 0.0, 1.0
    if HAS_SCALE:
        peak, heat = tl.load(peak_ptr + row), tl.load(heat_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    by_rank, by_mass = (top_k > 0) & (top_k < vocab), top_p < 1.0
    worst = _bits(tl.log(min_p)) if min_p > 0.0 else _WORST  # min-p's own bound
    limit = worst
    if by_rank | by_mass:
        source = scores_ptr + row * row_stride
        lane = tl.arange(0, COLUMNS)
        columns = tl.full((COLUMNS,), _WORST, tl.int32)
        mass = tl.zeros((COLUMNS,), tl.int64)
        for begin in range(0, vocab, COLUMNS):
            bits = _read(source, begin + lane, vocab, peak, heat, HAS_SCALE)
            columns = tl.minimum(columns, bits)
            mass += tl.where(bits <= worst, _mass(bits), 0)
        # With both, top-p's share is one of what top-k leaves: all of that must be among the candidates.
        bound = _bound(columns, top_k, False) if by_rank else _bound(columns, _part(top_p, tl.sum(mass, 0)), True)
        bound = tl.minimum(bound, worst)
        found = candidates_ptr + row * CANDIDATES
        if bound < _WORST:
            for begin in range(0, vocab, COLUMNS):
                bits = _read(source, begin + lane, vocab, peak, heat, HAS_SCALE)
                inside = (bits <= bound) & (begin + lane < vocab)
                at = tl.atomic_add(counters_ptr + row + lane * 0, 1, mask=inside, sem="relaxed")
                tl.store(found + at, -bits.to(tl.float32, bitcast=True), mask=inside & (at < CANDIDATES))
            tl.debug_barrier()
        count = tl.atomic_add(counters_ptr + row, 0)
        if (bound < _WORST) & (count <= CANDIDATES):
            limit = _limit(found, count, 0.0, 1.0, top_k, top_p, by_rank, by_mass, worst, bound, tl.sum(mass, 0), False, 1024)
        else:
            limit = _limit(source, vocab, peak, heat, top_k, top_p, by_rank, by_mass, worst, bound, tl.sum(mass, 0), HAS_SCALE, COLUMNS)
    tl.store(threshold_ptr + row, tl.where(limit >= _WORST, float("-inf"), -limit.to(tl.float32, bitcast=True)))
    if PDL:
        gdc_launch_dependents()


@triton.jit
def _part(top_p, mass):
    """The mass that top-p asks for; at least one unit, so that the best token stays."""
    return tl.maximum((top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _limit(
    source, count, peak, heat, top_k, top_p, by_rank, by_mass, worst, bound, mass, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """min-p, then top-k, then top-p over what those two left."""
    limit = worst
    if by_rank:
        limit = tl.minimum(limit, _search(source, count, peak, heat, top_k, bound, False, HAS_SCALE, BLOCK))
    if by_mass:
        left = mass
        if by_rank:
            left, _, _ = _reached(source, count, peak, heat, limit, limit, limit, True, HAS_SCALE, BLOCK)
        limit = _search(source, count, peak, heat, _part(top_p, left), tl.minimum(limit, bound), True, HAS_SCALE, BLOCK)
    return limit


def keep_thresholds(
    scores: Tensor,  # [rows, vocab], float32
    top_k: Tensor,  # [rows], int64; 0 or less = off
    top_p: Tensor,  # [rows], float32; 1 = off
    min_p: Tensor,  # [rows], float32; 0 = off
    *,
    scale: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The lowest score each row keeps, [rows] float32: min-p, then top-k, then top-p over what those left, ties with the last one kept.

    ``scores`` are at most 0, the best of each row 0; with ``scale`` (peak [rows], temperature [rows]) they are logits, and the score is
    (logit − peak) / temperature. A search over the bits of the score, as in RadixSelect (Alabi et al. 2012); no sort.
    """
    rows, vocab = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    threshold = torch.empty(rows, dtype=torch.float32, device=scores.device)
    if rows == 0:
        return threshold
    candidates = torch.empty((rows, _CANDIDATES), dtype=torch.float32, device=scores.device)
    counters = torch.zeros(rows, dtype=torch.int32, device=scores.device)
    peak, heat = (threshold, threshold) if scale is None else (scale[0].contiguous(), scale[1].contiguous())
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(vocab) // 4))
    _threshold_kernel[(rows,)](
        scores, peak, heat, top_k.contiguous(), top_p.contiguous(), min_p.contiguous(), candidates, counters, threshold, scores.stride(0), vocab,
        HAS_SCALE=scale is not None, CANDIDATES=_CANDIDATES, COLUMNS=columns, PDL=False, num_warps=8,
    )  # fmt: skip
    return threshold
