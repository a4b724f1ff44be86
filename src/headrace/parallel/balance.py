"""Experts on ranks so that the busiest rank has as few rows as can be.

What lives here: the assignment, copies of hot experts, the lower bound it is held against. What may not: torch, files
(placement.py).

    minimise  max over ranks of Σ counts of its experts,  with at most ⌈items / ranks⌉ experts a rank

MoETuner (Go and Mahajan 2025) solves this as an integer program, with traffic between ranks as a second goal. Here ranks
share rows and meet in one all-reduce whatever the placement is, so only load is left, and the program is that of
identical machines with a limited number of jobs each. It is solved by the longest processing time first (Graham 1969),
then by exchanges between the busiest rank and the others; ``lower_bound`` says how far from the best that can be.
Copies: the expert with most rows a copy gets the next one, on a rank of its own (DeepSeek's EPLB does so).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

_ROUNDS = 10_000
_CLOSE = 1e-4  # to the bound: nothing worth looking for is left


def balanced(counts: Sequence[float], ranks: int, copies: int = 0) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank. ``counts``: rows of each expert; ``copies``: how many more there are than experts."""
    times = copied(counts, ranks, copies)
    items = [(counts[expert] / times[expert], expert) for expert in range(len(counts)) for _ in range(times[expert])]
    most = -(-len(items) // ranks)
    held = _longest_first(sorted(items, reverse=True), ranks, most)
    bound = lower_bound([load for load, _ in items], ranks)
    for _ in range(_ROUNDS):
        if not _improve(held, bound * (1 + _CLOSE)):
            break
    return tuple(tuple(sorted(expert for _, expert in rank)) for rank in held)


def copied(counts: Sequence[float], ranks: int, copies: int) -> list[int]:
    """How many ranks hold each expert."""
    times = [1] * len(counts)
    queue = [(-count, expert) for expert, count in enumerate(counts)]
    heapq.heapify(queue)
    for _ in range(copies if ranks > 1 else 0):
        if not queue:
            break
        _, expert = heapq.heappop(queue)
        times[expert] += 1
        if times[expert] < ranks:
            heapq.heappush(queue, (-counts[expert] / times[expert], expert))
    return times


def imbalance(counts: Sequence[float], held: Sequence[Sequence[int]]) -> float:
    """Rows of the busiest rank, over the mean; copies have equal parts of an expert's."""
    times = Counter(expert for rank in held for expert in rank)
    loads = [sum(counts[expert] / times[expert] for expert in rank) for rank in held]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def lower_bound(loads: Sequence[float], ranks: int) -> float:
    """No assignment has a busiest rank with fewer rows: it has the mean at least, the heaviest expert and as many others
    as it must hold, and of the heaviest j · ranks + 1 experts j + 1 on one rank, for every j."""
    ordered = sorted(loads, reverse=True)
    most = -(-len(ordered) // ranks)
    least = max(1, len(ordered) - (ranks - 1) * most)  # experts of a rank where all the others are full
    crowded = (sum(ordered[j * ranks - j : j * ranks + 1]) for j in range(1, most))
    return max(sum(ordered) / ranks, ordered[0] + sum(ordered[len(ordered) - least + 1 :]), *crowded, 0.0)


Rank = list[tuple[float, int]]  # (rows, expert), in that order


def _longest_first(items: Rank, ranks: int, most: int) -> list[Rank]:
    """Each to the rank with least rows that has a place for it and no copy of it."""
    held: list[Rank] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    copies = Counter(expert for _, expert in items)
    # copies first: the last places may all be on one rank
    for load, expert in sorted(items, key=lambda item: (copies[item[1]] == 1, -item[0], item[1])):
        free = [rank for rank in range(ranks) if len(held[rank]) < most and (load, expert) not in held[rank]]
        rank = min(free, key=lambda each: (loads[each], each))
        held[rank].append((load, expert))
        loads[rank] += load
    return [sorted(each) for each in held]


def _improve(held: list[Rank], enough: float) -> bool:
    """One exchange between the busiest rank and another that lowers the larger of the two loads most."""
    loads = [sum(load for load, _ in rank) for rank in held]
    busiest = max(range(len(held)), key=lambda rank: (loads[rank], -rank))
    if loads[busiest] <= enough:
        return False
    best: tuple[float, int, int, int] | None = None
    for rank, other in enumerate(held):
        gap = loads[busiest] - loads[rank]
        for place, (load, expert) in enumerate(held[busiest]) if gap > 0 else ():
            near = bisect_left(other, (load - gap / 2, -1))
            for at in range(max(0, near - 1), min(len(other), near + 1)):
                larger = loads[busiest] - min(load - other[at][0], gap - (load - other[at][0]))
                swaps = _differ(held[busiest], expert, other, other[at][1])
                if swaps and larger < (loads[busiest] * (1 - 1e-12) if best is None else best[0]):
                    best = larger, rank, place, at
    if best is None:
        return False
    _, rank, place, at = best
    mine, theirs = held[busiest].pop(place), held[rank].pop(at)
    held[busiest], held[rank] = sorted([*held[busiest], theirs]), sorted([*held[rank], mine])
    return True


def _differ(mine: Rank, expert: int, others: Rank, other: int) -> bool:
    """Neither rank comes to hold an expert twice."""
    return all(each != other for _, each in mine) and all(each != expert for _, each in others)
