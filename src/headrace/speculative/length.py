"""How many tokens are drafted: decided step by step from what was accepted, position by position, and what steps took.

A step of rows that verify d drafts each takes about t0 + c · d seconds and gives 1 + Σ q_i tokens a row, where q_i is
the share of rows whose i-th draft was accepted. The length with the most tokens a second is chosen, which may be none:
then a short probe, ever more seldom, finds out when drafts pay again. Batches of different sizes cost differently, so
t0 and c are kept by (powers of two of) rows.

In a pipeline a step takes as long as from the tokens of the one before to its own, whichever stage that is spent in.

What lives here: that decision and the counts of drafts. What may not: clocks (results say what steps took, and when they
are collected), torch, numpy, proposing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from operator import sub
from typing import Protocol

from headrace.request import DraftsAhead, StepPlan, StepResult, column_of, counts_of
from headrace.speculative.ahead import ROUGH, StagedRuns

FIRST = 4  # drafts, while nothing is known
HOPE = 0.7  # of each, likewise, that it is accepted when those before are
PRIOR = 0.1  # of a step's time that one draft more of every row costs, likewise
PACE = 0.1  # of one step in what is known
LEARN = 3  # steps without drafts before the first with them
AGAIN = 256  # drafting steps, after which one goes without: its time is still known then
PROBE = 6  # steps of a probe
REST, LONGEST_REST = 128, 4096  # steps between two probes: twice as many each time,
LOSS = 0.01  # and so many that what the last one lost is no more than this share (a draft model catches up first)
WORTH = 1.02  # times the speed without: below, nothing is drafted


class Floors(Protocol):
    """What the cost model is to this decision."""

    @property
    def windows(self) -> tuple[int | None, ...]: ...

    def floor_seconds(self, tokens: int, sampled: int, pairs: list[float], keys: list[float]) -> float: ...


@dataclass(slots=True)
class _Cost:
    """Of batches of about one size. ``plain``: seconds of a step without drafts; ``each``: what one draft more of every
    row adds."""

    plain: float = 0.0
    each: float = 0.0
    seen: int = 0  # steps without drafts
    drafting: int = 0  # steps with them, since the last without
    resting: int = 0  # steps until the next probe
    probing: int = 0  # steps that are left of one
    rest: int = REST
    lost: float = 0.0  # seconds, by drafting since it last seemed to pay


@dataclass(slots=True)
class DraftCounts:
    """Since the start. ``steps``: rows that verified something, step by step; by position: how often a draft stood
    there, and was right; ``ahead``: drafts drawn while others were verified, as DraftsAhead has them."""

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ahead: dict[str, int] = field(default_factory=dict)

    def add_ahead(self, ahead: DraftsAhead) -> None:
        for name in ("used", "refuted", "spared"):
            self.ahead[name] = self.ahead.get(name, 0) + getattr(ahead, name)

    def add(self, drafted: int, accepted: int, rows: int) -> None:
        self.steps += rows
        for counts, value in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (value - len(counts)))
            for at in range(value):
                counts[at] += rows


class Speculation:
    """``most``: drafts of a row and step that the worker can propose; ``fixed``: as many always, instead of what seems
    best; ``rows_below``: from so many rows on none; ``stages``: of a pipeline."""

    def __init__(
        self,
        most: int,
        fixed: int | None = None,
        rows_below: int | None = None,
        floors: Floors | None = None,
        stages: int = 1,
    ) -> None:
        self.most = most
        self.counts = DraftCounts()
        self._fixed = fixed
        self._rows_below = rows_below
        self._floors = floors
        self._costs: dict[int, _Cost] = {}
        self._stages = stages
        self._runs: dict[int, StagedRuns] = {}  # by rows, as costs
        self.runs: StagedRuns | None = None  # of those that were asked for last
        self._collected = 0.0  # when the step before was
        self._offered = [1.0] * most  # by position: the share of rows that have a draft there, and whose draft is right
        self._right = [HOPE ** (at + 1) for at in range(most)]

    def length(self, rows: int) -> int:
        """Drafts of each of so many rows in the next step."""
        if not rows or (self._rows_below is not None and rows >= self._rows_below):
            return 0
        if self._fixed is not None:
            return min(self._fixed, self.most)
        cost = self._cost(rows)
        if cost.seen < LEARN or cost.drafting >= AGAIN:
            return 0
        if cost.probing:
            return min(2, self.most)
        return 0 if cost.resting else self.best(rows)

    def wants_run(self, rows: int) -> bool:
        """Whether drafts of so many rows, and a guess before them, shall go on behind those in flight."""
        self.runs = self._runs.setdefault(rows.bit_length(), StagedRuns(self._stages))
        return self.runs.wanted()

    def best(self, rows: int) -> int:
        """The length with the most tokens a second, by what is known; 0 where none is worth it."""
        cost = self._cost(rows)
        if not cost.seen:
            return min(FIRST, self.most)
        tokens, seconds, best, speed = 1.0, cost.plain, 0, WORTH / cost.plain
        for at in range(self.most):
            tokens, seconds = tokens + self._right[at], seconds + cost.each * self._offered[at]
            if tokens / seconds > speed:
                best, speed = at + 1, tokens / seconds
        return best

    def _cost(self, rows: int) -> _Cost:
        return self._costs.setdefault(rows.bit_length(), _Cost())

    # --- what steps say

    def observe(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> bool:
        """One step that was collected. Whether from now on there are runs behind drafts in flight, or none any more."""
        seconds, self._collected = result.device_seconds if self._stages == 1 else now - self._collected, now
        if result.drafted:
            self._count(plan, result)
        if result.ahead is not None:
            self.counts.add_ahead(result.ahead)
        # others cost more for another reason
        known = map(sub, plan.counts, plan.drafts) if plan.drafts else plan.counts
        if not (plan.counts and max(known) <= 1 and seconds > 0.0) or (self._stages > 1 and plan.rows_added):
            return False
        if self._fixed is None:
            self._time(plan, result, seconds)
        if self.runs is None:
            return False
        counts = [plan.counts[work] for work, tokens in zip(plan.sample_work, result.tokens, strict=True) if tokens]
        worth = list(accumulate(self._right, initial=1.0))
        return self.runs.told(seconds, [count - 1 for count in counts], worth)

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        planned = min(max(plan.drafts), self.most)
        offered, right = [0] * planned, [0] * planned
        wanted = map(plan.drafts.__getitem__, plan.sample_work)
        seen = Counter(zip(wanted, result.drafted, counts_of(result.tokens), strict=True))
        rows = 0
        for (most, drafted, tokens), alike in seen.items():
            if not (most and tokens):
                continue
            rows += alike
            if drafted:
                self.counts.add(drafted, tokens - 1, alike)
            for at in range(drafted):
                offered[at] += alike
                right[at] += alike * (at < tokens - 1)
        if not rows:
            return
        pace = min(2 * PACE, PACE * rows**0.5)
        for at in range(planned):
            self._offered[at] += pace * (offered[at] / rows - self._offered[at])
            self._right[at] += pace * (right[at] / rows - self._right[at])
        self._extend(planned)

    def _extend(self, known: int) -> None:
        """Beyond what was tried, drafts are taken to go on as the last ones have."""
        chance = (
            min(1.0, self._right[known - 1] / self._right[known - 2])
            if known > 1 and self._right[known - 2]
            else self._right[0]
        )
        for at in range(known, self.most):
            self._offered[at], self._right[at] = self._offered[known - 1], self._right[at - 1] * chance

    def _time(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        rows = len(plan.rows)
        cost, drafted = self._cost(rows), sum(result.drafted) / rows
        if not plan.drafts:
            self._time_plain(cost, rows, seconds)
        elif drafted and cost.seen and not (self.runs is not None and self.runs.using):
            each = max(0.0, min(seconds, ROUGH * (cost.plain + cost.each * drafted)) - cost.plain) / drafted
            cost.each += PACE * (each - cost.each)
        if any(plan.drafts):
            cost.lost += seconds - cost.plain * len(column_of(result.tokens)) / rows
            self._drafted(cost, rows)

    def _time_plain(self, cost: _Cost, rows: int, seconds: float) -> None:
        cost.seen += 1
        cost.drafting, cost.resting = 0, max(0, cost.resting - 1)
        if cost.seen == 1:
            cost.plain, cost.each = seconds, seconds * self._prior(rows)
        else:
            cost.plain += max(PACE, 1.0 / cost.seen) * (min(seconds, ROUGH * cost.plain) - cost.plain)
        if cost.seen >= LEARN and not cost.resting and not cost.probing and not self.best(rows):
            cost.probing = PROBE

    def _drafted(self, cost: _Cost, rows: int) -> None:
        """After a step with drafts: does it go on?"""
        cost.drafting += 1
        if cost.probing > 1:
            cost.probing -= 1
        elif self.best(rows):
            cost.probing, cost.rest, cost.lost = 0, REST, 0.0
        else:
            dear = int(cost.lost / (LOSS * cost.plain)) if cost.plain else 0
            cost.probing, cost.resting = 0, min(max(cost.rest, dear), LONGEST_REST)
            cost.rest, cost.lost = min(2 * cost.rest, LONGEST_REST), 0.0

    def _prior(self, rows: int) -> float:
        """By the cost model, where there is one: what twice as many tokens cost, without the keys they see."""
        if self._floors is None:
            return PRIOR
        none = [0.0] * len(self._floors.windows)
        once, twice = (self._floors.floor_seconds(tokens, tokens, none, none) for tokens in (rows, 2 * rows))
        return max(PRIOR / 2, twice / once - 1.0) if once > 0.0 else PRIOR
