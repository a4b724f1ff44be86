"""Drafts that are looked up: what followed the last time that a text stood as it stands now.

In the sequence itself (prompt lookup, Saxena 2023; n-gram speculation in vLLM), or in earlier answers of the same
tenant (as REST, He et al. 2023, does in a store of texts, and SuffixDecoding, Oliaro et al. 2024, in trees). No model
is asked.

What lives here: both. What may not: torch, rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
_END = -1  # between two answers
_BYTES = 4


def continued(ids: Ids, most: int, shortest: int, longest: int) -> list[int]:
    """What followed where the last ``shortest`` to ``longest`` ids of ``ids`` stood before: at most ``most`` ids. Of
    several places the one with the longest match, of those the last with so much behind it."""
    length = len(ids)
    if length <= shortest or most <= 0:
        return []
    ends = np.flatnonzero(ids[: length - 1] == ids[-1])  # where the last id stands, but the end itself
    best = ends[:0]
    for back in range(1, longest):
        if back >= shortest:
            best = ends
        ends = ends[ends >= back]
        ends = ends[ids[ends - back] == ids[length - 1 - back]]
        if not len(ends):
            break
    else:
        best = ends
    if not len(best):
        return []
    whole = best[best + most < length]
    at = int(whole[-1] if len(whole) else best[0]) + 1
    return list(map(int, ids[at : at + most]))


class AnswerStore:
    """Answers of one tenant, found by their last ``span`` tokens; the oldest go when there are more than ``capacity``
    tokens."""

    def __init__(self, capacity: int, spans: Sequence[int]) -> None:
        self._capacity = capacity
        self._spans = tuple(dict.fromkeys(sorted(spans, reverse=True)))
        self._ids = array("i")
        self._ends: dict[bytes, int] = {}  # the last tokens → where the next one stands

    def add(self, ids: Sequence[int]) -> None:
        self._append(array("i", ids[-self._capacity // 2 :]))
        if len(self._ids) > self._capacity:
            kept, self._ids = self._ids[len(self._ids) - self._capacity // 2 :], array("i")
            self._ends.clear()
            self._append(kept[:-1])

    def _append(self, ids: array[int]) -> None:
        begin, self._ids = len(self._ids), self._ids + ids
        self._ids.append(_END)
        held, ends = memoryview(self._ids).cast("B"), self._ends
        for span in self._spans:
            for end in range(begin + span, begin + len(ids)):
                ends[bytes(held[(end - span) * _BYTES : end * _BYTES])] = end

    def find(self, ids: Ids, most: int, span: int) -> list[int]:
        """What followed the last ``span`` ids (one of the spans) where they stood last."""
        at = self._ends.get(ids[-span:].tobytes()) if len(ids) >= span else None
        found = self._ids[at : at + most] if at is not None else array("i")
        return list(found[: found.index(_END)] if _END in found else found)


class Lookup:
    """Proposes for rows, by their ids. ``capacity``: tokens of earlier answers that are kept for each tenant; 0: none
    are."""

    def __init__(self, shortest: int, longest: int, capacity: int = 0, tenants: int = 256) -> None:
        self._shortest, self._longest = shortest, longest
        self._capacity, self._tenants = capacity, tenants
        self._stores: dict[Hashable, AnswerStore] = {}

    def propose(self, ids: Ids, most: int, tenant: Hashable) -> list[int]:
        store = self._stores.get(tenant)
        if store is None:
            return continued(ids, most, self._shortest, self._longest)
        return (
            store.find(ids, most, self._longest)
            or continued(ids, most, self._shortest, self._longest)
            or store.find(ids, most, self._shortest)
        )

    @property
    def keeps(self) -> bool:
        return self._capacity > 0

    def keep(self, answer: Ids, tenant: Hashable) -> None:
        """One answer has ended. Of too many tenants the one that has had nothing kept for longest is forgotten."""
        if len(answer) <= self._shortest:
            return
        store = self._stores.pop(tenant, None) or AnswerStore(self._capacity, (self._shortest, self._longest))
        self._stores[tenant] = store
        store.add(answer.tolist())
        if len(self._stores) > self._tenants:
            del self._stores[next(iter(self._stores))]
