"""Priority classes: lower numbers first, arrival within a class; a better class pushes a worse one out when there is no room."""

from __future__ import annotations

from headrace.request import Request


class Priority:
    name = "priority"

    def order(self, request: Request, arrival_number: int) -> tuple[int, ...]:
        return (request.priority, arrival_number)

    def preempts(self, candidate: tuple[int, ...], running: tuple[int, ...]) -> bool:
        return candidate[0] < running[0]
