"""An arena in which what is dead is NaN, so that whoever reads it shows.

What lives here: that arena. What may not: tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.worker.arena import Arena, Planned, Shape


class _Poisoned(Planned):
    """Before a result is handed out, all that were let go since the one before are overwritten."""

    def take(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self.differed:
            self._poison(self.given)
        made = super().take(shape, dtype, device)
        return made.fill_(float("nan"))

    def _poison(self, asked: int) -> None:
        for end, view in zip(self.trace.ends, self.results.views, strict=True):
            if end == asked and view is not None:
                view.fill_(float("nan"))


class PoisonedArena(Arena):
    PLANNED = _Poisoned

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        give_back = self.buffer.give_back

        def poisoned() -> None:
            for view in self.buffer._whole.values():
                view.as_strided((self.buffer.size // view.element_size(),), (1,), 0).fill_(float("nan"))
            give_back()

        self.buffer.give_back = poisoned  # type: ignore[method-assign]
