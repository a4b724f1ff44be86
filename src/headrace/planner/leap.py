"""Many turns of a core in one, where nothing happens between them: the same figures as turn by turn, in a fraction of the time.

Steps of a cohort (scheduler/cohort.py) are alike, a modelled device tells their tokens and prices beforehand, and the next arrival is
known. So what a turn would do is foreseen, and done at once:

    of a turn                       in a leap
    when it begins and ends         foreseen: the sums that clock and executor would have come to, one by one
    what the scheduler plans        counted; blocks and names in the prefix tree by its own rules, when they are due
    what clients see                a list of times, the same one for everybody

What lives here: when to leap and how far. What may not: the scheduler's part (scheduler.py, ``leap``), the device's (executor.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.engine.core import EngineCore
from headrace.planner.executor import ModelledExecutor

LEAST = 3  # turns; fewer are quicker one by one
MOST = 256  # that are priced at once


@dataclass(frozen=True, slots=True)
class Leapt:
    """Each of ``request_ids`` got a token at each of ``times``; so many blocks were used at most after a turn."""

    request_ids: Sequence[int]
    times: Sequence[float]
    most_used_blocks: int


def try_leap(core: EngineCore, executor: ModelledExecutor, until: float) -> Leapt | None:
    """All turns that are alike and begin before ``until``; None where the next one is to be taken by ``core.step``."""
    turns, until = core.turns_alike(), min(until, core.scheduler.wake)
    if turns >= LEAST:
        turns = executor.turns_before(until, min(turns, MOST))
    if turns < LEAST:
        return None
    foreseen = executor.foresee(core.scheduler.next_starts(), turns, until)
    request_ids, used = core.scheduler.alike_ids, [0]
    columns = _watched(foreseen.columns[: len(foreseen.ends)], core, used)
    done = core.leap(columns, lambda turns: executor.leap(foreseen, turns))
    return Leapt(request_ids, foreseen.ends[:done], max(used))


def _watched(columns: Sequence[list[int]], core: EngineCore, used: list[int]) -> Iterator[list[int]]:
    """The columns; after each turn it is seen how many blocks are used (a window that slides gives some back later)."""
    for column in columns:
        yield column
        used.append(core.scheduler.cache.num_used_blocks)
