"""Blocks out of the KV cache into memory that replicas share, and from there into another replica's cache.

On a GPU that memory is pinned, and copies have a stream of their own, beside whatever step is under way: the blocks are
those that no step in flight touches. ``move`` returns when all is copied.

What lives here: the copies. What may not: which blocks, when (disagg/hand_over.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from headrace.disagg.staging import Staging
from headrace.engine.executor import ExportBlocks, ImportBlocks


class BlockMover:
    """``caches``: of each KV group all that lies under a block's number, first dimension blocks: keys and values,
    perhaps a draft model's, too."""

    def __init__(self, staging: Staging, caches: Sequence[Sequence[Tensor]]) -> None:
        self._staging = staging
        self._caches = [
            [each.view(torch.uint8).view(len(each), -1) if len(each) else each for each in group] for group in caches
        ]
        self._shared = torch.frombuffer(staging.map, dtype=torch.uint8)
        device = caches[0][0].device
        self._stream = None
        if device.type == "cuda":
            cudart = torch.cuda.cudart()
            for region in range(staging.replicas):
                begin = self._shared.data_ptr() + staging.offset(region, 0)
                torch.cuda.check_error(cudart.cudaHostRegister(begin, staging.region_bytes, 0))
            self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def move(self, order: ExportBlocks) -> None:
        """Imports raise HeadraceError where something else lies there: the blocks then hold nothing of use."""
        brings, staging = isinstance(order, ImportBlocks), self._staging
        (staging.check if brings else staging.clear)(order)
        with self._copying():
            for shared, block in self._pairs(order):
                source, target = (shared, block) if brings else (block, shared)
                target.copy_(source, non_blocking=True)
        (staging.check if brings else staging.seal)(order)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """What is copied within is there at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _pairs(self, order: ExportBlocks) -> Iterator[tuple[Tensor, Tensor]]:
        """(where it lies in shared memory, the block), of each cache."""
        for slot, blocks in zip(order.slots, order.blocks, strict=True):
            at = self._staging.offset(order.source, slot)
            for held, caches, width in zip(blocks, self._caches, self._staging.widths, strict=True):
                begin = at
                for block, cache in product(held, caches):
                    size = cache.shape[1]
                    yield self._shared[begin : begin + size], cache[block]
                    begin += size
                assert begin <= at + width, "blocks are as large as the cache says"
                at += width
