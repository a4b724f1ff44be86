"""Activations of a step planned by lifetime into one buffer.

A step's intermediate tensors come and go in an order that the model fixes; only their sizes follow the number of tokens. So the order is
learned once, and offsets follow for any length: the largest tensor first, each at the lowest place that is free for as long as it lives
(greedy by size: Pisarchyk and Lee 2020; with sequence lengths: TurboTransformers, Fang et al. 2021, section 4.2).

What lives here: lifetimes, plans. What may not: torch, learning lifetimes and handing memory out (arena.py).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNED = 512  # bytes: what torch's allocator rounds to, too


@dataclass(frozen=True, slots=True)
class Use:
    """One tensor of a step: bytes, and the events between which it lives: made at ``first``, gone at ``last``."""

    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    offsets: tuple[int, ...]  # one a use
    size: int  # of the buffer


def rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def plan(uses: Sequence[Use]) -> Plan:
    """Greedy by size."""
    offsets, placed = [0] * len(uses), []  # type: list[int], list[tuple[int, int, Use]]
    for index in sorted(range(len(uses)), key=lambda index: -uses[index].size):
        use, at = uses[index], 0
        for begin, end, other in placed:  # by offset
            if other.last <= use.first or use.last <= other.first:
                continue
            if at + rounded(use.size) <= begin:
                break
            at = max(at, end)
        offsets[index] = at
        insort(placed, (at, at + rounded(use.size), use), key=lambda entry: entry[0])
    return Plan(tuple(offsets), max((end for _, end, _ in placed), default=0))


def most_alive(uses: Sequence[Use]) -> int:
    """Bytes alive at once: no plan is smaller."""
    changes = sorted([(use.first, 1, rounded(use.size)) for use in uses] + [(use.last, 0, -rounded(use.size)) for use in uses])
    alive = most = 0
    for _, _, change in changes:
        alive += change
        most = max(most, alive)
    return most
