"""Ranks that share one GPU, ``--ranks-per-device``: NCCL connects no two of them, so sums go in one shot, through memory
that both processes map, and what no kernel of ours carries goes through the host.

What lives here: that, as nccl.py's Communicator has it. What may not: the kernel (one_shot.py), who shares a GPU
(device.py). The processes take turns on the device: it shows that tokens are right, and not how fast ranks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headrace.parallel.group import GlooGroup
from headrace.parallel.one_shot import OneShot

_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


class OneDevice:
    """``host``: the same ranks there. ``sums``: in one shot, once they have been tried out; only these are captured."""

    def __init__(self, host: GlooGroup, sums: Callable[[], OneShot | None]) -> None:
        self.rank, self.size = host.rank, host.size
        self._host, self._sums = host, sums

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Of any size: as many launches as it takes."""
        sums, flat = self._sums(), x.view(-1)
        if sums is None or x.dtype not in _SUMMED:
            return x.copy_(self._host.all_reduce(x.cpu()))
        padded = flat
        if x.nbytes % 16 or x.data_ptr() % 16:
            padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
            padded[: flat.numel()] = flat
        for piece in padded.split(16 * sums.lines // x.itemsize) if flat.numel() else ():
            sums.add(piece, self.stream)
        return x if padded is flat else x.copy_(padded[: flat.numel()].view_as(x))

    def all_gather_stacked(self, x: Tensor) -> Tensor:
        return self.gather(x, x.new_empty((self.size, *x.shape)))

    def gather(self, x: Tensor, parts: Tensor) -> Tensor:
        """A sum with zeros is what was there."""
        if self._sums() is None or x.dtype not in _SUMMED:
            return parts.copy_(self._host.all_gather_stacked(x.cpu()))
        parts.zero_()[self.rank] = x
        return self.all_reduce(parts)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def all_to_all(self, x: Tensor, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> Tensor:
        return self._host.all_to_all(x.cpu(), sends, receives).to(x.device)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_reduce_min(self, value: int) -> int:
        return self._host.all_reduce_min(value)

    def abort(self) -> None:
        self._host.abort()
