"""Responses that were answered, for a while: what ``previous_response_id`` goes on from and ``GET /v1/responses/{id}``
shows again.

What lives here: a bounded register in memory. What may not: what a response is (responses.py), other front ends'
(frontends/link.py).

What one client stores may push out its own older responses, never another's that stores less.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20
MAX_SECONDS = 24 * 3600.0
_ENTRY_BYTES = 512  # beside its texts


@dataclass(frozen=True, slots=True)
class Stored:
    """``items``: the conversation up to the answer; ``response``: the object. Both as JSON."""

    items: bytes
    response: bytes

    @property
    def size(self) -> int:
        return len(self.items) + len(self.response) + _ENTRY_BYTES


@dataclass(slots=True)
class _Shelf:
    """One tenant's, oldest first."""

    entries: OrderedDict[str, tuple[float, Stored]]
    size: int = 0

    def pop(self, name: str) -> None:
        self.size -= self.entries.pop(name)[1].size


@dataclass(slots=True)
class StoredResponses:
    """``clock`` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    _shelves: dict[str, _Shelf] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    def put(self, tenant: str, name: str, stored: Stored) -> None:
        """Kept if it is not larger than all that may be kept; the oldest of whoever holds most give way."""
        if stored.size > self.max_bytes:
            return
        shelf = self._shelves.setdefault(tenant, _Shelf(OrderedDict()))
        shelf.entries[name] = self.clock(), stored
        shelf.size += stored.size
        self._forget_old()
        while len(self) > self.max_responses or sum(each.size for each in self._shelves.values()) > self.max_bytes:
            largest = max(self._shelves.values(), key=lambda each: (each.size, len(each.entries)))
            largest.pop(next(iter(largest.entries)))

    def find(self, tenant: str, name: str) -> Stored | None:
        """None for an unknown one, and for another tenant's."""
        self._forget_old()
        shelf = self._shelves.get(tenant)
        found = shelf.entries.get(name) if shelf is not None else None
        return None if found is None else found[1]

    def delete(self, tenant: str, name: str) -> bool:
        found = self.find(tenant, name) is not None
        if found:
            self._shelves[tenant].pop(name)
        return found

    def _forget_old(self) -> None:
        limit = self.clock() - MAX_SECONDS
        for tenant, shelf in list(self._shelves.items()):
            while shelf.entries and next(iter(shelf.entries.values()))[0] < limit:
                shelf.pop(next(iter(shelf.entries)))
            if not shelf.entries:
                del self._shelves[tenant]
