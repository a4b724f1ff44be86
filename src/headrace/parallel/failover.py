"""Ranks that hold experts only, beside what all of them have: where one dies whose experts others hold, too, the others
go on (Expert-as-a-Service: Liu et al. 2025).

Attention, the cache and sampling are on every rank, and each computes all rows of them, so ranks need each other for one
thing: the sum of what their experts say of a layer. Where one is gone, sums that are under way are cut short, and the
steps that wait for them are nothing; what the first rank had before is whole, for it had every sum of it:

    rank 0   step 41 | 42 waits | hears of it: 42 is lost | all three meet again, as two | 42 anew, of experts that
    rank 1   step 41 | dies                                                              |    share the rows anew
    rank 2   step 41 | 42 waits | is told                 |                              |

Rank 2 may have missed the last sum of step 41. So nothing is taken from the cache that was there before.

What lives here: who is left, for one rank. What may not: who has died (ranks.py), processes, which rank holds what
(placement.py), steps that are lost (scheduler/).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from headrace.errors import EngineDead
from headrace.parallel.frames import Gone
from headrace.parallel.group import Group
from headrace.parallel.placement import Layer, held_of, outlived
from headrace.spec import Held

ABORT_SECONDS = 20.0


class Survivors:
    """As a Group as far as layers need one. ``meet``: begins the group of those who are left. ``placement``: experts of
    each rank, by layer. ``create_id``: of the next group, where it has one."""

    def __init__(
        self,
        meet: Callable[[Gone], Group],
        rank: int,
        size: int,
        placement: Sequence[Layer],
        create_id: Callable[[], bytes] = bytes,
    ) -> None:
        self.rank, self.size = rank, size
        self.members = tuple(range(size))
        self._meet, self._placement, self._create_id = meet, placement, create_id
        self._epoch, self._told = 0, Gone(0, self.members)
        self._news = threading.Condition()
        self._aborts: threading.Thread | None = None
        self._group = meet(self._told)

    @property
    def backend(self) -> str:
        return f"{self._group.backend}; ranks may die whose experts others hold"

    @property
    def comm_ops(self) -> int:
        """Of those who are left."""
        return self._group.comm_ops

    def all_reduce(self, x: Tensor) -> Tensor:
        """Nonsense, or a RuntimeError, where ``broken``."""
        return self._group.all_reduce(x)

    def all_reduce_min(self, value: int) -> int:
        return self._group.all_reduce_min(value)

    def held(self, layer: int) -> tuple[Held, ...]:
        """What this rank has of a layer's experts, among those who are left."""
        placed = self._placement[layer]
        return held_of([each if rank in self.members else () for rank, each in enumerate(placed)], self.rank)

    @property
    def broken(self) -> bool:
        """Whether somebody is gone, and the others have not met since."""
        return self._told.epoch > self._epoch

    def breaks(self, seconds: float) -> bool:
        """Whether it is, or will be told within that time."""
        with self._news:
            return self._news.wait_for(lambda: self.broken, seconds)

    def can_lose(self, rank: int) -> bool:
        """Whether those who would be left have all experts; the first has the engine. One at a time."""
        left = [each for each in self.members if each != rank]
        return rank > 0 and not self.broken and outlived(self._placement, left)

    def without(self, rank: int) -> Gone:
        """What all are told where one is lost."""
        return Gone(self._epoch + 1, tuple(each for each in self.members if each != rank), self._create_id())

    def lose(self, told: Gone) -> None:
        """From any thread. Nobody is waited for any more, once it is known that what comes of that is nothing."""
        with self._news:
            self._told = told
            self._news.notify_all()
        self._aborts = threading.Thread(target=self._group.abort, daemon=True, name="headrace-abort")
        self._aborts.start()  # it may have to wait for captures that somebody has to drop

    def go_on(self) -> None:
        """Those who are left meet: once no step is under way, and nothing holds on to the group that is broken. Raises
        EngineDead."""
        if self._aborts is not None:
            self._aborts.join(ABORT_SECONDS)
        told = self._told
        try:
            self._group = self._meet(told)
            self._group.all_reduce_min(0)
        except RuntimeError as error:
            raise EngineDead("ranks that hold experts have lost each other; see `headrace doctor`.") from error
        self.members, self._epoch = told.members, told.epoch

    def abort(self) -> None:
        self._group.abort()
