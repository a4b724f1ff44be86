"""Drafts of a simulation: which are right, what proposing them takes, and what a draft model on a device of its own has
drawn when it is asked (worker/apart_drafts.py).

What lives here: that, for the modelled executor. What may not: prices of the target's steps, planning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.request import DraftsAhead, StepPlan
from headrace.speculative.ahead import RUNS, RunsAhead


@dataclass(frozen=True, slots=True)
class Drafting:
    """``acceptance``: how often a draft is right, by a hash of its place. ``cost``: what one pass takes, as a share of
    the target's step; ``seconds``: what it takes for so many rows of so many tokens on a device of its own, instead.
    ``tree``: so many drafts stand side by side at each place, of which one is right as often as that, and one pass
    proposes them. ``ahead``: it goes on while its drafts are verified."""

    acceptance: float = 0.0
    cost: float = 0.0
    seconds: Callable[[int, int], float] | None = None
    tree: int = 1
    ahead: bool = False


class ModelledDrafts:
    """What is ready, row by row."""

    def __init__(self, given: Drafting) -> None:
        self.given = given
        self._runs = RunsAhead()
        self._ready: dict[int, int] = {}  # row → drafts that are there when it is asked for some
        self._waits = 0.0  # seconds until the pass has ended that was under way when a run was cancelled
        self._refuted = self._spared = 0

    def forget(self, row: int) -> None:
        self._ready.pop(row, None)

    def verified(
        self, plan: StepPlan, seconds: float, lengths: dict[int, int], right: Callable[[int, int], bool]
    ) -> tuple[float, DraftsAhead | None]:
        """Of a step whose verification takes so many seconds: those that proposing takes before it, and what was drawn
        ahead. ``right(row, place)``: whether what is drafted there is."""
        rows = {plan.rows[work]: -(-drafts // self.given.tree) for work, drafts in enumerate(plan.drafts) if drafts}
        if not rows:
            return 0.0, None
        each = self._each(rows, seconds, lengths)
        missing = max(depth - min(depth, self._ready.get(row, 0)) for row, depth in rows.items())
        used = sum(min(depth, self._ready.get(row, 0)) for row, depth in rows.items())
        waits = self._waits
        told = DraftsAhead(used, self._refuted, self._spared) if self.given.ahead else None
        self._refuted = self._spared = 0
        self._waits = 0.0
        if self.given.ahead and self._runs.wanted(max(rows.values())):
            self._run_ahead(rows, seconds, each, lengths, right)
        else:
            self._ready.clear()
        return waits + missing * each, told

    def _each(self, rows: dict[int, int], seconds: float, lengths: dict[int, int]) -> float:
        if self.given.seconds is None:
            return self.given.cost * seconds
        return self.given.seconds(len(rows), sum(lengths[row] for row in rows) // len(rows))

    def _run_ahead(
        self,
        rows: dict[int, int],
        seconds: float,
        each: float,
        lengths: dict[int, int],
        right: Callable[[int, int], bool],
    ) -> None:
        """Behind each row's drafts, while they are verified: one pass draws a token of every row."""
        most = RUNS * (max(rows.values()) + 1)
        whole = min(most, int(seconds / each)) if each else most
        passes = whole + (whole < most)  # the last one under way is waited for
        hits = 0
        for row, depth in rows.items():
            limit = RUNS * (depth + 1)
            drawn = min(max(0, self._ready.get(row, 0) - depth) + passes, limit)
            kept = all(right(row, lengths[row] + at) for at in range(depth + 1))
            self._ready[row] = max(0, drawn - 1) if kept else 0
            hits += kept
            self._refuted += 0 if kept else drawn
            self._spared += limit - drawn
        self._runs.told(hits, len(rows) - hits)
        self._waits = (whole + 1) * each - seconds if whole < most else 0.0
