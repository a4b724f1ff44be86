"""From logits to tokens, for all sampled rows of a step at once.

What lives here: what each row asked for, turned into index lists and calls of the sampling kernels, in the order raw
logits → logprobs; masks, allowed ids, bias, bad words, min_tokens → penalties → temperature → min-p → top-k → top-p →
pick. What may not: the mathematics (kernels/sampling/reference.py), the forward pass, reading results on the host
(model_runner.py).

Everything the host decides here follows from plans and requests; no device value is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.candidate import Facts
from headrace.kernels.operations import GREEDY_TOKENS, PICK_TOKENS, SCORE_TOKENS, STORE_TOKENS
from headrace.kernels.sampling.reference import apply_penalties
from headrace.worker.rows import FLOAT_COLUMNS, INT_COLUMNS, BadWords, HostRow, Ints, Rows, Trait, places_on, ship_all

# ids of penalised rows looked at together; each takes about 50 bytes, and long contexts have many
_PENALISED_AT_ONCE = 2**21
_MASKED_AT_ONCE = 2**22  # logits of masked rows looked at together; each takes about 13 bytes
_RANDOM, _FILTERED, _COUNTED = int(Trait.RANDOM), int(Trait.FILTERED), int(Trait.COUNTED)
_NEVER = np.float32(-np.inf)
_FLOAT = {name: column for column, name in enumerate(FLOAT_COLUMNS)}
_INT = {name: column for column, name in enumerate(INT_COLUMNS)}


@dataclass(frozen=True, slots=True)
class RowMasks:
    """What samples may be, on the host: one bit a token id, from the lowest bit of the first word."""

    which: Ints  # [masked]: samples
    words: Ints  # [masked, ceil(vocab / 32)]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Which rows get a token, on the host. ``source[j]`` is the logits row of sample j: several samples may share
    one."""

    rows: Ints  # [samples]
    positions: Ints  # [samples]: where in the row the new token goes
    source: Ints  # [samples]
    # [samples]: how many tokens before the new one are drafts that have not been counted; None: none anywhere
    drafts: Ints | None = None
    masks: RowMasks | None = None


class Draw(IntEnum):
    """What picks the tokens of all rows of a step, where nothing edits their logits and no scores are asked for."""

    GREEDY = 0
    RANDOM = 1  # some rows have a temperature
    FILTERED = 2  # some of those have top-k, top-p or min-p


class Head(Protocol):
    """What a decoder has behind its last norm."""

    def logits(self, hidden: Tensor) -> Tensor: ...

    def greedy(self, hidden: Tensor, largest: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]: ...


def draw_of(traits: Ints) -> Draw | None:
    """None: some row wants more than a draw."""
    every = int(np.bitwise_or.reduce(traits))
    if every & ~(_RANDOM | _FILTERED):
        return None
    return Draw.GREEDY if not every & _RANDOM else Draw.FILTERED if every & _FILTERED else Draw.RANDOM


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of the samples ``which`` (on the host); the tensors are as ``score_tokens`` gives them."""

    which: Ints
    num_best: tuple[int, ...]  # asked by each; the tensors hold the largest number
    ids: Tensor
    logprobs: Tensor
    ranks: Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """What was sampled, still on the device, or on its way to where ``picked`` is on the host: (token, usable) of each
    sample.

    A row that is not usable had NaN or +inf among its logits, or nothing left to pick.
    """

    picked: Tensor | Ints  # [samples, 2], int32
    scores: Scores | None = None


class Sampler:
    """Samples for rows and writes the tokens into them."""

    def __init__(self, rows: Rows, kernels: Kernels) -> None:
        self._rows = rows
        self._greedy = kernels.choose(GREEDY_TOKENS, Facts(torch.float32))
        self._pick = kernels.choose(PICK_TOKENS, Facts(torch.float32))
        self._score = kernels.choose(SCORE_TOKENS, Facts(torch.float32))
        self._store = kernels.choose(STORE_TOKENS, Facts(torch.int32))

    def sample(self, logits: Tensor, batch: SampleBatch) -> Samples:
        """``logits`` [sources, vocab], float32, is used up."""
        traits = self._rows.traits[batch.rows]
        rows, positions, source = ship_all(self._rows.device, batch.rows, batch.positions, batch.source)
        shared = not np.array_equal(batch.source, np.arange(len(logits)))
        scores = None
        if traits.any():
            tokens, peak, scores = self._sample_as_asked(
                logits, source.long(), batch, rows.long(), positions.long(), traits, shared=shared
            )
        else:
            peak, tokens = self._greedy(logits)
            if shared:
                tokens, peak = tokens[source.long()], peak[source.long()]
        picked = self._store(self._rows.token_ids, rows, positions, tokens, peak)
        if batch.drafts is None:  # else those that are accepted are counted when that is known
            self._count(tokens, batch, traits)
        return Samples(picked, scores)

    def draw(
        self, head: Head, hidden: Tensor, rows: Tensor, positions: Tensor, how: Draw, ring: Tensor, turn: Tensor
    ) -> None:
        """One token for each row of ``hidden`` [n, hidden], written into ``rows`` [n] int32 at ``positions`` [n] int32,
        and for the host into ``ring`` (see ``store_tokens``). Decides nothing on the host, so that it can be captured.
        """
        if how is Draw.GREEDY:
            peak, tokens = head.greedy(hidden, self._greedy)  # in any float type the largest is the same one
        else:
            logits = head.logits(hidden).float()
            peak, tokens = self._greedy(logits)
            temperature = self._rows.float_params(rows.long())[:, _FLOAT["temperature"]]
            drawn = self._pick_group(logits, peak, rows.long(), positions.long(), how is Draw.FILTERED)
            tokens = torch.where(temperature > 0.0, drawn, tokens)
        self._store(self._rows.token_ids, rows, positions, tokens, peak, ring, turn)

    def propose(self, logits: Tensor, batch: SampleBatch) -> Tensor:  # [n], int64
        """What would be sampled from ``logits`` [n, vocab], float32, which are used up: one row for each sample.
        Nothing is stored."""
        traits = self._rows.traits[batch.rows] & ~(Trait.SCORED | Trait.MASKED)
        if not traits.any():
            tokens: Tensor = self._greedy(logits)[1]
            return tokens
        rows, positions, source = places_on(self._rows.device, batch.rows, batch.positions, batch.source)
        return self._sample_as_asked(logits, source, batch, rows, positions, traits, shared=False)[0]

    def temperatures(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # [n], int64 → [n] float32, [n] int64
        """Of rows, and their seeds."""
        return self._rows.float_params(rows)[:, _FLOAT["temperature"]].contiguous(), _seeds(self._rows.int_params(rows))

    def score(self, logits: Tensor, targets: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
        """Known tokens [n] under logits [n, vocab]: ids and logprobs [n, 1 + num_best], ranks [n]; see
        ``score_tokens``."""
        scored: tuple[Tensor, Tensor, Tensor] = self._score(logits, targets, min(num_best, logits.shape[1]))
        return scored

    def _sample_as_asked(
        self,
        raw: Tensor,
        source: Tensor,
        batch: SampleBatch,
        rows: Tensor,
        positions: Tensor,
        traits: Ints,
        *,
        shared: bool,
    ) -> tuple[Tensor, Tensor, Scores | None]:
        """(tokens, peaks, scores); where a peak is not finite, the token is not usable. ``raw`` is kept whole only
        where its logprobs are asked for, or several samples read one row of it.
        """
        scored = bool((traits & Trait.SCORED).any())
        logits = raw[source] if shared else raw.clone() if scored else raw
        whole = raw.amax(-1).float()[source]  # before anything is taken out
        self._process(logits, batch, traits)
        peak, tokens = self._greedy(logits)
        self._replace_random(tokens, logits, peak, traits, rows, positions)
        return (
            tokens,
            torch.where(whole.isfinite(), peak, whole),
            self._scores(raw, source, tokens, batch, traits) if scored else None,
        )

    # --- picking

    def _replace_random(
        self, tokens: Tensor, logits: Tensor, peak: Tensor, traits: Ints, rows: Tensor, positions: Tensor
    ) -> None:
        """Replaces the greedy choice in ``tokens`` where a row has a temperature; rows without filters are spared their
        cost."""
        random, filtered = (traits & Trait.RANDOM) != 0, (traits & Trait.FILTERED) != 0
        for group, has_filters in ((random & ~filtered, False), (random & filtered, True)):
            which = np.flatnonzero(group).astype(np.int32)
            if len(which) == len(tokens):
                tokens.copy_(self._pick_group(logits, peak, rows, positions, has_filters))
            elif len(which):
                (at,) = places_on(self._rows.device, which)
                tokens[at] = self._pick_group(logits[at], peak[at], rows[at], positions[at], has_filters)

    def _pick_group(self, logits: Tensor, peak: Tensor, rows: Tensor, positions: Tensor, has_filters: bool) -> Tensor:
        floats, ints = self._rows.float_params(rows), self._rows.int_params(rows)
        filters = (
            (ints[:, _INT["top_k"]], floats[:, _FLOAT["top_p"]], floats[:, _FLOAT["min_p"]]) if has_filters else None
        )
        seeds = _seeds(ints)
        output_positions = positions - ints[:, _INT["num_prompt_tokens"]]
        tokens: Tensor = self._pick(logits, peak, floats[:, _FLOAT["temperature"]], filters, seeds, output_positions)
        return tokens

    # --- what changes logits

    def _process(self, logits: Tensor, batch: SampleBatch, traits: Ints) -> None:
        if batch.masks is not None:
            self._mask(logits, batch.masks)
        edited = np.flatnonzero(traits & Trait.EDITED)
        if len(edited):
            hosts = [(int(j), self._rows.host[int(batch.rows[j])]) for j in edited]
            self._allow(logits, hosts)
            self._add(logits, hosts, batch)
            self._ban_words(logits, hosts, batch)
        penalised = np.flatnonzero(traits & Trait.PENALISED).astype(np.int32)
        if len(penalised):
            at_once = max(1, _PENALISED_AT_ONCE // int(batch.positions[penalised].max()))
            for start in range(0, len(penalised), at_once):
                self._penalise(logits, penalised[start : start + at_once], batch)

    def _mask(self, logits: Tensor, masks: RowMasks) -> None:
        """Every id whose bit is 0 gets -inf."""
        which, words = ship_all(self._rows.device, masks.which, masks.words)
        which, words = which.long(), words.view(masks.words.shape)
        bit = torch.arange(32, dtype=torch.int32, device=words.device)
        at_once = max(1, _MASKED_AT_ONCE // logits.shape[1])
        for start in range(0, len(which), at_once):
            rows = which[start : start + at_once]
            bits = (words[start : start + at_once, :, None] >> bit) & 1
            forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
            logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))

    def _allow(self, logits: Tensor, hosts: list[tuple[int, HostRow]]) -> None:
        """Every id that is not allowed gets -inf."""
        lists = [(j, host.allowed_ids) for j, host in hosts if host.allowed_ids is not None]
        if not lists:
            return
        samples = np.array([j for j, _ in lists], dtype=np.int32)
        repeated = np.repeat(samples, [len(ids) for _, ids in lists])
        allowed = np.concatenate([ids for _, ids in lists])
        which, at, ids = places_on(self._rows.device, samples, repeated, allowed)
        kept = logits[at, ids]
        logits.index_fill_(0, which, float("-inf"))
        logits[at, ids] = kept

    def _add(self, logits: Tensor, hosts: list[tuple[int, HostRow]], batch: SampleBatch) -> None:
        """Adds biases, and -inf to the stop ids of rows that have fewer than min_tokens out."""
        at, ids, values = [], [], []
        for j, host in hosts:
            early = batch.positions[j] - self._rows.num_prompt_tokens[batch.rows[j]] < host.params.min_tokens
            early = early and host.params.structured_outputs is None  # a mask says itself where the end is open
            stops = host.stop_ids if early else host.stop_ids[:0]
            ids += [host.bias_ids, stops]
            values += [host.bias_values, np.full(len(stops), _NEVER, dtype=np.float32)]
            at.append(np.full(len(host.bias_ids) + len(stops), j, dtype=np.int32))
        parts = np.concatenate(at), np.concatenate(ids), np.concatenate(values).view(np.int32)
        which, tokens, amounts = ship_all(self._rows.device, *parts)
        logits.index_put_((which.long(), tokens.long()), amounts.view(torch.float32), accumulate=True)

    def _ban_words(self, logits: Tensor, hosts: list[tuple[int, HostRow]], batch: SampleBatch) -> None:
        """Bans the last token of a bad word whose prefix ends the row's output."""
        words = [self._place(j, host.bad_words, batch) for j, host in hosts if host.bad_words is not None]
        if not words:
            return
        firsts = np.cumsum([0, *(len(placed[0]) for placed in words[:-1])])
        parts = [np.concatenate(part).astype(np.int32) for part in zip(*words, strict=True)]
        parts[3] = np.concatenate([placed[3] + first for placed, first in zip(words, firsts, strict=True)]).astype(
            np.int32
        )
        which, banned, needed, entry, row, position, token = ship_all(self._rows.device, *parts)
        equal = (self._rows.token_ids[row.long(), position.long()] == token).int()
        matches = torch.zeros_like(needed).index_add_(0, entry.long(), equal)
        amounts = torch.where(matches == needed, float("-inf"), 0.0)
        logits.index_put_((which.long(), banned.long()), amounts, accumulate=True)

    def _place(self, j: int, words: BadWords, batch: SampleBatch) -> tuple[Ints, ...]:
        """For each word its sample, last token and how many prefix ids must match; for each prefix id its word, row,
        place and value."""
        position, row = int(batch.positions[j]), int(batch.rows[j])
        num_outputs = position - int(self._rows.num_prompt_tokens[row])
        return (
            np.full(len(words.last), j, dtype=np.int32),
            words.last,
            np.where(words.lengths > num_outputs, -1, words.lengths),  # a prefix longer than the output cannot match
            words.entry,
            np.full(len(words.prefix), row, dtype=np.int32),
            np.maximum(position - words.distance, 0),
            words.prefix,
        )

    def _penalise(self, logits: Tensor, which: Ints, batch: SampleBatch) -> None:
        shipped = ship_all(self._rows.device, which, batch.rows[which], batch.positions[which])
        at, rows, lengths = (part.long() for part in shipped)
        longest = int(batch.positions[which].max())
        ids = self._rows.token_ids[rows, :longest].long()
        beyond = torch.arange(longest, device=ids.device)[None] >= lengths[:, None]
        ids = torch.where(beyond, ids[:, :1], ids)
        # Rows with a repetition penalty alone count nothing; what an earlier sequence left there is multiplied by 0.
        counts = self._rows.counts[rows[:, None], ids].float()
        if batch.drafts is not None:
            counts += self._drafted_counts(ids, rows, lengths, batch.drafts[which])
        floats = self._rows.float_params(rows)
        penalties = (floats[:, _FLOAT[name]] for name in ("presence", "frequency", "repetition"))
        apply_penalties(logits, at, ids, counts, *penalties)

    def _drafted_counts(self, ids: Tensor, rows: Tensor, lengths: Tensor, drafts: Ints) -> Tensor:
        """How often each of ``ids`` [n, length] is among the drafts before its row's place, in rows that count."""
        found, before = torch.zeros_like(ids, dtype=torch.float32), places_on(ids.device, drafts)[0]
        for back in range(1, int(drafts.max()) + 1):
            drafted = self._rows.token_ids[rows, (lengths - back).clamp(min=0)].long()
            found += (ids == drafted[:, None]) & (before >= back)[:, None]
        return found

    def count(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Tokens that rows have got, where these count them."""
        for at in np.flatnonzero(self._rows.traits[np.asarray(rows)] & _COUNTED).tolist():
            if tokens[at]:
                ids = torch.tensor(tokens[at], dtype=torch.int64, device=self._rows.device)
                self._rows.counts[rows[at]].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _count(self, tokens: Tensor, batch: SampleBatch, traits: Ints) -> None:
        counted = np.flatnonzero(traits & Trait.COUNTED).astype(np.int32)
        if len(counted):
            rows, which = places_on(self._rows.device, batch.rows[counted], counted)
            self._rows.counts[rows, tokens[which]] += 1

    # --- logprobs

    def _scores(self, raw: Tensor, source: Tensor, tokens: Tensor, batch: SampleBatch, traits: Ints) -> Scores:
        which = np.flatnonzero(traits & Trait.SCORED).astype(np.int32)
        num_best = tuple(self._rows.host[int(row)].params.logprobs or 0 for row in batch.rows[which])
        (at,) = places_on(self._rows.device, which)
        return Scores(which, num_best, *self.score(raw[source[at]], tokens[at], max(num_best)))


def _seeds(ints: Tensor) -> Tensor:  # of Rows.int_params: [n, INT_COLUMNS] → [n], int64
    return (ints[:, _INT["seed_high"]] << 32) | (ints[:, _INT["seed_low"]] & 0xFFFFFFFF)
