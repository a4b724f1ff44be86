"""Classes of requests: lower numbers first, arrival within a class; a better class pushes a worse one out when there is
no room."""

from __future__ import annotations

from headrace.request import Request
from headrace.scheduler.policies.protocol import Order, Policy
from headrace.scheduler.roster import Sequence


class Priority(Policy):
    def order(self, request: Request, arrival_number: int) -> Order:
        return (request.priority, arrival_number)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        return candidate.order[0] < running.order[0]
