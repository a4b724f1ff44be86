"""What each policy promises about order and waiting: the simulation holds it to that.

To add a policy: a line in ``BOUNDS``.

What lives here: promises. What may not: engines, how promises are watched (order.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.config import SchedulerConfig
from headrace.scheduler.policies.qoe import TURN
from headrace.scheduler.policies.shortest_remaining import FIRST_GUESS, PROMPT_SHARE
from tests.support.simulation.schedule import Asked


@dataclass(slots=True)
class Came:
    """A request as the scheduler met it: what it asked, and the time of the step before which it came (infinite until
    then)."""

    asked: Asked
    at: float


@dataclass(frozen=True, slots=True)
class Bound:
    """``may_pass(later, earlier)``: a request that came later may be admitted for the first time while the earlier one
    still waits for that. False for any two of a class: first in, first out within the class. ``may_outlast(later,
    earlier)``: it may go on running while the earlier one is pushed out; if not said, who may pass may.
    ``most_passed(one, older)``: how many may pass it, when these older ones were there as it came. ``refuses``: it may
    turn requests away."""

    may_pass: Callable[[Came, Came], bool]
    most_passed: Callable[[Came, Sequence[Came]], float] = lambda one, older: math.inf
    refuses: bool = False
    may_outlast: Callable[[Came, Came], bool] | None = None


UNKNOWN = Bound(lambda later, earlier: True, refuses=True)
AGEING = SchedulerConfig().ageing


def _ages(later: Came, earlier: Came) -> bool:
    """Not later than what is expected of the earlier one is worth in seconds: what one guesses before anything is
    known, or has seen."""
    left = FIRST_GUESS + PROMPT_SHARE * len(earlier.asked.prompt)
    return (later.at - earlier.at) * AGEING <= left + 1e-6


def _turns(one: Came, older: Sequence[Came]) -> float:
    """Every so many admissions the turn is the oldest one's, who is then not pushed out before it has a new token."""
    return TURN * (2.0 + sum(1 + each.asked.n * each.asked.max_tokens for each in older))


BOUNDS: Mapping[str, Bound] = {
    "fcfs": Bound(lambda later, earlier: False),
    "priority": Bound(lambda later, earlier: later.asked.priority < earlier.asked.priority),
    "deadline": Bound(lambda later, earlier: True, refuses=True),  # due times hang on the stamps of arrivals
    "fair": Bound(
        lambda later, earlier: later.asked.tenant != earlier.asked.tenant,
        may_outlast=lambda later, earlier: True,  # the place of who runs is that of its last admission
    ),
    "qoe": Bound(lambda later, earlier: True, _turns),
    "shortest-remaining": Bound(_ages),
}
