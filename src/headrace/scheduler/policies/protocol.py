"""What a policy is: orders of service that never change (Policy), and those that follow what happens (DynamicPolicy).

    a sequence         a dynamic policy is
    arrives            asked: it may order it, or turn it away                      arrived
    waits              asked, once before a step that is planned anew               consider
    begins (again)     told; how much of it a cached prefix saves stands in it     admitted
    stops running      told: ended, pushed out, or its step failed                  left

It hears of no single token: a sequence's record says at each of these moments how far it has come (known tokens only
grow). So it costs nothing while steps are alike, and steps that fail or are computed again need no undoing.

What it may look at is the roster, of which it changes ``order`` of sequences and nothing else: all records are right
while it is asked.

A policy reads no clock and draws no random number: all it knows came through these calls, so a journal of the
scheduler's calls replays.

What lives here: the base classes, and the two orders that never change. What may not: other policies (a file each), the
register (__init__.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.request import Request
from headrace.scheduler.roster import Roster, Sequence, WaitingQueue

Order = tuple[float, ...]  # smaller goes first; all orders of one policy are of one length; never NaN


class Policy:
    """Sequences are admitted in ascending ``order``; the last in order is the first to be preempted. This one itself is
    first come, first served: none is preempted for a later arrival."""

    def order(self, request: Request, arrival_number: int) -> Order:
        return (arrival_number,)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence may push out a running one when there is no room."""
        return False


class Priority(Policy):
    """Lower numbers first, arrival within a class; a better class pushes a worse one out when there is no room."""

    def order(self, request: Request, arrival_number: int) -> Order:
        return (request.priority, arrival_number)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        return candidate.order[0] < running.order[0]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Turned away before its first token. ``retry_after``: seconds after which it is worth asking again, None where
    nothing can be said. ``param``: the field of the request that asks for what can never be."""

    message: str
    retry_after: float | None = None
    param: str | None = None


class DynamicPolicy(Policy):
    """See the module. ``wake``: steps that are alike are interrupted, to ``consider``, once ``now`` is at least this.
    ``heeds_speed``: the roster's ``speed`` is kept up to date. ``max_step_seconds``: below --max-step-ms, if that is
    set; read before each step."""

    wake: float = math.inf
    heeds_speed: bool = False
    max_step_seconds: float = math.inf

    def create_queue(self) -> WaitingQueue:
        return WaitingQueue()

    def arrived(self, sequence: Sequence, roster: Roster) -> Refusal | None:
        """Before it enters the queue. It may set ``sequence.order``."""
        return None

    def consider(self, roster: Roster) -> Iterable[tuple[Sequence, Refusal]]:
        """Before a step is planned. It may set the orders of those who run (they are sorted afterwards) and of those
        who wait (and then calls ``roster.waiting.reorder()``). What it returns must wait and have no token yet, and
        ends with the refusal."""
        return ()

    def admitted(self, sequence: Sequence, now: float) -> None:
        """It runs from now on, perhaps not for the first time. Siblings (n > 1) come when their prompt is computed;
        ``index`` says which."""
        return None

    def left(self, sequence: Sequence, now: float) -> None:
        """It was running or waiting and has ended (status FINISHED), or was running and waits again (its order may be
        set: it is pushed next). No record but this one is sure to be right."""
        return None
