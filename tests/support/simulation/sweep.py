"""Many lives, in several processes, and what came of them.

What lives here: dealing out seeds and adding up. What may not: one life (life.py), printing
(tests/reliability/simulate.py).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.support.simulation.drawing import draw
from tests.support.simulation.life import Failure, live
from tests.support.simulation.schedule import Schedule

AT_ONCE = 20  # seeds that a process takes at a time


@dataclass(slots=True)
class Sweep:
    """``failures``: by seed. ``seen``: how often things happened."""

    lives: int = 0
    events: int = 0
    turns: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all processes, once all is done
    seen: Counter[str] = field(default_factory=Counter)
    failures: dict[int, Failure] = field(default_factory=dict)

    def add(self, other: Sweep) -> None:
        self.lives += other.lives
        self.events += other.events
        self.turns += other.turns
        self.seen += other.seen
        self.failures |= other.failures


def sweep(
    seeds: Iterable[int],
    *,
    events: int = 500,
    policy: str | None = None,
    jobs: int = 1,
    tell: Callable[[Sweep], None] = lambda so_far: None,
) -> Sweep:
    """Lives through the schedules of these seeds; ``tell`` is called now and then."""
    begun, used, whole = time.monotonic(), _cpu_seconds(), Sweep()
    work = partial(_live_some, events=events, policy=policy)
    for part in _spread(work, _portions(seeds), jobs):
        whole.add(part)
        whole.seconds = time.monotonic() - begun
        tell(whole)
    whole.cpu_seconds = _cpu_seconds() - used
    return whole


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


def _spread(work: Callable[[Sequence[int]], Sweep], portions: Iterator[Sequence[int]], jobs: int) -> Iterator[Sweep]:
    if jobs == 1:
        yield from map(work, portions)
        return
    with multiprocessing.get_context("fork").Pool(
        jobs, _collect_seldom
    ) as pool:  # forked, so that a defect that was planted is there too
        yield from pool.imap_unordered(work, portions)
        pool.close()
        pool.join()  # so that the time they took is known


def _collect_seldom() -> None:
    """A life's garbage is little, and looking for it among all that was imported is not."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 100)


def _portions(seeds: Iterable[int]) -> Iterator[Sequence[int]]:
    portion: list[int] = []
    for seed in seeds:
        portion.append(seed)
        if len(portion) == AT_ONCE:
            yield portion
            portion = []
    if portion:
        yield portion


def _live_some(seeds: Sequence[int], *, events: int, policy: str | None) -> Sweep:
    part = Sweep()
    for seed in seeds:
        schedule = draw(seed, events, policy)
        outcome = live(schedule)
        part.lives, part.events = part.lives + 1, part.events + len(schedule.events)
        if isinstance(outcome, Failure):
            part.failures[seed] = outcome
        else:
            part.turns, part.seen = part.turns + outcome.turns, part.seen + outcome.seen
    return part


def replays(schedule: Schedule) -> str:
    """The digest of everything that a schedule brought about, the same twice. Raises AssertionError where it is not."""
    once, again = live(schedule, traced=True), live(schedule, traced=True)
    assert once == again, f"{schedule.name} does not replay: {once} and then {again}"
    return once.trace


def find(seeds: Iterable[int], *, events: int = 500) -> tuple[int, int, Failure] | None:
    """The first seed that fails: the seed, how many lives that took, and how."""
    for count, seed in enumerate(seeds, start=1):
        outcome = live(draw(seed, events))
        if isinstance(outcome, Failure):
            return seed, count, outcome
    return None
