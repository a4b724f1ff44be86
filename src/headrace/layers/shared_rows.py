"""Rows of the residual stream that the ranks of a layer share out between its halves (sequence parallel: Korthikanti et al.
2022), and rows that go to the ranks of their experts and back (expert parallel: GShard, Lepikhin et al. 2021).

    rows of a step   output, partial sums of all rows | reduce-scatter | residual and norm of a rank's rows | all-gather | qkv, up

What lives here: that, of one step or layer. What may not: when it is done (cost/links.py), kernels, layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.moe.reference import route
from headrace.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Sharing:
    """From how many rows of a step on they are shared out, and from how many on they go to their experts; None: never."""

    least: int | None = None
    dispatched: int | None = None


NONE_SHARED = Sharing()


@dataclass(frozen=True, slots=True)
class SharedRows:
    """``rows`` of a step: the first ranks have equally many, and what the last lack is filled up with zeros."""

    group: Group
    rows: int

    @property
    def each(self) -> int:
        return -(-self.rows // self.group.size)

    def own(self, x: Tensor) -> Tensor:  # [rows, width] → [each, width]
        return self._filled(x)[self.group.rank * self.each :][: self.each]

    def total(self, x: Tensor) -> Tensor:
        """Reduce-scatter: [rows, width] of every rank → the sums of the rank's rows, [each, width]."""
        return self.group.reduce_scatter(self._filled(x))

    def gathered(self, x: Tensor) -> Tensor:  # [each, width] → [rows, width]
        return self.group.all_gather_stacked(x).flatten(0, 1)[: self.rows]

    def _filled(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, lacks)) if (lacks := self.each * self.group.size - len(x)) else x


class Dispatch:
    """Of one sparse layer, whose experts ``group`` has between them. ``held``: [experts], the rank's own."""

    def __init__(self, group: Group, top_k: int, held: Tensor) -> None:
        self._group, self._top_k, self._held = group, top_k, held
        self._ranks: Tensor | None = None  # [experts], who holds each

    def possible(self) -> bool:
        """Each expert is on one rank. Asked by all ranks at once."""
        if self._ranks is None:
            held = self._group.all_gather_stacked(self._held.to(torch.uint8))
            self._ranks = held.argmax(0) if int(held.sum(0).max()) == 1 else held.new_empty(0)
        return len(self._ranks) > 0

    def forward(self, x: Tensor, router_logits: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """[rows, hidden] of this rank, and [rows, experts] → what the experts say of them, by ``experts`` of such rows,
        each rank's own. Rows go once to each rank with experts of theirs; sizes are read on the host."""
        assert self._ranks is not None, "asked whether it is possible"
        group, (count, width) = self._group, x.shape
        goes = torch.zeros(count, group.size, dtype=torch.int32, device=x.device)
        goes.scatter_(1, self._ranks[route(router_logits, self._top_k, renormalize=False)[1]], 1)
        counts = group.all_gather_stacked(goes.sum(0, dtype=torch.int32)).tolist()  # of rows from each to each
        sends, receives = counts[group.rank], [each[group.rank] for each in counts]
        rows = goes.t().nonzero()[:, 1]
        both = torch.cat([x, router_logits.to(x.dtype)], dim=1)
        come = group.all_to_all(both[rows], sends, receives)
        found, logits = (each.contiguous() for each in come.split([width, both.shape[1] - width], dim=1))
        back = group.all_to_all(experts(found, logits) if len(found) else found, receives, sends)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for at, part in zip(rows.split(sends), back.split(sends), strict=True):  # no row twice: sums have one order
            out.index_add_(0, at, part.float())
        return out.to(x.dtype)
