"""What each policy promises about order and waiting: the simulation holds it to that.

To add a policy: a line in ``BOUNDS``. One that is not there is held to what holds for all.

What lives here: promises. What may not: engines, how promises are watched (order.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.simulation.schedule import Asked, Setting


@dataclass(frozen=True, slots=True)
class Bound:
    """``may_pass(later, earlier)``: a request that came later may be admitted for the first time while the earlier one still waits for that.
    False for any two of a class: first in, first out within the class. It must not hang on anything but the two.
    ``most_passed``: how many may pass one request. ``refuses``: it may turn requests away before their first token."""

    may_pass: Callable[[Asked, Asked], bool]
    most_passed: Callable[[Setting], float] = lambda setting: math.inf
    refuses: bool = False


UNKNOWN = Bound(lambda later, earlier: True, refuses=True)

BOUNDS: Mapping[str, Bound] = {
    "fcfs": Bound(lambda later, earlier: False),
    "priority": Bound(lambda later, earlier: later.priority < earlier.priority),
    "deadline": Bound(lambda later, earlier: True, refuses=True),  # due times hang on the stamps of arrivals
    "fair": Bound(lambda later, earlier: later.tenant != earlier.tenant),
    "qoe": Bound(lambda later, earlier: True),
    "shortest-remaining": Bound(lambda later, earlier: True),  # its bound hangs on when they came: tests/unit/test_shortest_remaining.py
}
