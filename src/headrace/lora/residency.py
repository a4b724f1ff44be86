"""Which adapter is in which slot of the device, and who may start with the slots as they are.

What lives here: the slots' books. What may not: torch, requests' order (scheduler/step_planner.py goes through them in
it), host memory (registry.py).

A slot whose adapter no running sequence has may be given away, the one used longest ago first: steps in flight that
still name it are ahead of the one that changes it. Where all are in use, the first in order that finds none claims the
slot with the fewest sequences: its adapter admits nobody behind that one, so the slot comes free. The others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Residency:
    def __init__(self, slots: int) -> None:
        self.slots: list[str | None] = [None] * slots
        self._used = [-1] * slots  # the last step that admitted somebody with it
        self.num_brought = 0

    def claims(self, running: Iterable[str | None]) -> Claims:
        """For one pass over those who wait. ``running``: adapters of the sequences that run."""
        return Claims(list(self.slots), list(self._used), Counter(each for each in running if each is not None))

    def place(self, adapter: str, slot: int, step_id: int) -> bool:
        """Whether it must be brought in."""
        missing = self.slots[slot] != adapter
        self.slots[slot], self._used[slot] = adapter, step_id
        self.num_brought += missing
        return missing

    def clear(self) -> None:
        """What a device holds is not known any more."""
        self.slots = [None] * len(self.slots)


class Claims:
    """As those who start in one pass change the slots, whether or not that is carried out."""

    def __init__(self, slots: list[str | None], used: list[int], users: Counter[str]) -> None:
        self._slots, self._used, self._users = slots, used, users
        self._claimed: set[int] = set()

    def find(self, adapter: str) -> int | None:
        """The slot that it starts with; None: it waits, and another slot has been claimed for it, if there was one."""
        if adapter in self._slots:
            slot = self._slots.index(adapter)
            return None if slot in self._claimed else slot
        free = [
            slot
            for slot, held in enumerate(self._slots)
            if slot not in self._claimed and (held is None or not self._users[held])
        ]
        if free:
            return min(free, key=lambda slot: (self._slots[slot] is not None, self._used[slot], slot))
        taken = [slot for slot in range(len(self._slots)) if slot not in self._claimed]
        if taken:
            self._claimed.add(
                min(taken, key=lambda slot: (self._users[self._slots[slot] or ""], self._used[slot], slot))
            )
        return None

    def take(self, adapter: str, slot: int) -> None:
        """It starts."""
        self._slots[slot] = adapter
        self._users[adapter] += 1
