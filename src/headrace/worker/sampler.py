"""From logits to tokens, for all sampled rows of a step at once.

What lives here: what each row asked for, turned into index lists and calls of the sampling kernels, in the order
raw logits → logprobs; allowed ids, bias, bad words, min_tokens → penalties → temperature → min-p → top-k → top-p → pick.
What may not: the mathematics (kernels/sampling.py), the forward pass, reading results on the host (model_runner.py).

Everything the host decides here follows from plans and requests; no device value is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.sampling import apply_penalties, pick_tokens, score_tokens
from headrace.worker.rows import FLOAT_COLUMNS, INT_COLUMNS, BadWords, HostRow, Ints, Rows, Staging, Trait, ship

_NEVER = np.float32(-np.inf)
_FLOAT = {name: column for column, name in enumerate(FLOAT_COLUMNS)}
_INT = {name: column for column, name in enumerate(INT_COLUMNS)}


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Which rows get a token, on the host. ``source[j]`` is the logits row of sample j: several samples may share one."""

    rows: Ints  # [samples]
    positions: Ints  # [samples]: where in the row the new token goes
    source: Ints  # [samples]


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
    """What was sampled, still on the device. A row that is not ``usable`` had NaN or +inf among its logits, or nothing left to pick."""

    tokens: Tensor  # [samples], int64
    usable: Tensor  # [samples], bool
    scores: Scores | None


class Sampler:
    """Samples for rows and writes the tokens into them."""

    def __init__(self, rows: Rows, kernels: Kernels) -> None:
        self._rows = rows
        self._argmax = kernels.choose("gumbel_argmax", dtype=torch.float32)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Samples:
        """``logits`` [sources, vocab], float32, is used up."""
        traits = self._rows.traits[batch.rows]
        staging = Staging(self._rows.device)
        for part in (batch.rows, batch.positions, batch.source):
            staging.put(part)
        rows, positions, source = (part.long() for part in staging.ship())
        shared = not np.array_equal(batch.source, np.arange(len(logits)))
        if traits.any():
            samples = self._sample_as_asked(logits, source, batch, rows, positions, shared=shared)
        else:
            peak, tokens = logits.max(-1)
            usable = peak.isfinite()
            samples = Samples(tokens[source], usable[source], None) if shared else Samples(tokens, usable, None)
        self._rows.token_ids[rows, positions] = samples.tokens.int()
        self._count(samples.tokens, batch, traits)
        return samples

    def _sample_as_asked(self, raw: Tensor, source: Tensor, batch: SampleBatch, rows: Tensor, positions: Tensor, *, shared: bool) -> Samples:
        """``raw`` is kept whole only where somebody wants its logprobs, or several samples read one row of it."""
        traits = self._rows.traits[batch.rows]
        scored = bool((traits & Trait.SCORED).any())
        logits = raw[source] if shared else raw.clone() if scored else raw
        usable = raw.amax(-1).isfinite()[source]
        self._process(logits, batch, traits)
        peak, tokens = logits.max(-1)
        usable &= peak.isfinite()
        self._pick(tokens, logits, peak, traits, rows, positions)
        return Samples(tokens, usable, self._score(raw, source, tokens, batch, traits) if scored else None)

    # --- picking

    def _pick(self, tokens: Tensor, logits: Tensor, peak: Tensor, traits: Ints, rows: Tensor, positions: Tensor) -> None:
        """Replaces the greedy choice in ``tokens`` where a row has a temperature; rows without filters are spared their cost."""
        random, filtered = (traits & Trait.RANDOM) != 0, (traits & Trait.FILTERED) != 0
        for group, has_filters in ((random & ~filtered, False), (random & filtered, True)):
            which = np.flatnonzero(group).astype(np.int32)
            if len(which) == len(tokens):
                tokens.copy_(self._pick_group(logits, peak, rows, positions, has_filters))
            elif len(which):
                at = ship(which, self._rows.device)
                tokens[at] = self._pick_group(logits[at], peak[at], rows[at], positions[at], has_filters)

    def _pick_group(self, logits: Tensor, peak: Tensor, rows: Tensor, positions: Tensor, has_filters: bool) -> Tensor:
        floats, ints = self._rows.float_params(rows), self._rows.int_params(rows)
        filters = (ints[:, _INT["top_k"]], floats[:, _FLOAT["top_p"]], floats[:, _FLOAT["min_p"]]) if has_filters else None
        seeds = (ints[:, _INT["seed_high"]] << 32) | (ints[:, _INT["seed_low"]] & 0xFFFFFFFF)
        output_positions = positions - ints[:, _INT["num_prompt_tokens"]]
        return pick_tokens(logits, peak, floats[:, _FLOAT["temperature"]], filters, seeds, output_positions, self._argmax)

    # --- what changes logits

    def _process(self, logits: Tensor, batch: SampleBatch, traits: Ints) -> None:
        edited = np.flatnonzero(traits & Trait.EDITED)
        if len(edited):
            hosts = [(int(j), self._rows.host[int(batch.rows[j])]) for j in edited]
            self._allow(logits, hosts)
            self._add(logits, hosts, batch)
            self._ban_words(logits, hosts, batch)
        penalised = np.flatnonzero(traits & Trait.PENALISED).astype(np.int32)
        if len(penalised):
            self._penalise(logits, penalised, batch)

    def _allow(self, logits: Tensor, hosts: list[tuple[int, HostRow]]) -> None:
        """Every id that is not allowed gets -inf."""
        lists = [(j, host.allowed_ids) for j, host in hosts if host.allowed_ids is not None]
        if not lists:
            return
        staging = Staging(self._rows.device)
        staging.put(np.array([j for j, _ in lists], dtype=np.int32))
        staging.put(np.repeat(np.array([j for j, _ in lists], dtype=np.int32), [len(ids) for _, ids in lists]))
        staging.put(np.concatenate([ids for _, ids in lists]))
        which, at, ids = (part.long() for part in staging.ship())
        kept = logits[at, ids]
        logits.index_fill_(0, which, float("-inf"))
        logits[at, ids] = kept

    def _add(self, logits: Tensor, hosts: list[tuple[int, HostRow]], batch: SampleBatch) -> None:
        """Adds biases, and -inf to the stop ids of rows that have fewer than min_tokens out."""
        at, ids, values = [], [], []
        for j, host in hosts:
            early = batch.positions[j] - self._rows.num_prompt_tokens[batch.rows[j]] < host.params.min_tokens
            stops = host.stop_ids if early else host.stop_ids[:0]
            ids += [host.bias_ids, stops]
            values += [host.bias_values, np.full(len(stops), _NEVER, dtype=np.float32)]
            at.append(np.full(len(host.bias_ids) + len(stops), j, dtype=np.int32))
        staging = Staging(self._rows.device)
        for part in (np.concatenate(at), np.concatenate(ids), np.concatenate(values).view(np.int32)):
            staging.put(part)
        which, tokens, amounts = staging.ship()
        logits.index_put_((which.long(), tokens.long()), amounts.view(torch.float32), accumulate=True)

    def _ban_words(self, logits: Tensor, hosts: list[tuple[int, HostRow]], batch: SampleBatch) -> None:
        """Bans the last token of a bad word whose prefix ends the row's output."""
        words = [self._place(j, host.bad_words, batch) for j, host in hosts if host.bad_words is not None]
        if not words:
            return
        firsts = np.cumsum([0, *(len(placed[0]) for placed in words[:-1])])
        staging = Staging(self._rows.device)
        for parts in zip(*words, strict=True):
            staging.put(np.concatenate(parts).astype(np.int32))
        staging.put(np.concatenate([placed[3] + first for placed, first in zip(words, firsts, strict=True)]).astype(np.int32))
        which, banned, needed, _, row, position, token, entry = staging.ship()
        equal = (self._rows.token_ids[row.long(), position.long()] == token).int()
        matches = torch.zeros_like(needed).index_add_(0, entry.long(), equal)
        amounts = torch.where(matches == needed, float("-inf"), 0.0)
        logits.index_put_((which.long(), banned.long()), amounts, accumulate=True)

    def _place(self, j: int, words: BadWords, batch: SampleBatch) -> tuple[Ints, ...]:
        """For each word its sample, last token and how many prefix ids must match; for each prefix id its word, row, place and value."""
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
        slots = self._rows.counts.slots
        staging = Staging(self._rows.device)
        for part in (which, batch.rows[which], batch.positions[which]):
            staging.put(part)
        # Rows with a repetition penalty alone have no slot; their counts are multiplied by 0.
        staging.put(np.array([slots.get(int(row), 0) for row in batch.rows[which]], dtype=np.int32))
        at, rows, lengths, slot = (part.long() for part in staging.ship())
        longest = int(batch.positions[which].max())
        ids = self._rows.token_ids[rows, :longest].long()
        beyond = torch.arange(longest, device=ids.device)[None] >= lengths[:, None]
        ids = torch.where(beyond, ids[:, :1], ids)
        counts = self._rows.counts.counts[slot[:, None], ids].float() if slots else torch.zeros_like(ids, dtype=torch.float32)
        floats = self._rows.float_params(rows)
        penalties = (floats[:, _FLOAT[name]] for name in ("presence", "frequency", "repetition"))
        apply_penalties(logits, at, ids, counts, *penalties)

    def _count(self, tokens: Tensor, batch: SampleBatch, traits: Ints) -> None:
        counted = np.flatnonzero(traits & Trait.COUNTED).astype(np.int32)
        if len(counted):
            slots = np.array([self._rows.counts.slots[int(row)] for row in batch.rows[counted]], dtype=np.int32)
            self._rows.counts.add(ship(slots, self._rows.device), tokens[ship(counted, self._rows.device)])

    # --- logprobs

    def _score(self, raw: Tensor, source: Tensor, tokens: Tensor, batch: SampleBatch, traits: Ints) -> Scores:
        which = np.flatnonzero(traits & Trait.SCORED).astype(np.int32)
        num_best = tuple(self._rows.host[int(row)].params.logprobs or 0 for row in batch.rows[which])
        at = ship(which, self._rows.device)
        return Scores(which, num_best, *score_tokens(raw[source[at]], tokens[at], min(max(num_best), raw.shape[1])))
