# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The lowest score that top-k, top-p and min-p keep, by search instead of a sort.

What lives here: the search. What may not: noise, picking (triton_pick.py).

Scores are 0 or less, so the bits of −score order them: bit 0 … 2³¹ counted from the best. A search over those bits ends
at the exact score of the last token kept. Probability mass is summed in integers (2⁻⁴⁰), so that no order of summation
shows, here or in another batch.

1. A strided sample of the row says near which limits the answer may lie: what is asked for, less and more by the
  sample's own error, and
   a few thousand tokens, for where so few hold everything that a sample hardly meets them.
2. One pass: what each limit reaches in truth. The answer lies in ``first`` … ``high``, where the sample tells how many
  tokens there are;
   while they are too many, further passes try limits that cut them into four.
3. One pass gathers them, each column's in a stack of its own; among them the answer is searched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.build.launch import launchable

_DEPTH = 32  # scores a column's stack takes
_COLUMNS = 1024
_STAGES = tl.constexpr(3)  # loads of a pass on their way
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
    """Bits of the scores at ``at``; beyond ``count`` worse than the worst."""
    x = tl.load(source_ptr + at, mask=at < count, other=float("-inf")).to(tl.float32)
    if HAS_SCALE:
        x = scaled(x, peak, heat)
    return tl.where(at < count, _bits(x), _WORST + 1)


@triton.jit
def _limits(x, amount, ranks, targets, best, worst):
    """Limits in best … worst (float32) at which a sample's ``amount`` reaches each of four targets; the last target
    counts ``ranks``."""
    low, high = targets * 0.0 + best, targets * 0.0 + worst
    counted = (tl.arange(0, 4) == 3)[:, None]
    for _ in range(12):
        middle = 0.5 * (low + high)
        each = tl.where(counted, ranks[None, :], amount[None, :])
        reached = tl.sum(tl.where(x[None, :] <= middle[:, None], each, 0.0), 1) >= targets
        low, high = tl.where(reached, low, middle), tl.where(reached, middle, high)
    limits = high.to(tl.int32, bitcast=True)
    return _one(limits, 0), _one(limits, 1), _one(limits, 2), _one(limits, 3)


@triton.jit
def _one(values, index: tl.constexpr):
    """One of four."""
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0), 0)


@triton.jit
def _guessed(sample, share, high, few, by_mass):
    """Limits that reach ``share`` of a sample (of its mass up to ``high``, or its number) less four times its error, as
    is, more; ``few`` scores."""
    x = tl.where(sample <= high, sample, 0).to(tl.float32, bitcast=True)
    ranks = tl.where(sample <= high, 1.0, 0.0)
    amount = tl.where(by_mass, tl.exp(-x) * ranks, ranks)
    total = tl.maximum(tl.sum(amount, 0), 1e-30)
    error = tl.sqrt(share * tl.maximum(1.0 - share, 0.0) * tl.sum(amount * amount, 0)) / total
    lane = tl.arange(0, 4)
    targets = tl.where(lane == 3, few, (share + error * (lane - 1).to(tl.float32) * 4.0) * total)
    a, b, c, d = _limits(x, amount, ranks, targets, 0.0, tl.max(x, 0))
    return tl.minimum(a, high), tl.minimum(b, high), tl.minimum(c, high), tl.minimum(d, high)


@triton.jit
def _cuts(sample, first, high):
    """Three limits from ``first`` to below ``high`` that cut the sample's scores there into four."""
    inside = (sample >= first) & (sample <= high)
    x = tl.where(inside, sample, 0).to(tl.float32, bitcast=True)
    ranks = tl.where(inside, 1.0, 0.0)
    targets = (tl.arange(0, 4) + 1).to(tl.float32) * 0.25 * tl.sum(ranks, 0)
    a, b, c, _ = _limits(
        x, ranks, ranks, targets, first.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    )
    return tl.minimum(a, high - 1), tl.minimum(b, high - 1), tl.minimum(c, high - 1)


@triton.jit
def _amount(bits, by_mass):
    """What a score counts for: its mass, or 1."""
    amount = tl.full(bits.shape, 1, tl.int64)
    if by_mass:
        amount = _mass(bits)
    return amount


@triton.jit
def _surveyed(source_ptr, count, peak, heat, a, b, c, d, e, by_mass, HAS_SCALE: tl.constexpr, COLUMNS: tl.constexpr):
    """How many scores are at least as good as each limit, or their mass. int64 each."""
    lane = tl.arange(0, COLUMNS)
    to_a, to_b, to_c = tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64)
    to_d, to_e = tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64)
    for begin in tl.range(0, count, COLUMNS, num_stages=_STAGES):
        bits = _read(source_ptr, begin + lane, count, peak, heat, HAS_SCALE)
        amount = _amount(bits, by_mass)
        to_a += tl.where(bits <= a, amount, 0)
        to_b += tl.where(bits <= b, amount, 0)
        to_c += tl.where(bits <= c, amount, 0)
        to_d += tl.where(bits <= d, amount, 0)
        to_e += tl.where(bits <= e, amount, 0)
    return tl.sum(to_a, 0), tl.sum(to_b, 0), tl.sum(to_c, 0), tl.sum(to_d, 0), tl.sum(to_e, 0)


@triton.jit
def _reached(source_ptr, count, peak, heat, a, b, c, by_mass, HAS_SCALE: tl.constexpr, COLUMNS: tl.constexpr):
    """As ``_surveyed``, for three limits."""
    lane = tl.arange(0, COLUMNS)
    to_a, to_b, to_c = tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64)
    for begin in tl.range(0, count, COLUMNS, num_stages=_STAGES):
        bits = _read(source_ptr, begin + lane, count, peak, heat, HAS_SCALE)
        amount = _amount(bits, by_mass)
        to_a += tl.where(bits <= a, amount, 0)
        to_b += tl.where(bits <= b, amount, 0)
        to_c += tl.where(bits <= c, amount, 0)
    return tl.sum(to_a, 0), tl.sum(to_b, 0), tl.sum(to_c, 0)


@triton.jit
def _reached_among(stacks_ptr, heights, deepest, a, b, c, by_mass, COLUMNS: tl.constexpr):
    """As ``_reached``, among the scores gathered."""
    lane = tl.arange(0, COLUMNS)
    to_a, to_b, to_c = tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64), tl.zeros((COLUMNS,), tl.int64)
    for depth in range(0, deepest):
        bits = tl.load(stacks_ptr + depth * COLUMNS + lane, mask=depth < heights, other=_WORST + 1)
        amount = _amount(bits, by_mass)
        to_a += tl.where(bits <= a, amount, 0)
        to_b += tl.where(bits <= b, amount, 0)
        to_c += tl.where(bits <= c, amount, 0)
    return tl.sum(to_a, 0), tl.sum(to_b, 0), tl.sum(to_c, 0)


@triton.jit
def _quarters(first, high):
    """Three limits that cut first … high into four."""
    step = (high - first) // 4
    return first + step, first + 2 * step, first + 3 * step


@triton.jit
def _tried(first, base, high, want, limit, reached):
    """(first, base, high) once it is known what a limit reaches: the answer lies in first … high, what is better than
    ``first`` reaches ``base``."""
    short = reached < want
    base = tl.where(short & (limit >= first), reached, base)
    first = tl.where(short, tl.maximum(first, limit + 1), first)
    return first, base, tl.where(short, high, tl.minimum(high, limit))


@triton.jit
def _narrowed(first, base, high, want, a, b, c, to_a, to_b, to_c):
    first, base, high = _tried(first, base, high, want, a, to_a)
    first, base, high = _tried(first, base, high, want, b, to_b)
    return _tried(first, base, high, want, c, to_c)


@triton.jit
def _gathered(
    source_ptr,
    stacks_ptr,
    count,
    peak,
    heat,
    first,
    high,
    HAS_SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Puts the scores in first … high on their columns' stacks: how high each is. What is above DEPTH was not put."""
    lane = tl.arange(0, COLUMNS)
    heights = tl.zeros((COLUMNS,), tl.int32)
    for begin in tl.range(0, count, COLUMNS, num_stages=_STAGES):
        bits = _read(source_ptr, begin + lane, count, peak, heat, HAS_SCALE)
        inside = (bits >= first) & (bits <= high)
        tl.store(stacks_ptr + heights * COLUMNS + lane, bits, mask=inside & (heights < DEPTH))
        heights += inside.to(tl.int32)
    return heights


@triton.jit
def _search_among(stacks_ptr, heights, deepest, want, first, high, by_mass, COLUMNS: tl.constexpr):
    """The best limit in first … high at which the scores gathered reach ``want``; ``high`` if none does."""
    while first < high:
        a, b, c = _quarters(first, high)
        to_a, to_b, to_c = _reached_among(stacks_ptr, heights, deepest, a, b, c, by_mass, COLUMNS)
        first, _, high = _narrowed(first, want, high, want, a, b, c, to_a, to_b, to_c)
    return high


@triton.jit
def _search(source_ptr, count, peak, heat, want, high, by_mass, HAS_SCALE: tl.constexpr, COLUMNS: tl.constexpr):
    """As ``_search_among``, in the row itself."""
    first = high * 0
    while first < high:
        a, b, c = _quarters(first, high)
        to_a, to_b, to_c = _reached(source_ptr, count, peak, heat, a, b, c, by_mass, HAS_SCALE, COLUMNS)
        first, _, high = _narrowed(first, want, high, want, a, b, c, to_a, to_b, to_c)
    return high


@triton.jit
def _part(top_p, mass):
    """The mass that top-p asks for; at least one unit, so that the best token stays."""
    return tl.maximum((top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@launchable(
    do_not_specialize_on_alignment=["peak_ptr", "heat_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"]
)  # one word a row is read
def _threshold_kernel(
    scores_ptr, peak_ptr, heat_ptr, top_k_ptr, top_p_ptr, min_p_ptr, stacks_ptr, threshold_ptr, row_stride, vocab,
    HAS_SCALE: tl.constexpr, SAMPLE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    peak, heat = 0.0, 1.0
    if HAS_SCALE:
        peak, heat = tl.load(peak_ptr + row), tl.load(heat_ptr + row)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    by_rank, by_mass = (top_k > 0) & (top_k < vocab), top_p < 1.0
    worst = _bits(tl.log(min_p)) if min_p > 0.0 else _WORST  # min-p's own bound
    limit = worst
    if by_rank | by_mass:  # top-k first, then top-p's share of what that left
        source, stacks = scores_ptr + row * row_stride, stacks_ptr + row * (COLUMNS * DEPTH)
        # scores that the stacks take for all that some columns have more of them
        ROOM: tl.constexpr = COLUMNS * DEPTH // 3
        stride = tl.maximum(vocab // SAMPLE, 1)
        sample = _read(source, tl.arange(0, SAMPLE) * stride, vocab, peak, heat, HAS_SCALE)
        finite = tl.minimum(worst, _WORST - 1)
        share = tl.where(by_rank, top_k.to(tl.float32) / vocab, top_p)
        a, b, c, d = _guessed(sample, share, finite, SAMPLE / stride, not by_rank)
        to_a, to_b, to_c, to_d, total = _surveyed(
            source, vocab, peak, heat, a, b, c, d, finite, not by_rank, HAS_SCALE, COLUMNS
        )
        want = tl.where(by_rank, top_k, _part(top_p, total))
        first, base, high = _narrowed(worst * 0, total * 0, finite, want, a, b, c, to_a, to_b, to_c)
        first, base, high = _tried(first, base, high, want, d, to_d)
        if total < want:  # top-k of fewer
            first, high = worst, worst
        if by_rank & by_mass & (tl.sum((sample <= high).to(tl.int32), 0) * stride <= ROOM):
            first, base = first * 0, base * 0  # top-p will ask for all that top-k leaves
        heights = tl.full((COLUMNS,), DEPTH + 1, tl.int32)
        deepest = DEPTH + 1
        while (deepest > DEPTH) & (first < high):
            if tl.sum(((sample >= first) & (sample <= high)).to(tl.int32), 0) * stride > ROOM:
                a, b, c = _cuts(sample, first, high)
                to_a, to_b, to_c = _reached(source, vocab, peak, heat, a, b, c, not by_rank, HAS_SCALE, COLUMNS)
                first, base, high = _narrowed(first, base, high, want, a, b, c, to_a, to_b, to_c)
            else:
                heights = _gathered(source, stacks, vocab, peak, heat, first, high, HAS_SCALE, COLUMNS, DEPTH)
                tl.debug_barrier()
                deepest = tl.max(heights, 0)
                if deepest > DEPTH:  # unlike the sample
                    a, b, c = _quarters(first, high)
                    to_a, to_b, to_c = _reached(source, vocab, peak, heat, a, b, c, not by_rank, HAS_SCALE, COLUMNS)
                    first, base, high = _narrowed(first, base, high, want, a, b, c, to_a, to_b, to_c)
        whole = (first == 0) & (deepest <= DEPTH)  # all that is as good as the answer was gathered
        limit = _search_among(stacks, heights, deepest, want - base, first, high, not by_rank, COLUMNS)
        if by_rank & by_mass:
            if whole:
                left, _, _ = _reached_among(stacks, heights, deepest, limit, limit, limit, True, COLUMNS)
                limit = _search_among(stacks, heights, deepest, _part(top_p, left), limit * 0, limit, True, COLUMNS)
            else:
                left, _, _ = _reached(source, vocab, peak, heat, limit, limit, limit, True, HAS_SCALE, COLUMNS)
                limit = _search(source, vocab, peak, heat, _part(top_p, left), limit, True, HAS_SCALE, COLUMNS)
    tl.store(threshold_ptr + row, tl.where(limit >= _WORST, float("-inf"), -limit.to(tl.float32, bitcast=True)))


def keep_thresholds(
    scores: Tensor,  # [rows, vocab], float32
    top_k: Tensor,  # [rows], int64; 0 or less = off
    top_p: Tensor,  # [rows], float32; 1 = off
    min_p: Tensor,  # [rows], float32; 0 = off
    *,
    scale: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The lowest score each row keeps, [rows] float32: min-p, then top-k, then top-p over what those left, ties with
    the last one kept.

    ``scores`` are at most 0, the best of each row 0; with ``scale`` (peak [rows], temperature [rows]) they are logits,
    and the score is (logit − peak) / temperature. A search over the bits of the score, as in RadixSelect (Alabi et al.
    2012); no sort.
    """
    rows, vocab = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    threshold = torch.empty(rows, dtype=torch.float32, device=scores.device)
    if rows == 0:
        return threshold
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(vocab) // 4))
    stacks = torch.empty((rows, _DEPTH, columns), dtype=torch.int32, device=scores.device)
    peak, heat = (threshold, threshold) if scale is None else (scale[0].contiguous(), scale[1].contiguous())
    _threshold_kernel[(rows,)](
        scores, peak, heat, top_k.contiguous(), top_p.contiguous(), min_p.contiguous(), stacks, threshold, scores.stride(0), vocab,
        HAS_SCALE=scale is not None, SAMPLE=2 * columns, COLUMNS=columns, DEPTH=_DEPTH, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return threshold
