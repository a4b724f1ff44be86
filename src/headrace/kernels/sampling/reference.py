"""Picking tokens from logits: the torch twins of sampling, each a pure function of its tensors.

What lives here: Philox noise, the Gumbel-max pick with top-k, top-p and min-p, penalties, scores of chosen tokens.
What may not: row state, plans, request parameters (worker/sampler.py gathers them into the tensors used here).

The noise of one token is word ``(t // 64) % 4`` of Philox4x32-10 with the seed as key and ``((t // 256) * 64 + t % 64,
output position, 0, 0)`` as counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four
tokens, 64 apart, share a call, so that runs of 64 are contiguous. It depends on nothing else: which other rows, chunks
or tokens are computed beside it cannot change it, and computing it for the kept tokens alone is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_LANES = 4  # 32-bit words one Philox call gives
_RUN = 64  # consecutive tokens that take the same word of consecutive calls
_CALLS_AT_ONCE = 2**15  # int64 counters worked on together: a quarter of a megabyte stays in the second-level cache
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below 1
_MIN_TEMPERATURE = 1e-5
_SCORES_AT_ONCE = 2**18  # float32 scores whose thresholds are sought together: a megabyte
_KEYS_AT_ONCE = 2**24  # logits whose order is worked out together: 128 MB
_LEADING = 2048  # scores looked at before a whole row is sorted
_DENSE_SHARE = 8  # noise is computed for the whole vocabulary once more than one token in eight is kept

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox4x32. All tensors are int64 holding 32-bit values and broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLIER_0  # may wrap to a negative int64; the bits are those of the unsigned product
        p1 = c2 * _MULTIPLIER_1
        # The second and fourth word are only ever combined with words that are cut to 32 bits afterwards.
        c0, c1, c2, c3 = _mixed(p1, c1, k0), p1, _mixed(p0, c3, k1), p0
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def _mixed(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    """(upper half of ``product``) ^ word ^ key, in 32 bits."""
    return ((product >> 32) ^ word).bitwise_xor_(key).bitwise_and_(_WORD)


def _key_words(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & _WORD, (seeds >> 32) & _WORD


def _gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise of 32-bit words: −log(−log1p(−w)), w = (word + ½) / 2³², exact where noise is large (small
    w)."""
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def token_noise(
    seeds: Tensor,  # [n], int64
    positions: Tensor,  # [n], int64: output positions
    token_ids: Tensor,  # [n], int64
) -> Tensor:  # [n], float32
    """The Gumbel noise of single tokens."""
    zero = torch.zeros_like(positions)
    call = token_ids // (_LANES * _RUN) * _RUN + token_ids % _RUN
    words = philox4x32((call, positions, zero, zero), _key_words(seeds))
    return _gumbel(torch.stack(words).gather(0, (token_ids // _RUN % _LANES)[None])[0])


def vocabulary_noise(
    seeds: Tensor,  # [rows], int64
    positions: Tensor,  # [rows], int64: output positions
    vocab_size: int,
) -> Tensor:  # [rows, vocab_size], float32
    """The Gumbel noise of every token: equal to ``token_noise`` bit for bit, at a quarter of the Philox calls."""
    runs = -(-vocab_size // (_LANES * _RUN))
    counter = torch.arange(runs * _RUN, dtype=torch.int64, device=seeds.device)[None]
    rows_at_once = max(1, _CALLS_AT_ONCE // (runs * _RUN))
    out = torch.empty(len(seeds), runs, _LANES, _RUN, dtype=torch.float32, device=seeds.device)
    for start in range(0, len(seeds), rows_at_once):
        piece = slice(start, start + rows_at_once)
        position = positions[piece, None]
        zero = torch.zeros_like(position)
        k0, k1 = _key_words(seeds[piece, None])
        for lane, word in enumerate(philox4x32((counter, position, zero, zero), (k0, k1))):
            out[piece, :, lane] = _gumbel(word).view(-1, runs, _RUN)
    return out.view(len(seeds), -1)[:, :vocab_size]


def _leading(values: Tensor, width: int) -> Tensor:
    """Each row's ``width`` largest values in falling order. numpy's vectorised selection and sort beat torch's by far
    on a CPU."""
    if values.device.type != "cpu":
        return values.topk(width, dim=-1).values
    negated = -values.numpy()
    if width < negated.shape[1]:
        negated.partition(width - 1, axis=-1)
    return torch.from_numpy(np.sort(negated[:, :width], axis=-1)).neg_()


def keep_thresholds(
    scores: Tensor,  # [rows, vocab], float32: logits over temperature, the largest of each row shifted to 0
    top_k: Tensor,  # [rows], int64; 0 or less = off
    top_p: Tensor,  # [rows], float32; 1 = off
    min_p: Tensor,  # [rows], float32; 0 = off
) -> Tensor:  # [rows], float32: tokens with at least this score are kept
    """min-p, then top-k, then top-p over what those two left. Tokens equal to the last one kept are kept as well.

    Looks at the leading scores first; only rows whose threshold is not among them are sorted whole.
    """
    rows_at_once = max(1, _SCORES_AT_ONCE // scores.shape[1])
    pieces = zip(*(part.split(rows_at_once) for part in (scores, top_k, top_p, min_p)), strict=True)
    return torch.cat([_thresholds_of(*piece) for piece in pieces])


def _thresholds_of(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    vocab_size = scores.shape[1]
    width = min(vocab_size, _LEADING)
    threshold, certain = _thresholds_among(_leading(scores, width), scores, top_k, top_p, min_p)
    missing = (~certain).nonzero()[:, 0]
    if len(missing):
        rest = scores[missing]
        threshold[missing] = _thresholds_among(
            _leading(rest, vocab_size), rest, top_k[missing], top_p[missing], min_p[missing]
        )[0]
    return threshold


def _thresholds_among(
    leading: Tensor, scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Thresholds [rows] as seen from the leading scores [rows, width], and whether they are certain [rows].

    A threshold is certain if it lies above the last leading score, so that no token outside could be kept or counted.
    """
    width, vocab_size = leading.shape[1], scores.shape[1]
    lowest = leading[:, -1]
    rank = torch.where(top_k <= 0, vocab_size, top_k)
    kth = leading.gather(1, (rank.clamp(max=width) - 1)[:, None])[:, 0]
    kth = torch.where(rank < vocab_size, kth, float("-inf"))
    floor = torch.maximum(kth, min_p.log())  # log 0 = −inf: off
    mass = (leading.exp() * (leading >= floor[:, None])).cumsum(-1)
    total = mass[:, -1]
    # what is kept before top-p may reach beyond the leading scores
    if width < vocab_size and bool((floor <= lowest).any()):
        total = torch.where(floor > lowest, total, _mass_above(scores, floor))
    last = torch.searchsorted(mass, (top_p * total)[:, None]).clamp_(max=width - 1)
    nucleus = torch.where(top_p < 1.0, leading.gather(1, last)[:, 0], float("-inf"))
    threshold = torch.maximum(floor, nucleus)
    open_ended = (top_p >= 1.0) & (rank >= vocab_size)  # min-p alone needs no ranking
    certain = open_ended | ((threshold > lowest) & ((rank <= width) | (rank >= vocab_size)))
    return threshold, certain


def _mass_above(scores: Tensor, floor: Tensor) -> Tensor:
    """Σ exp(score) over scores of at least ``floor``, summed in float64 so that the order of summation does not
    show."""
    return (scores.exp() * (scores >= floor[:, None])).sum(-1, dtype=torch.float64).to(torch.float32)


# Each row's largest logit and the first token that has it: [rows, vocab] → [rows] of the logits' type, [rows] int64. A
# NaN anywhere in a row makes its peak NaN and its token any.
greedy_tokens: Callable[[Tensor], tuple[Tensor, Tensor]] = partial(torch.max, dim=-1)  # type: ignore[assignment]


def pick_tokens(
    logits: Tensor,  # [rows, vocab], float32, finite or −inf
    peak: Tensor,  # [rows], float32: each row's largest logit, finite
    temperature: Tensor,  # [rows], float32, above 0
    filters: tuple[Tensor, Tensor, Tensor]
    | None,  # top_k, top_p, min_p as in keep_thresholds; None = all off in every row
    seeds: Tensor,  # [rows], int64
    positions: Tensor,  # [rows], int64: output positions
    argmax: Callable[..., Tensor],  # gumbel_argmax or a candidate of it
) -> Tensor:  # [rows], int64
    """Samples one token a row."""
    scores = (logits - peak[:, None]).div_(temperature.clamp(min=_MIN_TEMPERATURE)[:, None])
    return argmax(scores, None if filters is None else keep_thresholds(scores, *filters), seeds, positions)


def gumbel_argmax(
    scores: Tensor,  # [rows, vocab], float32
    thresholds: Tensor | None,  # [rows], float32: tokens with at least this score are kept; None = all are
    seeds: Tensor,  # [rows], int64
    positions: Tensor,  # [rows], int64: output positions
) -> Tensor:  # [rows], int64
    """The argmax of score + Gumbel noise over the kept tokens: a sample of softmax(scores) over them (Maddison et al.
    2014).

    A row of NaN gives any token; its caller knows.
    """
    if thresholds is None:
        return _pick_from_all(scores, seeds, positions)
    kept = scores >= thresholds[:, None]
    wide = kept.sum(-1) > scores.shape[1] // _DENSE_SHARE
    picked = torch.empty_like(seeds)
    narrow_rows, wide_rows = (~wide).nonzero()[:, 0], wide.nonzero()[:, 0]
    if len(narrow_rows):
        picked[narrow_rows] = _pick_from_kept(
            scores[narrow_rows], kept[narrow_rows], seeds[narrow_rows], positions[narrow_rows]
        )
    if len(wide_rows):
        masked = torch.where(kept[wide_rows], scores[wide_rows], float("-inf"))
        picked[wide_rows] = _pick_from_all(masked, seeds[wide_rows], positions[wide_rows])
    return picked


def _pick_from_all(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    return (scores + vocabulary_noise(seeds, positions, scores.shape[1])).argmax(-1)


def _pick_from_kept(scores: Tensor, kept: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """As ``_pick_from_all``, with noise for the kept tokens alone: they are laid out as [rows, most kept in a row]."""
    counts = kept.sum(-1)
    row, token = kept.nonzero(as_tuple=True)
    column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    noisy = torch.full((len(scores), max(1, int(counts.max()))), float("-inf"), device=scores.device)
    noisy[row, column] = scores[row, token] + token_noise(seeds[row], positions[row], token)
    tokens = torch.zeros(noisy.shape, dtype=torch.int64, device=scores.device)
    tokens[row, column] = token
    return tokens.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]


def apply_penalties(
    logits: Tensor,  # [rows, vocab], float32, changed in place
    which: Tensor,  # [p], int64: rows of logits the penalties are for
    # [p, length], int64: prompt and output ids; shorter rows are filled up with any of their own ids
    token_ids: Tensor,
    counts: Tensor,  # [p, length], float32: how often each of those ids occurs in the output
    presence: Tensor,  # [p], float32
    frequency: Tensor,  # [p], float32
    repetition: Tensor,  # [p], float32; 1 = off
) -> None:
    """Repetition scales the logits of every id of the row; frequency and presence subtract by occurrences in the
    output.

    Only logits of ids in the row change, so only those are touched; an id that occurs twice is written twice with one
    value.
    """
    rows = which[:, None].expand_as(token_ids)
    old = logits[rows, token_ids]
    scale = repetition[:, None]
    new = torch.where(old > 0, old / scale, old * scale)
    new -= frequency[:, None] * counts + presence[:, None] * (counts > 0)
    logits[rows, token_ids] = new


def best_tokens(
    logits: Tensor, count: int
) -> tuple[Tensor, Tensor]:  # [rows, vocab], float32 → [rows, count] float32, [rows, count] int64
    """Each row's largest logits in falling order, of equals the lower id first.

    topk leaves that open, so that which of two equal tokens is shown would depend on how many others ask for how many.
    """
    rows_at_once = max(1, _KEYS_AT_ONCE // logits.shape[1])
    ids = (
        torch.cat([_order_keys(piece).topk(count, dim=-1).values for piece in logits.split(rows_at_once)])
        .bitwise_and_(_WORD)
        .neg_()
        .add_(_WORD)
    )
    return logits.gather(1, ids), ids


def _order_keys(logits: Tensor) -> Tensor:
    """int64 that rise with the logit and, where logits are equal, fall with the id: all different."""
    bits = (logits + 0.0).view(torch.int32)  # −0 becomes 0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.long() << 32) + torch.arange(_WORD, _WORD - logits.shape[1], -1, device=logits.device)


def score_tokens(
    logits: Tensor,  # [n, vocab], float32: raw
    chosen: Tensor,  # [n], int64
    num_best: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [n, 1 + num_best], natural-log probabilities of the same shape and the chosen tokens' ranks [n].

    Column 0 is the chosen token, the others are the best in falling order; rank 1 = no token has a larger logit.
    """
    # Row by row: a reduction of one row is split over threads differently than that of many, and its last bit would
    # show the batch.
    total = torch.stack([row.logsumexp(-1) for row in logits])[:, None]
    chosen_logits = logits.gather(1, chosen[:, None])
    rank = (logits > chosen_logits).sum(-1) + 1
    best, best_ids = best_tokens(logits, num_best)
    ids = torch.cat((chosen[:, None], best_ids), dim=1)
    return ids, torch.cat((chosen_logits, best), dim=1) - total, rank
