"""Layers that do not lie on the device: their matrices are in a peer's memory, and come ahead of their turn into places that
such layers share (peer memory pooling: EnergonAI, Du et al. 2022).

    computed   | layer 0 | pooled 1 | layer 2 | layer 3 | pooled 4 | layer 5 | …    with one place
    fetched              | …        | 4                 |          | 1 of the next step

What lives here: whose matrices, their places, fetching. What may not: whose memory it is (parallel/peer_memory.py), what
a layer computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.parallel.stages import places_for

_LINE = 512  # bytes: where tensors begin, as torch's own do


class LayerPool:
    """Of layers in the order in which they are computed, created without memory ("meta"). Use: ``settle``, load, ``bind``,
    before they finish loading. Their weights are used as they are stored."""

    def __init__(self, layers: Mapping[int, nn.Module], device: torch.device) -> None:
        self._layers, self._device = list(layers.values()), device
        self._places = places_for(list(layers))
        self._matrices: list[dict[str, int]] = []  # of each layer: where each begins, by name
        self._sizes: list[int] = []
        for layer in self._layers:
            starts, size = dict[str, int](), 0
            for name, each in layer.named_parameters():
                if each.dim() > 1:
                    starts[name] = size
                    size += -(-each.nbytes // _LINE) * _LINE
            self._matrices.append(starts)
            self._sizes.append(size)
        self._held: list[Tensor] = []  # of each layer, in the peer's memory
        self._own: list[Tensor] = []  # of each place, here
        self._come: list[Callable[[], object]] = [lambda: None] * self._places
        self._fetcher = ThreadPoolExecutor(1, "headrace-layers") if device.type == "cpu" else None
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def saved(self) -> int:
        """Bytes that need not be on the device."""
        return self.num_bytes - self._places * max(self._sizes)

    def settle(self, memory: Tensor) -> None:  # [num_bytes], uint8
        """Matrices lie there from now on, the rest on the device."""
        self._held = list(memory.split(self._sizes))
        for layer, starts, held in zip(self._layers, self._matrices, self._held, strict=True):
            for name, each in list(layer.named_parameters()):
                owner, _, own = name.rpartition(".")
                data = (
                    _view(each, held, starts[name])
                    if name in starts
                    else torch.empty(each.shape, dtype=each.dtype, device=self._device)
                )
                setattr(layer.get_submodule(owner), own, nn.Parameter(data, requires_grad=False))

    def bind(self) -> None:
        """What is filled stays where it is; layers compute with what is in their places."""
        size = max(self._sizes)
        self._own = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(self._places)]
        for at, (layer, starts) in enumerate(zip(self._layers, self._matrices, strict=True)):
            for name, begin in starts.items():
                each = layer.get_parameter(name)
                each.data = _view(each, self._own[at % self._places], begin)
            layer.forward = partial(self._run, at, layer.forward)
        self._begin()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Layers are computed within, in their order: whatever ends it, the next one, or a graph, finds the first layers
        in their places."""
        try:
            yield
        except BaseException:
            self._come = [lambda: None] * self._places
            if self._side is None or not torch.cuda.is_current_stream_capturing():  # else nothing has been computed
                self._begin()
            raise
        self._join()

    def _begin(self) -> None:
        for at in range(self._places):
            self._fetch(at)
        self._join()

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
            self._come = [lambda: None] * self._places

    def _run(self, at: int, forward: Callable[..., Any], *given: Any) -> Any:
        self._come[at % self._places]()
        found = forward(*given)
        after = at + self._places
        self._fetch(after if after < len(self._layers) else at % self._places)
        return found

    def _fetch(self, at: int) -> None:
        """Once all that is queued has been computed."""
        place = at % self._places
        held, own = self._held[at], self._own[place][: self._sizes[at]]
        if self._fetcher is not None:
            coming: Future[Tensor] = self._fetcher.submit(own.copy_, held)
            self._come[place] = coming.result
        elif self._side is not None:
            main = torch.cuda.current_stream(self._device)
            self._side.wait_stream(main)
            with torch.cuda.stream(self._side):
                own.copy_(held, non_blocking=True)
                self._come[place] = partial(main.wait_event, self._side.record_event())


def _view(like: Tensor, held: Tensor, begin: int) -> Tensor:
    count = math.prod(like.shape) * like.itemsize
    return held[begin : begin + count].view(like.dtype).view(like.shape)
