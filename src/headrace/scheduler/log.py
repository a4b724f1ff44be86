"""What the scheduler decided last, for people: who was admitted, who was pushed out, and what the head of the queue waits for.

What lives here: a bounded log of numbers. What may not: deciding anything, words (the dashboard's), clocks: time is an input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Literal, NamedTuple

CAPACITY = 256  # entries; older ones are forgotten

Kind = Literal[
    "admitted", "resumed", "preempted", "refused", "turned_away", "aborted", "failed", "overfull",
    "waits_batch", "waits_rows", "waits_budget", "waits_blocks", "waits_time", "waits_adapter",
]  # fmt: skip


class Entry(NamedTuple):
    """``values`` by kind, in tokens unless said.

    admitted: prompt, cached, microseconds waited; resumed: to compute, cached; preempted: to compute again, used blocks, blocks;
    waits_rows: rows wanted, free; waits_budget: tokens a step; waits_blocks: tokens, used blocks, blocks; refused, turned_away: prompt;
    failed: sequences of the step; waits_time: microseconds a step may take; overfull: single tokens that alone take longer, and that.
    The request is -1 where it is about none. ``tenant``: whose request it is; "" where that is not known.
    """

    number: int
    time: float
    kind: Kind
    request_id: int
    values: tuple[int, ...]
    tenant: str = ""


class DecisionLog:
    """``now`` is set by whoever knows the time. A wait is told once, not at every step that it lasts.

    ``tenant_of``: whose a request is that waits or runs.
    """

    __slots__ = ("_entries", "_numbers", "_tenant_of", "_wait", "now")

    def __init__(self, tenant_of: Callable[[int], str] = lambda request_id: "") -> None:
        self.now = 0.0
        self._tenant_of = tenant_of
        self._entries: deque[Entry] = deque(maxlen=CAPACITY)
        self._numbers = count(1)
        self._wait: tuple[str, int] | None = None

    def add(self, kind: Kind, request_id: int, *values: int, tenant: str | None = None) -> None:
        """``tenant``: of a request that neither waits nor runs."""
        whose = self._tenant_of(request_id) if tenant is None else tenant
        self._entries.append(Entry(next(self._numbers), self.now, kind, request_id, values, whose))

    def add_wait(self, kind: Kind, request_id: int, *values: int) -> None:
        if self._wait != (kind, request_id):
            self._wait = (kind, request_id)
            self.add(kind, request_id, *values)

    def after(self, number: int) -> Iterable[Entry]:
        """Entries with higher numbers, oldest first."""
        return [entry for entry in self._entries if entry.number > number]
