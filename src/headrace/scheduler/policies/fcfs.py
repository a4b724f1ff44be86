"""First come, first served: arrival decides, nobody is pushed out for a later arrival."""

from __future__ import annotations

from headrace.request import Request
from headrace.sequence import Sequence


class FirstComeFirstServed:
    name = "fcfs"

    def order(self, request: Request, arrival_number: int) -> tuple[float, ...]:
        return (arrival_number,)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        return False
