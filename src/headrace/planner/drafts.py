"""Drafts of a simulation: which are right, what proposing them takes, and what a draft model on a device of its own has
drawn when it is asked (worker/apart_drafts.py).

What lives here: that, for the modelled executor. What may not: prices of the target's steps, planning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.request import DraftsAhead, StepPlan
from headrace.speculative.ahead import RUNS, RunsAhead
from headrace.speculative.settings import Acceptance


@dataclass(frozen=True, slots=True)
class Drafting:
    """``acceptance``: how often a draft is right, by a hash of its place, as SpeculativeSettings has it. ``cost``: what one pass takes, as a share of
    the target's step; ``seconds``: what it takes for so many rows of so many tokens on a device of its own, instead.
    ``tree``: so many drafts stand side by side at each place, of which one is right as often as that, and one pass
    proposes them. ``ahead``: it goes on while its drafts are verified."""

    acceptance: Acceptance = 0.0
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
        self, plan: StepPlan, seconds: float, lengths: dict[int, int], right: Callable[[int, int, int], bool]
    ) -> tuple[float, DraftsAhead | None]:
        """Of a step whose verification takes so many seconds: those that proposing takes before it, and what was drawn
        ahead. ``right(row, place, at)``: whether what is drafted there is, as so many have been before it."""
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
        right: Callable[[int, int, int], bool],
    ) -> None:
        """Behind each row's drafts, while they are verified: one pass draws a token of every row."""
        most = RUNS * (max(rows.values()) + 1)
        whole = min(most, int(seconds / each)) if each else most
        passes = whole + (whole < most)  # the last one under way is waited for
        hits = 0
        for row, depth in rows.items():
            limit = RUNS * (depth + 1)
            drawn = min(max(0, self._ready.get(row, 0) - depth) + passes, limit)
            kept = all(right(row, lengths[row] + at, at) for at in range(depth + 1))
            self._ready[row] = max(0, drawn - 1) if kept else 0
            hits += kept
            self._refuted += 0 if kept else drawn
            self._spared += limit - drawn
        self._runs.told(hits, len(rows) - hits)
        self._waits = (whole + 1) * each - seconds if whole < most else 0.0


class ModelledRuns:
    """Runs of drafts in flight over stages (worker/staged_drafts.py): which of them count, where a step's tokens are back
    with the first stage ``stages`` steps later, or once they have been ``collected``."""

    def __init__(self, stages: int) -> None:
        self.collected = 0  # steps
        self._stages = stages
        self._step = 0
        self._last: dict[int, int] = {}  # row → step of its last run that counts
        self._broken: set[int] = set()  # rows whose drafts in flight are refuted from that run on
        self._sizes: tuple[int, int] | None = None  # of this step's guessed runs: right, wrong

    def begin(self) -> None:
        """A step."""
        self._step += 1
        self._sizes = None

    def forget(self, row: int) -> None:
        self._last.pop(row, None)
        self._broken.discard(row)

    def goes_on(self, row: int, tokens: int, *, right: bool) -> bool:
        """Whether one of so many proposed tokens counts that was planned behind drafts in flight; ``right``: what it
        guesses. Where the first stage knows all of them by now, it begins from the truth."""
        if self._last.get(row, 0) <= max(self.collected, self._step - self._stages):
            return True
        counts = right and row not in self._broken
        self._sizes = self._sizes or (0, 0)
        self._sizes = (self._sizes[0] + tokens * counts, self._sizes[1] + tokens * (not counts))
        if not counts:
            self._broken.add(row)
        return counts

    def verified(self, row: int, *, whole: bool) -> None:
        """A run that counts; ``whole``: all of its drafts are right."""
        self._last[row] = self._step
        (self._broken.discard if whole else self._broken.add)(row)

    def told(self) -> DraftsAhead | None:
        """Of this step's guessed runs, which are refuted beside others or cancelled alone."""
        if self._sizes is None:
            return None
        used, lost = self._sizes
        return DraftsAhead(used, lost if used else 0, 0 if used else lost)
