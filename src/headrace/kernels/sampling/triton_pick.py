# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Picking tokens on the device: greedy, the Gumbel-max pick, logprobs of chosen tokens. Thresholds are in
triton_thresholds.py.

What lives here: kernels over rows of logits and their functions. What may not: row state, penalties, anything about
requests.

A row is cut into parts, one a program, so that few rows still use the whole device; a second launch takes the best of
the parts. Nothing here depends on other rows, and of equal values the lower token wins, so a pick is the same in any
batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.build.launch import dependent, launchable
from headrace.kernels.sampling.reference import best_tokens
from headrace.kernels.sampling.triton_thresholds import keep_thresholds, scaled

_BLOCK = 1024  # tokens a program looks at together; a multiple of the noise's span of 256
_PROGRAMS = 528  # four for each processor of an H200
# Where no noise tells tokens apart by their place: loads of 16 bytes, some blocks of them under way at once, eight
# programs for each processor.
_WIDE_BLOCK, _WIDE_TURNS, _WIDE_PROGRAMS = 2048, 4, 1056
_NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _log(x):
    """Natural logarithm of a positive, normal float32, to about one unit in the last place (the hardware's is not, near
    1)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # so that the rest lies in [1/√2, √2)
    rest = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    square = rest * rest
    tail = 7.0376836292e-2 * rest - 1.1514610310e-1
    tail = tail * rest + 1.1676998740e-1
    tail = tail * rest - 1.2420140846e-1
    tail = tail * rest + 1.4249322787e-1
    tail = tail * rest - 1.6668057665e-1
    tail = tail * rest + 2.0000714765e-1
    tail = tail * rest - 2.4999993993e-1
    tail = tail * rest + 3.3333331174e-1
    wide = exponent.to(tl.float32)
    tail = tail * rest * square + wide * -2.12194440e-4 - 0.5 * square
    return rest + tail + wide * 0.693359375


@triton.jit
def _gumbel(word):
    """−log(−log1p(−w)) for w = (word + ½) / 2³² as kernels/sampling/reference.py defines it; log1p by the ratio that
    cancels 1 − w's rounding."""
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    rest = 1.0 - uniform
    exact = tl.where(rest == 1.0, uniform, -_log(rest) * (uniform / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -_log(exact)


@triton.jit
def _better(value, token, best, best_token):
    """The larger value; of equals the lower token. NaN wins over everything."""
    wins = (value > best) | ((value == best) & (token < best_token)) | (value != value)
    return tl.where(wins, value, best), tl.where(wins, token, best_token)


@triton.jit
def _best_of(values, tokens):
    """The best of a block: (value, token), scalars; NaN if there is one."""
    broken = tl.max((values != values).to(tl.int32), 0)
    best = tl.max(tl.where(values == values, values, float("-inf")), 0)
    token = tl.min(tl.where(values == best, tokens, _NO_TOKEN), 0)
    return tl.where(broken > 0, float("nan"), best), tl.where(broken > 0, 0, token)


@triton.jit
def _score(row_ptr, token, vocab, peak, heat, HAS_SCALE: tl.constexpr):
    x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return scaled(x, peak, heat) if HAS_SCALE else x


@launchable(do_not_specialize=["span"])
def _pick_kernel(
    logits_ptr, peak_ptr, heat_ptr, threshold_ptr, seeds_ptr, positions_ptr, best_ptr, token_ptr, row_stride, vocab, span,
    HAS_NOISE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_THRESHOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    CALLS: tl.constexpr = BLOCK // 4
    peak, heat, seed, position = 0.0, 1.0, 0, 0
    threshold = float("-inf")
    if HAS_SCALE:
        peak, heat = tl.load(peak_ptr + row), tl.load(heat_ptr + row)
    if HAS_THRESHOLD:
        threshold = tl.load(threshold_ptr + row)
    if HAS_NOISE:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.uint32)
    lane = tl.arange(0, CALLS)
    best = tl.full((CALLS,), float("-inf"), tl.float32)
    best_token = tl.full((CALLS,), _NO_TOKEN, tl.int32)
    for begin in range(part * span, tl.minimum(part * span + span, vocab), BLOCK):
        # Words 0 … 3 of call c belong to the tokens c // 64 * 256 + word * 64 + c % 64.
        first = begin + lane // 64 * 256 + lane % 64
        x0 = _score(logits_ptr + row * row_stride, first, vocab, peak, heat, HAS_SCALE)
        x1 = _score(logits_ptr + row * row_stride, first + 64, vocab, peak, heat, HAS_SCALE)
        x2 = _score(logits_ptr + row * row_stride, first + 128, vocab, peak, heat, HAS_SCALE)
        x3 = _score(logits_ptr + row * row_stride, first + 192, vocab, peak, heat, HAS_SCALE)
        highest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        if not HAS_THRESHOLD or tl.max(highest, 0) >= threshold:  # most blocks keep nothing and need no noise
            if HAS_NOISE:
                zero = tl.zeros((CALLS,), tl.uint32)
                w0, w1, w2, w3 = tl.philox(seed, (begin // 4 + lane).to(tl.uint32), zero + position, zero, zero)
            for word in tl.static_range(4):
                x = x0 if word == 0 else x1 if word == 1 else x2 if word == 2 else x3
                token = first + word * 64
                kept = (token < vocab) & (x >= threshold) if HAS_THRESHOLD else token < vocab
                if HAS_NOISE:
                    x += _gumbel(w0 if word == 0 else w1 if word == 1 else w2 if word == 2 else w3)
                best, best_token = _better(
                    tl.where(kept, x, float("-inf")), tl.where(kept, token, _NO_TOKEN), best, best_token
                )
    value, token = _best_of(best, best_token)
    tl.store(best_ptr + row * parts + part, value)
    tl.store(token_ptr + row * parts + part, token)


@launchable(do_not_specialize=["blocks"])
def _largest_kernel(
    logits_ptr, best_ptr, token_ptr, row_stride, vocab, blocks, BLOCK: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """As ``_pick_kernel`` where nothing but the logits counts. A part is ``blocks`` blocks: where each begins is known
    to be aligned."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.minimum((part + 1) * blocks * BLOCK, vocab)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.full((BLOCK,), _NO_TOKEN, tl.int32)
    for first in range(part * blocks, tl.cdiv(end, BLOCK), TURNS):
        for turn in tl.static_range(TURNS):
            token = (first + turn) * BLOCK + lane
            x = tl.load(logits_ptr + row * row_stride + token, mask=token < end, other=float("-inf")).to(tl.float32)
            # tokens of a lane rise, so the lower of equals is kept; NaN stays once it is there
            wins = (x > best) | (x != x)
            best, best_token = tl.where(wins, x, best), tl.where(wins, token, best_token)
    value, token = _best_of(best, best_token)
    tl.store(best_ptr + row * parts + part, value)
    tl.store(token_ptr + row * parts + part, token)


@launchable(do_not_specialize=["parts"])
def _best_kernel(best_ptr, token_ptr, peak_ptr, out_ptr, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(best_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    tokens = tl.load(token_ptr + row * parts + part, mask=part < parts, other=_NO_TOKEN)
    value, token = _best_of(values, tokens)
    tl.store(peak_ptr + row, value)
    tl.store(out_ptr + row, tl.where(token == _NO_TOKEN, 0, token).to(tl.int64))


@launchable()
def _score_kernel(logits_ptr, chosen_ptr, total_ptr, rank_ptr, row_stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(logits_ptr + row * row_stride + tl.load(chosen_ptr + row))
    lane = tl.arange(0, BLOCK)
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        x = tl.load(logits_ptr + row * row_stride + begin + lane, mask=begin + lane < vocab, other=float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(peak, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(peak - shift) + tl.exp(x - shift)
        peak = higher
        above += (x > own).to(tl.int32)
    highest = tl.max(peak, 0)
    total = tl.sum(mass * tl.exp(peak - highest), 0)
    tl.store(total_ptr + row, highest + tl.log(total))
    tl.store(rank_ptr + row, tl.sum(above, 0).to(tl.int64) + 1)


def greedy_tokens(logits: Tensor, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and the first token that has it: ``logits`` [rows, vocab] → [rows] float32, [rows]
    int64.

    Logits may be float32, bfloat16 or float16: as the head gives them, no copy is made. A NaN anywhere in a row makes
    its peak NaN and its token 0.
    """
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    span, parts = _division(rows, vocab, _WIDE_BLOCK, _WIDE_PROGRAMS)
    best, tokens = _empty_parts(rows, parts, logits.device)
    if rows:
        _largest_kernel[(rows, parts)](
            logits, best, tokens, logits.stride(0), vocab, span // _WIDE_BLOCK, BLOCK=_WIDE_BLOCK, TURNS=_WIDE_TURNS,
            PDL=pdl, num_warps=4, **dependent(pdl),
        )  # fmt: skip
    return _best(best, tokens, vocab, pdl=pdl)


def gumbel_argmax(scores: Tensor, thresholds: Tensor | None, seeds: Tensor, positions: Tensor) -> Tensor:
    """argmax of score + noise over scores of at least the threshold: a sample of their softmax (Maddison et al. 2014).

    ``scores`` [rows, vocab] and ``thresholds`` [rows] float32, ``seeds`` and ``positions`` [rows] int64 → [rows] int64.
    The noise is Philox4x32-10's (Salmon et al. 2011), word for word that of kernels/sampling/reference.py; logarithms
    may differ in the last bits.
    """
    return _launch(scores, None, thresholds, seeds, positions)[1]


def pick_tokens(
    logits: Tensor,  # [rows, vocab], float32, finite or −inf
    peak: Tensor,  # [rows], float32
    temperature: Tensor,  # [rows], float32
    filters: tuple[Tensor, Tensor, Tensor] | None,  # top_k [rows] int64, top_p [rows] float32, min_p [rows] float32
    seeds: Tensor,  # [rows], int64
    positions: Tensor,  # [rows], int64
    *,
    pdl: bool = False,
) -> Tensor:
    """One token a row of softmax((logits − peak) / temperature) after min-p, top-k and top-p: [rows], int64. Scores are
    never stored."""
    heat = temperature.clamp(min=1e-5)
    thresholds = None if filters is None else keep_thresholds(logits, *filters, scale=(peak, heat))
    return pick_above(logits, (peak, heat), thresholds, seeds, positions, pdl=pdl)


def pick_above(
    logits: Tensor,
    scale: tuple[Tensor, Tensor],
    thresholds: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    *,
    pdl: bool = False,
) -> Tensor:
    """``pick_tokens`` behind its filters: of scores of at least the threshold. ``scale``: peak and temperature."""
    return _launch(logits, scale, thresholds, seeds, positions, pdl=pdl)[1]


def score_tokens(logits: Tensor, chosen: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [n, 1 + num_best], natural-log probabilities of the same shape and ranks [n]: the chosen token, then the best
    in falling order.

    ``logits`` [n, vocab] float32, ``chosen`` [n] int64. logprob = logit − log Σ exp(logits), summed in one pass
    (Milakov and Gimelshein 2018); rank = 1 + the number of larger logits.
    """
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    total = torch.empty(rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _score_kernel[(rows,)](
            logits, chosen.contiguous(), total, rank, logits.stride(0), vocab, BLOCK=4096, num_warps=8
        )
    own = logits.gather(1, chosen[:, None])
    if not num_best:
        return chosen[:, None], own - total[:, None], rank
    best, best_ids = best_tokens(logits, num_best)
    return torch.cat((chosen[:, None], best_ids), dim=1), torch.cat((own, best), dim=1) - total[:, None], rank


def _launch(
    logits: Tensor,
    scale: tuple[Tensor, Tensor] | None,
    thresholds: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """The best value [rows] float32 and token [rows] int64 of each row, with noise where there are seeds."""
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    span, parts = _division(rows, vocab, _BLOCK, _PROGRAMS)
    best, best_tokens = _empty_parts(rows, parts, logits.device)
    unused = best  # a pointer the kernel does not follow
    peak, heat = (unused, unused) if scale is None else (scale[0].contiguous(), scale[1].contiguous())
    if rows:
        _pick_kernel[(rows, parts)](
            logits, peak, heat, unused if thresholds is None else thresholds.contiguous(),
            unused if seeds is None else seeds.contiguous(), unused if positions is None else positions.contiguous(),
            best, best_tokens, logits.stride(0), vocab, span,
            HAS_NOISE=seeds is not None, HAS_SCALE=scale is not None, HAS_THRESHOLD=thresholds is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return _best(best, best_tokens, vocab, pdl=pdl)


def _division(rows: int, vocab: int, block: int, programs: int) -> tuple[int, int]:
    """Tokens a program looks at, and programs a row."""
    blocks = triton.cdiv(vocab, block)
    span = triton.cdiv(blocks, min(blocks, max(1, programs // max(rows, 1)))) * block
    return span, triton.cdiv(vocab, span)


def _empty_parts(rows: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty((rows, parts), dtype=torch.float32, device=device), torch.empty(
        (rows, parts), dtype=torch.int32, device=device
    )


def _best(best: Tensor, best_tokens: Tensor, vocab: int, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """The best of each row's parts: value [rows] float32, token [rows] int64."""
    rows, parts = best.shape
    # parts, for any number of rows: one kernel for all
    most = triton.next_power_of_2(min(triton.cdiv(vocab, _BLOCK), _PROGRAMS))
    peaks = torch.empty(rows, dtype=torch.float32, device=best.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=best.device)
    if rows:
        _best_kernel[(rows,)](
            best,
            best_tokens,
            peaks,
            tokens,
            parts,
            BLOCK=most,
            PDL=pdl,
            num_warps=1,
            **dependent(pdl),
        )
    return peaks, tokens
