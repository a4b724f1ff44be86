"""Ranks that hold experts only, beside what all of them have: where one dies whose experts others hold, too, the others
go on (Expert-as-a-Service: Liu et al. 2025).

Attention, the cache and sampling are on every rank, and each computes all rows of them, so ranks need each other for one
thing: the sum of what their experts say of a layer. A sum that somebody missed is made again, by those who are left:

    rank 0   sum 41 (done) | sum 42 broken |            | 42 again, by 0 and 2, of experts that share the rows anew
    rank 1   sum 41 (done) | dies
    rank 2   sum 41 broken |               | 41 from 0  | 42 again

Nobody is further than one sum ahead of another, so whoever has the last one gives it to those who have not, to the bit.

What lives here: that, for one rank. What may not: who has died (ranks.py), processes, which rank holds what
(placement.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.errors import EngineDead
from headrace.parallel.group import Group
from headrace.parallel.placement import Layer, held_of, outlived
from headrace.spec import Held

WORD_SECONDS = 30.0  # until it is known who has died: a rank that is silent is lost after 20
Meet = Callable[[int, tuple[int, ...]], Group]


class Survivors:
    """``meet``: the group of these ranks, of the so manieth time that they meet. ``placement``: experts of each rank, by
    layer."""

    account = "gloo; ranks may die whose experts others hold"

    def __init__(self, meet: Meet, rank: int, size: int, placement: Sequence[Layer]) -> None:
        self.rank, self.size = rank, size
        self.members = tuple(range(size))
        self.meetings = 0  # sums so far
        self._meet, self._placement = meet, placement
        self._epoch = 0
        self._told = 0, self.members
        self._news = threading.Condition()
        self._over = False
        self._last: Tensor | None = None  # sum
        self._group = meet(0, self.members)
        self.least = self._group.least  # asked before anybody computes

    def held(self, layer: int) -> tuple[Held, ...]:
        """What this rank has of a layer's experts, among those who are left."""
        placed = self._placement[layer]
        return held_of([each if rank in self.members else () for rank, each in enumerate(placed)], self.rank)

    def can_lose(self, rank: int) -> bool:
        """Whether those who would be left have all experts; the first has the engine."""
        return rank > 0 and outlived(self._placement, [each for each in self._told[1] if each != rank])

    def lose(self, epoch: int, members: tuple[int, ...]) -> None:
        """From any thread: from now on these are left."""
        with self._news:
            self._told = epoch, members
            self._news.notify_all()
        self._group.abort()  # one that is being made is not this yet

    def without(self, rank: int) -> tuple[int, tuple[int, ...]]:
        """What all are told where one is lost."""
        epoch, members = self._told
        return epoch + 1, tuple(each for each in members if each != rank)

    def abort(self) -> None:
        with self._news:
            self._over = True
            self._news.notify_all()
        self._group.abort()

    def summed(self, compute: Callable[[], Tensor]) -> Tensor:
        """The sum of what all ranks ``compute`` of one layer, each of the experts that it holds by then."""
        while True:
            part = compute()
            try:
                found = self._missed(part) if self._told[0] > self._epoch else self._group.all_reduce(part)
            except RuntimeError:  # somebody is gone
                self._await_news()
                continue
            if found is not None:
                self.meetings += 1
                self._last = found.clone()
                return found

    def _await_news(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._over or self._told[0] > self._epoch, WORD_SECONDS)
            if self._over or self._told[0] <= self._epoch:
                raise EngineDead("ranks that hold experts have lost each other; restart, and see `headrace doctor`.")

    def _missed(self, part: Tensor) -> Tensor | None:
        """Meets those who are left. The sum that this rank waits for, if another has it already. ``part``: like it."""
        epoch, members = self._told
        self._group = group = self._meet(epoch, members)
        self.members, self._epoch = members, epoch
        most, least = -group.least(-self.meetings), group.least(self.meetings)
        if most == least:
            return None
        ahead = self.meetings == most
        giver = group.least(self.rank if ahead else self.size)
        given = self._last if ahead and self._last is not None else part
        found = group.all_reduce(given.clone() if self.rank == giver else torch.zeros_like(given))
        return None if ahead else found
