"""Orders of service, one file each.

To add one: a file with a class that satisfies Policy, and a line in ``POLICIES``.

What lives here: the protocol and the register. What may not: budgets, blocks, rows (planner.py).
"""

from __future__ import annotations

from typing import Protocol

from headrace.errors import ConfigError
from headrace.request import Request
from headrace.scheduler.policies.fcfs import FirstComeFirstServed
from headrace.scheduler.policies.priority import Priority


class Policy(Protocol):
    """Sequences are admitted in ascending ``order``; the last in order is the first to be preempted."""

    name: str

    def order(self, request: Request, arrival_number: int) -> tuple[int, ...]: ...

    def preempts(self, candidate: tuple[int, ...], running: tuple[int, ...]) -> bool:
        """Whether a waiting sequence of order ``candidate`` may push out a running one when there is no room."""
        ...


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": Priority}


def create_policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"--scheduling-policy is {name!r}; choose one of {', '.join(POLICIES)}.")
    return POLICIES[name]()
