"""Pinned memory that is written again and again while copies from it, or into it, are under way.

What lives here: rings of pinned buffers guarded by events. What may not: what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headrace.worker.rows import Ints

_SLOTS = 4  # one more than steps can be in flight, so that nobody waits


class PinnedRing:
    """int32 buffers on the host, used in turn. A buffer is given out again only once the copies queued from it have run."""

    def __init__(self, shape: tuple[int, ...], slots: int = _SLOTS, stream: torch.cuda.Stream | None = None) -> None:
        """``stream``: where copies are queued; None asks for the current one each time, which takes a while."""
        self._tensors = [torch.zeros(shape, dtype=torch.int32, pin_memory=True) for _ in range(slots)]
        self._views: list[Ints] = [tensor.numpy() for tensor in self._tensors]
        self._copied: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(slots)]
        self._on = () if stream is None else (stream,)
        self._at = 0

    @property
    def tensor(self) -> Tensor:
        """The buffer given out last."""
        return self._tensors[self._at]

    @contextmanager
    def slot(self) -> Iterator[Ints]:
        """The next buffer, to be filled and copied from within the block."""
        self._at = (self._at + 1) % len(self._tensors)
        self._copied[self._at].synchronize()  # at once, as a rule: its step was collected long ago
        yield self._views[self._at]
        self._copied[self._at].record(*self._on)
