"""Rows: what a worker remembers of each running sequence, on the device, edited by the deltas of StepPlans.

What lives here: the row tensors, penalty counts among them, what the host keeps beside them, and the packed staging copy that carries a
step's numbers to the device. What may not: inputs of a step (inputs.py gathers them from rows), sampling, decisions.

Rows are a cache of the scheduler's state: dropping all of them and adding them again gives the same next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.request import NewRow, StepPlan
from headrace.sampling_params import SamplingParams

Ints = NDArray[np.int32]
Edits = tuple[Sequence[int], Sequence[int], Sequence[int]]  # of one block table: rows, indices, blocks

# Columns of a row's parameters: float32 bits first, integers after them.
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INT_COLUMNS = ("top_k", "seed_low", "seed_high", "num_prompt_tokens")
_NUM_FLOATS = len(FLOAT_COLUMNS)
_SMALLEST_REPETITION = 1e-30  # a logit divided by less would be infinite in float32; to the choice it is the same


_ALIGNED = 4  # int32 values: every part begins at 16 bytes, so that kernels are not compiled again for parts that do not


class Staging:
    """Collects int32 arrays and ships them to the device in one copy; ``ship`` returns them in the order they were put."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Ints] = []

    def put(self, values: Ints) -> None:
        self._parts.append(values)

    def ship(self) -> list[Tensor]:
        sizes = [part.size for part in self._parts]
        starts = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)])
        host = torch.empty(int(starts[-1]), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        packed = host.numpy()
        for part, start in zip(self._parts, starts, strict=False):
            packed[start : start + part.size] = part.ravel()
        shipped = host.to(self._device, non_blocking=True)
        return [shipped[start : start + size] for start, size in zip(starts.tolist(), sizes, strict=False)]


def ship(values: Ints, device: torch.device) -> Tensor:
    """One array as indices: int64, on the device."""
    staging = Staging(device)
    staging.put(values)
    return staging.ship()[0].long()


@dataclass(frozen=True, slots=True)
class BadWords:
    """Banned token sequences of one row, flat. Entry e bans ``last[e]`` when its ``lengths[e]`` prefix ids end the output."""

    last: Ints  # [entries]
    lengths: Ints  # [entries]
    prefix: Ints  # [Σ lengths]
    entry: Ints  # [Σ lengths]: which entry each prefix id belongs to
    distance: Ints  # [Σ lengths]: how far before the next output position each must stand, from 1


class Trait(IntFlag):
    """What a row's sampling needs beyond the argmax of its raw logits."""

    RANDOM = 1  # temperature above 0
    FILTERED = 2  # top-k, top-p or min-p
    EDITED = 4  # a mask, bias, allowed ids, bad words, min_tokens
    PENALISED = 8
    COUNTED = 16  # a presence or frequency penalty: occurrences in the output are counted
    SCORED = 32  # logprobs


@dataclass(frozen=True, slots=True)
class HostRow:
    """What the host must know of a row without asking the device."""

    params: SamplingParams
    traits: Trait
    stop_ids: Ints
    allowed_ids: Ints | None
    bias_ids: Ints
    bias_values: NDArray[np.float32]
    bad_words: BadWords | None


def _host_row(new: NewRow, vocab_size: int) -> HostRow:
    params, bias = new.params, new.params.logit_bias or {}
    return HostRow(
        params=params,
        traits=_traits(params, bad_words=bool(new.bad_word_ids)),
        stop_ids=np.array([token for token in new.stop_token_ids if token < vocab_size], dtype=np.int32),  # a checkpoint's EOS may have no logit
        allowed_ids=None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids, dtype=np.int32)),
        bias_ids=np.array(list(bias), dtype=np.int32),
        bias_values=np.array(list(bias.values()), dtype=np.float32),
        bad_words=_bad_words(new.bad_word_ids),
    )


def _traits(p: SamplingParams, *, bad_words: bool) -> Trait:
    counted = p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    holds = {
        Trait.RANDOM: not p.greedy,
        Trait.FILTERED: p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0,
        Trait.EDITED: bad_words or bool(p.logit_bias) or _limits_tokens(p),
        Trait.PENALISED: counted or p.repetition_penalty != 1.0,
        Trait.COUNTED: counted,
        Trait.SCORED: p.logprobs is not None,
    }
    return Trait(sum(trait for trait, held in holds.items() if held))


def _limits_tokens(p: SamplingParams) -> bool:
    return p.allowed_token_ids is not None or p.min_tokens > 0 or p.structured_outputs is not None


def _bad_words(words: tuple[tuple[int, ...], ...]) -> BadWords | None:
    words = tuple(word for word in words if word)
    if not words:
        return None
    lengths = np.array([len(word) - 1 for word in words], dtype=np.int32)
    return BadWords(
        last=np.array([word[-1] for word in words], dtype=np.int32),
        lengths=lengths,
        prefix=np.array([token for word in words for token in word[:-1]], dtype=np.int32),
        entry=np.repeat(np.arange(len(words), dtype=np.int32), lengths),
        distance=np.array([len(word) - 1 - i for word in words for i in range(len(word) - 1)], dtype=np.int32),
    )


def _param_bits(new: NewRow) -> Ints:
    p = new.params
    repetition = max(p.repetition_penalty, _SMALLEST_REPETITION)
    floats = (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, repetition)
    seed = new.seed & 0xFFFFFFFFFFFFFFFF
    ints = (max(p.top_k, 0), seed & 0xFFFFFFFF, seed >> 32, new.num_prompt_tokens)
    return np.concatenate([np.array(floats, np.float32).view(np.int32), np.array(ints, np.uint32).view(np.int32)])


def lazy_zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 zeros; on a CPU the operating system provides them page by page at first touch."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)


class Rows:
    """The persistent state of all rows of one worker.

    ``token_ids[row, i]`` is token i of the row's sequence: known ids are written when the row is built, sampled ones where
    they were sampled, so that a later step finds them without the host.
    """

    def __init__(self, max_rows: int, max_model_len: int, vocab_size: int, block_sizes: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.block_sizes = tuple(block_sizes)
        self.token_ids = lazy_zeros((max_rows, max_model_len), device)
        self.tables = tuple(lazy_zeros((max_rows, -(-max_model_len // size)), device) for size in block_sizes)  # [rows, blocks] a group
        self.params = lazy_zeros((max_rows, _NUM_FLOATS + len(INT_COLUMNS)), device)  # bits
        self.counts = lazy_zeros((max_rows, vocab_size), device)  # occurrences in the output, for rows that count them
        self.host: dict[int, HostRow] = {}
        self.traits = np.zeros(max_rows, dtype=np.int32)  # Trait bits, so that a step asks about all its rows at once
        self.num_prompt_tokens = np.zeros(max_rows, dtype=np.int32)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.token_ids, *self.tables, self.params, self.counts))

    def apply(self, plan: StepPlan) -> None:
        """Drops rows, builds rows, edits block tables: the part of a plan that changes rows before anything is computed."""
        self.drop(plan)
        if not plan.rows_added and not plan.table_row:
            return
        added = tuple({new.row: new for new in plan.rows_added}.values())  # a row given away twice in a plan is the last one's
        edits = [_table_edits(plan, group) for group in range(len(self.tables))]
        staged = self._stage(added, edits)
        if added:
            self._build(added, staged)
        for group, table in enumerate(self.tables):
            which, index, block = staged[len(staged) - 3 * (len(self.tables) - group) :][:3]
            table[which.long(), index.long()] = block

    def drop(self, plan: StepPlan) -> None:
        for row in plan.rows_dropped:
            self.host.pop(row, None)

    def edits_of(self, plan: StepPlan) -> Edits | None:
        """(rows, indices, blocks): all that ``apply`` would do besides dropping rows, in any order, no more than rows the plan has. None: it
        would do more."""
        count = len(plan.table_row)
        if plan.rows_added or len(self.tables) > 1 or count > len(plan.rows):
            return None
        if count > 1 and len({*zip(plan.table_row, plan.table_index, strict=True)}) < count:
            return None
        return plan.table_row, plan.table_index, plan.table_block

    def clear(self) -> None:
        self.host.clear()

    def _stage(self, added: tuple[NewRow, ...], edits: list[Ints]) -> list[Tensor]:
        staging = Staging(self.device)
        if added:
            staging.put(np.array([new.row for new in added], dtype=np.int32))
            staging.put(np.concatenate([_param_bits(new) for new in added]))
            for new in added:
                staging.put(np.asarray(new.token_ids, dtype=np.int32))
        for edit in edits:
            for column in edit:
                staging.put(column)
        return staging.ship()

    def _build(self, added: tuple[NewRow, ...], staged: list[Tensor]) -> None:
        self.params[staged[0].long()] = staged[1].view(len(added), -1)
        for new, tokens in zip(added, staged[2:], strict=False):
            self.token_ids[new.row, : len(tokens)] = tokens
            self.host[new.row] = host = _host_row(new, self.counts.shape[1])
            self.traits[new.row] = host.traits
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
            if host.traits & Trait.COUNTED:
                self._count_outputs(new.row, tokens[new.num_prompt_tokens :].long())

    def _count_outputs(self, row: int, output_ids: Tensor) -> None:  # [outputs], int64
        counts = self.counts[row]
        counts.zero_()
        counts.index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def float_params(self, rows: Tensor) -> Tensor:  # [n] → [n, FLOAT_COLUMNS], float32
        return self.params[rows][:, :_NUM_FLOATS].view(torch.float32)

    def int_params(self, rows: Tensor) -> Tensor:  # [n] → [n, INT_COLUMNS], int64; seed words are 32 bits, unsigned
        return self.params[rows][:, _NUM_FLOATS:].long()


def _table_edits(plan: StepPlan, group: int) -> Ints:
    """(row, index, block) [3, edits] of one group; of two edits of one place the later one holds."""
    rows, groups = np.asarray(plan.table_row, dtype=np.int32), np.asarray(plan.table_group, dtype=np.int32)
    edits = np.stack([rows, np.asarray(plan.table_index, dtype=np.int32), np.asarray(plan.table_block, dtype=np.int32)])
    edits = edits[:, groups == group]
    places = edits[0].astype(np.int64) << 32 | edits[1]
    _, last = np.unique(places[::-1], return_index=True)
    return edits if len(last) == len(places) else edits[:, len(places) - 1 - last]
