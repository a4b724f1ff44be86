"""First come, first served: arrival decides, nobody is pushed out for a later arrival."""

from __future__ import annotations

from headrace.request import Request


class FirstComeFirstServed:
    name = "fcfs"

    def order(self, request: Request, arrival_number: int) -> tuple[int, ...]:
        return (arrival_number,)

    def preempts(self, candidate: tuple[int, ...], running: tuple[int, ...]) -> bool:
        return False
