"""Orders of service that never change: by arrival, and by class."""

from __future__ import annotations

from headrace.request import Request
from headrace.scheduler.policies.protocol import Order, Policy
from headrace.scheduler.roster import Sequence


class FirstComeFirstServed(Policy):
    """Arrival decides, nobody is pushed out for a later arrival."""

    def order(self, request: Request, arrival_number: int) -> Order:
        return (arrival_number,)


class Priority(Policy):
    """Lower numbers first, arrival within a class; a better class pushes a worse one out when there is no room."""

    def order(self, request: Request, arrival_number: int) -> Order:
        return (request.priority, arrival_number)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        return candidate.order[0] < running.order[0]
