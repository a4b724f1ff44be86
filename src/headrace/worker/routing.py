"""Which experts rows choose, written down while an engine runs.

What lives here: that record. What may not: what is made of it (parallel/balance.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor

from headrace.kernels.moe.reference import route
from headrace.layers.moe import SparseFeedForward
from headrace.models.decoder import Block, Decoder


class Routing:
    """From now on, of every row that the sparse layers of ``decoder`` compute. Rows of replayed steps are not seen:
    the engine must launch its kernels one by one."""

    def __init__(self, decoder: Decoder) -> None:
        self._seen: dict[int, list[Tensor]] = {}
        for index, layer in enumerate(decoder.spec.layers):
            if index in decoder.spec.held_layers and layer.moe is not None:
                seen = self._seen[index] = list[Tensor]()
                sparse = cast(SparseFeedForward, cast(Block, decoder.layers[index]).feed_forward)
                sparse.watch(partial(self._see, seen, layer.moe.top_k))

    def take(self) -> Iterator[tuple[int, Tensor]]:
        """(layer, choices [rows, top_k] int16) of what was computed since the last time."""
        for index, steps in self.take_steps():
            yield index, torch.cat(steps) if steps else torch.empty(0, 1, dtype=torch.int16)

    def take_steps(self) -> Iterator[tuple[int, list[Tensor]]]:
        """The same, step by step."""
        for index, seen in self._seen.items():
            yield index, list(seen)
            seen.clear()

    @staticmethod
    def _see(seen: list[Tensor], top_k: int, x: Tensor, router_logits: Tensor) -> None:
        seen.append(route(router_logits, top_k, renormalize=False)[1].to("cpu", torch.int16))
