"""Runs a decoder by hand: sequences in, logits out, over a paged cache with shuffled blocks. No scheduler, no worker.

What lives here: loading a decoder from a folder, and the driver that builds ForwardInputs. What may not: tests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import Kernels
from headrace.kernels.inputs import AttentionInputs, ForwardInputs, Queries
from headrace.models import families
from headrace.models.checkpoint import SafetensorsCheckpoint
from headrace.models.decoder import Decoder
from headrace.models.loader import load_weights
from headrace.models.weight_rules import ignored_keys, weight_rules
from headrace.spec import KVFormat, KVSpec, kv_groups

CPU = torch.device("cpu")


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    kernels: Kernels | None = None,
    kv: KVFormat | None = None,
    held: tuple[int, int] | None = None,
    pooled: tuple[int, ...] = (),
) -> Decoder:
    """A decoder ready to compute, from a Hugging Face checkpoint folder. ``held``: of one stage of a pipeline. ``pooled``:
    layers that lie elsewhere."""
    spec = families.spec_from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    spec = replace(spec, held=held)
    length = max_model_len or spec.max_positions
    how: dict[str, Any] = {"kernels": kernels or Kernels(CPU), "dtype": dtype, "device": CPU, "kv": kv}
    decoder = Decoder(spec, max_model_len=length, pooled=pooled, **how)
    if decoder.pool is not None:
        decoder.pool.settle(torch.empty(decoder.pool.num_bytes, dtype=torch.uint8))
    checkpoint = SafetensorsCheckpoint(folder)
    load_weights(decoder, checkpoint, weight_rules(spec), ignored_keys(spec), dtype)
    checkpoint.close()
    if decoder.pool is not None:
        decoder.pool.bind()
    decoder.finish_loading()
    return decoder


class PagedRun:
    """Feeds chunks of sequences to a decoder. Blocks are handed out in a shuffled order; what nobody wrote is NaN.

    A block that has left a sliding window is given back and poisoned, as the cache may hand it to another sequence.
    """

    def __init__(
        self, decoder: Decoder, *, block_size: int = 8, num_blocks: int = 64, seed: int = 0, kv: KVFormat | None = None
    ) -> None:
        self.decoder = decoder
        self._block_size = block_size
        dtype = decoder.embedding.weight.dtype
        self._groups = kv_groups(decoder.spec, block_size, dtype.itemsize, kv)
        self.caches = [_poisoned(group, num_blocks, dtype) for group in self._groups]
        shuffle = random.Random(seed)
        self._free = [shuffle.sample(range(1, num_blocks), num_blocks - 1) for _ in self._groups]  # block 0 stays NaN
        self._tables: list[dict[str, list[int]]] = [{} for _ in self._groups]
        self._lengths: dict[str, int] = {}

    def step(self, chunks: Mapping[str, Sequence[int]], *, last: bool = False) -> dict[str, Tensor]:
        """One forward pass over the next tokens of each named sequence. Returns each one's logits, [tokens, vocab];
        with ``last``, [1, vocab]."""
        starts = {name: self._lengths.get(name, 0) for name in chunks}
        counts = [1 if last else len(tokens) for tokens in chunks.values()]
        inputs = ForwardInputs(
            token_ids=torch.tensor([token for tokens in chunks.values() for token in tokens]),
            positions=torch.tensor([starts[name] + i for name, tokens in chunks.items() for i in range(len(tokens))]),
            attention=tuple(self._attention(index, chunks, starts) for index in range(len(self._groups))),
        )
        if last:
            seen = inputs.attention[0]
            every = torch.arange(len(chunks) + 1, dtype=torch.int32)
            inputs = replace(
                inputs, wanted=seen.query_start[1:] - 1, queries=Queries(every[:-1], seen.context_len, every)
            )
        with torch.inference_mode():
            hidden = self.decoder(inputs, self.caches)
            logits = self.decoder.logits(hidden)
        self._lengths.update({name: starts[name] + len(tokens) for name, tokens in chunks.items()})
        self._release()
        return dict(zip(chunks, logits.split(counts), strict=True))

    def _attention(self, index: int, chunks: Mapping[str, Sequence[int]], starts: Mapping[str, int]) -> AttentionInputs:
        counts = [len(tokens) for tokens in chunks.values()]
        ends = [starts[name] + len(tokens) for name, tokens in chunks.items()]
        tables = [self._grown_table(index, name, end) for name, end in zip(chunks, ends, strict=True)]
        width = max(map(len, tables))
        slots = [
            table[position // self._block_size] * self._block_size + position % self._block_size
            for (name, tokens), table in zip(chunks.items(), tables, strict=True)
            for position in range(starts[name], starts[name] + len(tokens))
        ]
        return AttentionInputs(
            block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            context_len=torch.tensor(ends, dtype=torch.int32),
            slots=torch.tensor(slots),
            block_size=self._block_size,
            max_query_len=max(counts),
            max_context_len=max(ends),
        )

    def _grown_table(self, index: int, name: str, end: int) -> list[int]:
        table = self._tables[index].setdefault(name, [])
        while len(table) * self._block_size < end:
            table.append(self._free[index].pop())
        return table

    def _release(self) -> None:
        """Blocks no later query can see: every position below length + 1 - window."""
        for index, group in enumerate(self._groups):
            for name, table in self._tables[index].items() if group.window is not None else ():
                gone = max(0, self._lengths[name] + 1 - group.window) // self._block_size
                for place in range(min(gone, len(table))):
                    if table[place]:
                        self.caches[index][table[place]] = float("nan") if group.format is None else 255
                        self._free[index].insert(0, table[place])
                        table[place] = 0


def _poisoned(group: KVSpec, num_blocks: int, dtype: torch.dtype) -> Tensor:
    if group.format is not None:
        return torch.full(
            (num_blocks, len(group.layers), 2, group.num_kv_heads, group.block_size, group.row_bytes),
            255,
            dtype=torch.uint8,
        )
    shape = (num_blocks, len(group.layers), 2, group.num_kv_heads, group.block_size, group.head_dim)
    return torch.full(shape, float("nan"), dtype=dtype)
