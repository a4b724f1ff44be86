"""Readers' experience: whoever's reader would miss it most goes first (Andes: Liu et al., "Defining and Enhancing
Quality-of-Experience in LLM-Based Text Streaming Services", 2024).

A reader expects the first token after ``ttft`` seconds and then reads ``speed`` tokens a second. Token i is expected at
e_i and read at r_i, when it has come and all before it are read. With L tokens, the experience is the share of the area
below the expected curve that is kept:

    QoE = 1 − Σ (r_i − e_i) / Σ (end − e_i)                 end: when the last is read; planner/workload/statistics.py
    has the same for samples

    lag    how much later than expected the next token will be read if it comes at once
    L      tokens so far, and what answers here have left on average (their length is not known, and not guessed from
    max_tokens)
    Q(lag) = 1 − (delays so far + (L − so far) · lag) / (L² / 2 speed + L · lag)
    gain   = Q(lag if served now) − Q(lag if not served for HORIZON): nothing while the reader still has something to
    read
    weight = the share of rows or of the cache that it takes, whichever is larger

Sequences are served by gain / weight, the paper's greedy way to fill its knapsack; one with text in stock is pushed out
for one that gains more, at most ``preemptions`` times a request on average (who gives way for want of blocks, or falls
with a step, counts, but nothing is owed for it). The paper's search for a batch size is left out: a step of a full
batch is many times quicker than a reader, so a smaller one would gain nothing.

No request starves: every TURN-th admission is the longest waiting one's. And whoever was admitted is not pushed out before
it has a new token.

What lives here: readers, gains, turns. What may not: defaults (config.py), room (step_planner.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.request import Request, SequenceStatus
from headrace.scheduler.policies.protocol import DynamicPolicy, Order, Refusal
from headrace.scheduler.roster import Roster, Sequence, WaitingQueue

HORIZON = 1.0  # seconds
LOOK = 0.05  # seconds between two looks at everybody
TURN = 8
STAYS = 1.5  # how much more one that runs is worth than one that would take its place
FIRST_LENGTH = 128.0  # tokens of an answer, before any has ended
_KEEP = 0.95  # of what is known about lengths
_MOST_CREDIT = 64.0  # preemptions that may be saved up


@dataclass(slots=True)
class Reader:
    """One reader and its text, as of ``seen``. ``dry``: when everything that has come is read (before: when the first
    token is expected)."""

    start: float  # when the first token is expected
    speed: float
    dry: float
    seen: float
    tokens: int = 0
    delays: float = 0.0  # Σ of read - expected, tokens · s
    ready_at: int = 0  # tokens that it must have before it may be pushed out
    turn: int = 0  # its number among those who were admitted, while it runs; 0: it waits

    def take(self, tokens: int, now: float) -> None:
        """What has come since it was seen came evenly."""
        new, since = tokens - self.tokens, max(0.0, now - self.seen)
        self.seen = now
        if new <= 0:
            return
        first = max(self.dry, now - since + since / new)
        begin = first - self.expected(self.tokens)
        self.dry = max(first + new / self.speed, now + 1.0 / self.speed)
        self.tokens = tokens
        self.delays += new * max(0.0, begin + self.dry - self.expected(tokens)) / 2.0

    def expected(self, tokens: int) -> float:
        """When token number ``tokens`` (from 0) is."""
        return self.start + tokens / self.speed

    def experience(self, served: float, left: float) -> float:
        """QoE in the end if the next token comes at ``served`` and the answer has ``left`` more."""
        lag = max(0.0, max(self.dry, served) - self.expected(self.tokens))
        length = self.tokens + left
        whole = length * length / (2.0 * self.speed) + length * lag
        return 1.0 - (self.delays + left * lag) / whole


class QualityOfExperience(DynamicPolicy):
    """See the module. ``ttft`` and ``speed``: of readers that say nothing."""

    def __init__(self, ttft: float, speed: float, preemptions: float) -> None:
        self._ttft, self._speed, self._preemptions = ttft, speed, preemptions
        self._readers: dict[Sequence, Reader] = {}
        self._queue = WaitingQueue()
        self._length = FIRST_LENGTH
        self._credit = 0.0
        self._admitted = 0
        self._next_look = self._last_look = 0.0
        self._row = self._token = 0.0  # the shares that a row and a token of the cache are

    def create_queue(self) -> WaitingQueue:
        return self._queue

    def order(self, request: Request, arrival_number: int) -> Order:
        return (1.0, 0.0, 0.0, arrival_number)

    def preempts(self, candidate: Sequence, running: Sequence) -> bool:
        return self._credit >= 1.0 and running.order[0] > 0.0 and candidate.order < running.order

    # --- what happens

    def arrived(self, sequence: Sequence, roster: Roster) -> Refusal | None:
        self._measure(roster)
        self._credit = min(_MOST_CREDIT, self._credit + self._preemptions)
        reader = self._meet(sequence, roster.now)
        sequence.order = self._order_of(sequence, reader, roster.now)
        return None

    def consider(self, roster: Roster) -> Iterable[tuple[Sequence, Refusal]]:
        """Where requests wait, and not at every step."""
        if not len(roster.waiting):
            self.wake = math.inf
        elif not self._last_look <= roster.now < self._next_look:
            self._look(roster)
        return ()

    def admitted(self, sequence: Sequence, now: float) -> None:
        self._admitted += 1
        reader = self._readers.get(sequence) or self._meet(sequence, now)
        reader.turn, reader.ready_at = self._admitted, reader.tokens + 1
        sequence.order = self._order_of(sequence, reader, now)
        if self._admitted % TURN == 0:
            self._give_turn()

    def left(self, sequence: Sequence, now: float) -> None:
        reader = self._readers[sequence]
        if sequence.status is SequenceStatus.FINISHED:
            del self._readers[sequence]
            if sequence.num_output_tokens:
                self._length = _KEEP * self._length + (1.0 - _KEEP) * sequence.num_output_tokens
        else:
            # not below: it may have been for want of blocks, or its step failed
            self._credit = max(0.0, self._credit - 1.0)
            reader.take(sequence.num_output_tokens, now)
            reader.turn = 0
            sequence.order = self._order_of(sequence, reader, now)

    # --- who goes first

    def _look(self, roster: Roster) -> None:
        now = roster.now
        self._last_look, self._next_look = now, now + LOOK
        self.wake = self._next_look
        self._measure(roster)
        for sequence, reader in self._readers.items():
            reader.take(sequence.num_output_tokens, now)
            if reader.turn or sequence.order[0] > 0.0:  # else it waits for its turn, which is not taken from it
                sequence.order = self._order_of(sequence, reader, now)
        roster.waiting.reorder()

    def _order_of(self, sequence: Sequence, reader: Reader, now: float) -> Order:
        if reader.turn and reader.tokens < reader.ready_at:
            return (0.0, 0.0, reader.turn, sequence.order[-1])
        if reader.dry >= now + HORIZON:  # it has enough to read: nothing is gained, as the formula would find
            return (1.0, 0.0, reader.dry, sequence.order[-1])
        gain = reader.experience(now, self._length) - reader.experience(now + HORIZON, self._length)
        weight = max(self._row, self._token * sequence.num_tokens)
        worth = gain / weight * (STAYS if reader.turn else 1.0)
        return (1.0, -worth, reader.dry, sequence.order[-1])

    def _give_turn(self) -> None:
        """To the one who came first of those who wait; it goes before everybody."""
        oldest = min(self._queue, key=lambda sequence: sequence.order[-1], default=None)
        if oldest is not None:
            oldest.order = (0.0, 0.0, 0.0, oldest.order[-1])
            self._queue.reorder()

    def _meet(self, sequence: Sequence, now: float) -> Reader:
        request = sequence.request
        expects = request.expects
        start = request.arrival_time + (self._ttft if expects.ttft is None else expects.ttft)
        speed = self._speed if expects.reading_speed is None else expects.reading_speed
        reader = self._readers[sequence] = Reader(start, speed, start, now)
        return reader

    def _measure(self, roster: Roster) -> None:
        self._row = 1.0 / roster.limits.max_num_seqs
        self._token = 1.0 / roster.cache.capacity_tokens(1)
