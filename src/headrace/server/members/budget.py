"""Who has to sleep so that another model fits into the budget.

What lives here: arithmetic. What may not: engines, time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Holding:
    """What a model holds of the budget in bytes, now and were it asleep; ``used``: when last, on any clock."""

    name: str
    held: int
    asleep: int
    idle: bool
    used: float

    @property
    def gain(self) -> int:
        return self.held - self.asleep


def to_sleep(needed: int, budget: int, others: Sequence[Holding]) -> list[str] | None:
    """Models that have to sleep so that ``needed`` bytes are free: the idle ones first, of these the one that was used
    longest ago; none whose memory is not needed. None where all of them together do not give so much."""
    free, chosen = budget - sum(each.held for each in others), list[Holding]()
    for each in sorted(others, key=lambda each: (not each.idle, each.used)):
        if free < needed and each.gain > 0:
            chosen.append(each)
            free += each.gain
    if free < needed:
        return None
    for each in sorted(chosen, key=lambda each: (each.idle, -each.used)):
        if free - each.gain >= needed:
            chosen.remove(each)
            free -= each.gain
    return [each.name for each in chosen]


def held_asleep(memory: Mapping[str, int], level: int, *, on_cpu: bool) -> int:
    """Of an engine's memory by purpose (ExecutorInfo.memory), what it holds while it sleeps."""
    if level > 1:
        return sum(memory.get(name, 0) for name in ("process", "kernels", "context"))
    given_up = ("kv_cache",) if on_cpu else ("kv_cache", "weights", "wide_copy")
    return held_awake(memory) - sum(memory.get(name, 0) for name in given_up)


def held_awake(memory: Mapping[str, int]) -> int:
    return sum(size for name, size in memory.items() if name != "in use before")


def size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"
