"""Whose turn it was: arrivals, first admissions and progress, held against what the policy promises.

What lives here: watching. What may not: the promises (bounds.py), blocks and tokens (books.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

from headrace.engine.keyed_hash import adapter_blocks
from headrace.request import SequenceStatus
from headrace.scheduler.roster import Sequence
from headrace.scheduler.scheduler import Scheduler
from tests.support.simulation.bounds import BOUNDS, UNKNOWN, Came
from tests.support.simulation.broken import Broken
from tests.support.simulation.oracle import ADAPTERS, key_of
from tests.support.simulation.schedule import Asked, Setting


class OrderWatch:
    """Numbers are requests. ``arrived`` ones wait for their first admission until they are ``admitted`` or ``gone``."""

    def __init__(self, setting: Setting) -> None:
        self.bound = BOUNDS.get(setting.policy, UNKNOWN)
        if adapters_wait(setting):  # others pass one whose adapter may not be in the step
            self.bound = replace(UNKNOWN, refuses=self.bound.refuses)
        self.live: dict[int, Came] = {}  # in order of arrival
        self.waiting: dict[int, Came] = {}  # of those, never admitted yet
        self._fresh: list[Came] = []  # which no step has met yet
        self._place: dict[int, int] = {}
        self._most: dict[int, float] = {}
        self._passed: dict[int, int] = {}
        self._running: list[Sequence] = []  # after the last turn
        self._first: int | None = None
        self._looked = False  # for the first, since somebody came, was met or went
        self._mark: tuple[int, ...] = ()
        self._stalled = 0  # turns, since anybody came or went
        self._stood = 0  # whoever came or went
        self._patience = patience(setting)
        self._longest = self._patience + others_first(setting)

    def arrived(self, number: int, asked: Asked) -> None:
        came = Came(asked, math.inf)
        self._fresh.append(came)
        self._most[number] = self.bound.most_passed(came, list(self.live.values()))
        self.live[number] = self.waiting[number] = came
        self._place[number] = len(self._place)
        self._looked = False

    def met(self, now: float) -> None:
        """Whoever has come is the scheduler's since this moment."""
        if self._fresh:
            for came in self._fresh:
                came.at = now
            self._fresh.clear()
            self._looked = False

    def gone(self, number: int) -> None:
        """Ended, or not wanted any more."""
        if self.live.pop(number, None) is not None:
            self.waiting.pop(number, None)
            self._looked = False

    def admitted(self, number: int) -> None:
        came = self.waiting.pop(number, None)
        if came is None:
            return
        for other, earlier in self.waiting.items():  # in order of arrival
            if self._place[other] > self._place[number]:
                break
            self._pass(number, came, other, earlier)

    def _pass(self, number: int, came: Came, other: int, earlier: Came) -> None:
        if not self.bound.may_pass(came, earlier):
            raise Broken("order", f"request {number} begins before request {other}, which came earlier")
        self._passed[other] = self._passed.get(other, 0) + 1
        if self._passed[other] > self._most[other]:
            raise Broken(
                "starved", f"{self._passed[other]} requests have passed request {other}, {self._most[other]:.0f} may"
            )

    # --- progress

    def turned(self, scheduler: Scheduler, *, failed: bool) -> None:
        """After each turn."""
        self._check_pushed_out(scheduler)
        self._check_progress(scheduler, failed=failed)

    def _check_pushed_out(self, scheduler: Scheduler) -> None:
        """Nobody gives way while somebody runs who came later and may not pass. Whoever is planned to the last token
        only waits for results; whoever falls with a step falls with all."""
        running = [
            s
            for s in scheduler.roster.running
            if s.status is SequenceStatus.RUNNING and s.num_tokens < s.max_num_tokens
        ]
        for out in self._running:
            if out.status is SequenceStatus.WAITING:
                for other in running:
                    self._give_way(out.request_id, other.request_id)
        self._running = running

    def _give_way(self, out: int, other: int) -> None:
        later = out in self.live and other in self.live and self._place[other] > self._place[out]
        may_outlast = self.bound.may_outlast or self.bound.may_pass
        if later and not may_outlast(self.live[other], self.live[out]):
            raise Broken("order", f"request {out} was pushed out, and request {other}, which came later, runs")

    def _check_progress(self, scheduler: Scheduler, *, failed: bool) -> None:
        """Whom nobody may pass must come on, in a bounded number of turns; a step that fails starts the count anew."""
        if not self._looked:
            before, self._first, self._looked = self._first, self._find_first(), True
            self._stalled, self._stood = 0, self._stood if before == self._first else 0
        mark = self._mark_of(scheduler)
        moved = failed or mark != self._mark or self._first is None
        self._stalled, self._stood = (0, 0) if moved else (self._stalled + 1, self._stood + 1)
        self._mark = mark
        if self._stalled > self._patience or self._stood > self._longest:
            raise Broken(
                "starved", f"request {self._first}, whom nobody may pass, has not moved for {self._stood} turns"
            )

    def _find_first(self) -> int | None:
        may_pass = self.bound.may_pass
        first = next(iter(self.live), None)
        for number, came in self.live.items():
            if first is not None and number != first and may_pass(came, self.live[first]):
                first = number
        if first is None or any(
            may_pass(came, self.live[first]) for number, came in self.live.items() if number != first
        ):
            return None
        return first

    def _mark_of(self, scheduler: Scheduler) -> tuple[int, ...]:
        """Tokens known and computed of its answers. A cohort's records lag, but whoever is in one comes on: its count
        of steps is part of it."""
        siblings = scheduler.requests.get(self._first, ()) if self._first is not None else ()
        marks = [count for each in siblings for count in (len(each.token_ids), each.num_computed_tokens)]
        cohort = scheduler._cohort
        return (*marks, cohort._planned, cohort._taken) if cohort is not None else tuple(marks)


def adapters_wait(setting: Setting) -> bool:
    """Whether a step may not have all of them, by their number or by the blocks that they may take."""
    room, keys = setting.own_blocks or setting.groups[0].num_blocks // 2, map(key_of, ADAPTERS)
    few = setting.held > 0 or setting.adapters < len(ADAPTERS)
    return setting.adapters > 0 and (few or sum(map(adapter_blocks, keys)) > room)


def patience(setting: Setting) -> int:
    """Turns in which the first in order may stand still: what is in flight comes back, and, where others' single tokens
    or whole prompts may fill a step before it, until those have ended."""
    pipeline = 4 * (setting.depth + 2)
    whole = setting.padded or not (setting.chunked_prefill and setting.kv_caching)
    tight = (
        setting.budget <= setting.rows or setting.max_step_ms is not None
    )  # in tokens, or in time: a prompt under way gets one or two a step
    crowded = whole or tight or not setting.continuous_batching
    return pipeline + (2 * setting.length if crowded else 0)


def others_first(setting: Setting) -> int:
    """Turns in which those who run already may have all of their tokens computed before those of who waits: prompts
    under way go first."""
    splits = setting.chunked_prefill and setting.kv_caching and setting.continuous_batching and not setting.padded
    share = max(1, setting.budget - setting.rows + 1) if splits and setting.max_step_ms is None else 1
    return -(-setting.rows * setting.length // share)
