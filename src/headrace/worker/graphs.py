"""CUDA graphs of decode steps: the forward pass of a batch bucket, launched as one.

A decode step of a small model is a few hundred kernels of a few microseconds each; launched one by one they wait for the host.
A bucket is captured between two steps after its second eager use, largest tensors shared, and replayed from then on. Rows that fill
a batch up to its bucket have no context and write no KV (slot -1).

What lives here: the buckets, their static inputs, capture and replay. What may not: what a step computes (models/), row state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.layers.inputs import AttentionInputs, ForwardInputs

USES_BEFORE_CAPTURE = 2  # eager: kernels are compiled and their first-use costs paid outside the capture


class Forward(Protocol):
    def forward(self, inputs: ForwardInputs, kv_caches: Sequence[Tensor]) -> Tensor: ...


def buckets_up_to(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every multiple of 8."""
    return tuple(size for size in (1, 2, 4, *range(8, max_num_seqs + 8, 8)) if size < max_num_seqs + 8)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor  # [bucket, hidden], written by every replay


class DecodeGraphs:
    """One graph a bucket over static inputs of the largest one. ``block_sizes`` and ``table_widths``: one entry a KV group."""

    def __init__(
        self,
        decoder: Forward,
        kv_caches: Sequence[Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._kv_caches = tuple(kv_caches)
        self._buckets = buckets_up_to(max_num_seqs)
        self._max_model_len = max_model_len
        self._uses: Counter[int] = Counter()
        self._captured: dict[int, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        largest = self._buckets[-1]
        self._static = _static_inputs(largest, max_model_len, block_sizes, device)

    def forward(self, inputs: ForwardInputs) -> Tensor | None:
        """Hidden states of a step in which every sequence computes one token, [sequences, hidden]; None: run it eagerly this time.

        The result is overwritten by the next replay; work queued on the same stream before that sees it.
        """
        count = inputs.token_ids.shape[0]
        bucket = next((size for size in self._buckets if size >= count), None)
        if bucket is None:
            return None
        captured = self._captured.get(bucket)
        if captured is None:
            self._uses[bucket] += 1
            if self._uses[bucket] <= USES_BEFORE_CAPTURE:
                return None
        self._fill(inputs, count, bucket)
        if captured is None:
            captured = self._captured[bucket] = self._capture(bucket)
        captured.graph.replay()
        return captured.hidden[:count]

    def _fill(self, inputs: ForwardInputs, count: int, bucket: int) -> None:
        """Copies one step's inputs into the static ones; rows beyond ``count`` see nothing and write nothing."""
        static = self._static
        static.token_ids[:count].copy_(inputs.token_ids)
        static.positions[:count].copy_(inputs.positions)
        static.token_ids[count:bucket].zero_()
        static.positions[count:bucket].zero_()
        for own, given in zip(static.attention, inputs.attention, strict=True):
            own.block_table[:count, : given.block_table.shape[1]].copy_(given.block_table)
            own.context_len[:count].copy_(given.context_len)
            own.context_len[count:bucket].zero_()
            own.slots[:count].copy_(given.slots)
            own.slots[count:bucket].fill_(-1)

    def _capture(self, bucket: int) -> _Captured:
        inputs = _first(self._static, bucket, self._max_model_len)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._decoder.forward(inputs, self._kv_caches)
        return _Captured(graph, hidden)


def _static_inputs(rows: int, max_model_len: int, block_sizes: Sequence[int], device: torch.device) -> ForwardInputs:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    attention = tuple(
        AttentionInputs(
            block_table=zeros(rows, -(-max_model_len // block_size), dtype=torch.int32),
            query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context_len=zeros(rows, dtype=torch.int32),
            slots=zeros(rows, dtype=torch.int64),
            block_size=block_size,
            max_query_len=1,
            max_context_len=max_model_len,
        )
        for block_size in block_sizes
    )
    every = torch.arange(rows, dtype=torch.int64, device=device)
    return ForwardInputs(zeros(rows, dtype=torch.int64), zeros(rows, dtype=torch.int64), attention, every)


def _first(static: ForwardInputs, count: int, max_model_len: int) -> ForwardInputs:
    """The first ``count`` rows: views, so that a graph captured over them reads what is filled in later."""
    attention = tuple(
        AttentionInputs(
            each.block_table[:count], each.query_start[: count + 1], each.context_len[:count], each.slots[:count], each.block_size, 1, max_model_len
        )
        for each in static.attention
    )
    return ForwardInputs(static.token_ids[:count], static.positions[:count], attention, static.logits_rows[:count])
