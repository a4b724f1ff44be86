"""Which adapters may be in one step, and who may start with those that are.

What lives here: that choice. What may not: torch, requests' order (scheduler/step_planner.py goes through them in it),
slots and blocks (cache/adapters.py), host memory (registry.py).

Where as many adapters run as a step may have, the first in order that has another one claims the one with the fewest
sequences: that adapter admits nobody behind it, so its place comes free. The others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.cache.adapters import AdapterBlocks


class Claims:
    """As those who start in one pass change what runs, whether or not that is carried out. ``most``: adapters of one
    step; ``running``: of the sequences that run."""

    def __init__(self, books: AdapterBlocks, most: int, running: Iterable[str | None]) -> None:
        self._books = books
        self._most = most
        self._users = Counter(each for each in running if each is not None)
        self._claimed: set[str] = set()

    def admits(self, adapter: str | None) -> bool:
        """Whether one that has it may start; if not, another adapter has been claimed for it, if there was one."""
        if adapter is None:
            return True
        if self._users[adapter]:
            return adapter not in self._claimed
        if len(+self._users) < self._most:
            return self._books.can_place(adapter)
        others = [each for each in +self._users if each not in self._claimed]
        if others:
            self._claimed.add(min(others, key=self._users.__getitem__))
        return False

    def to_take(self, adapter: str | None) -> int:
        """Blocks of the first KV group that one takes with its adapter when it starts."""
        if adapter is None or not self._books.is_shared or self._users[adapter]:
            return 0
        return self._books.to_take(adapter)

    def take(self, adapter: str | None) -> None:
        """It starts."""
        if adapter is not None:
            self._users[adapter] += 1
