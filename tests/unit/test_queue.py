"""The waiting queue with lanes, beside a list that is searched: ranks rise at any time, sequences end while they wait,
others come back."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.request import SequenceStatus
from headrace.scheduler.roster import Roster, Sequence, WaitingQueue
from tests.support.hash_engine import engine, request

LANES = "abcd"


def create(roster: Roster, number: int, lane: str, order: float) -> Sequence:
    return roster.create(request(number, [1, 2], tenant=lane), 0, (order, number))


class Model:
    """What a queue with lanes is, searched from one end to the other."""

    def __init__(self, ranks: dict[str, float]) -> None:
        self.ranks = ranks
        self.waiting: dict[Sequence, int] = {}

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        return (self.ranks[sequence.request.tenant], sequence.order, self.waiting[sequence])

    @property
    def head(self) -> Sequence | None:
        return min(self.waiting, key=self.key, default=None)

    def ahead_of(self, sequence: Sequence) -> set[Sequence]:
        own = sequence.request.tenant
        return {
            each
            for each in self.waiting
            if (
                each.order < sequence.order
                if each.request.tenant == own
                else self.ranks[each.request.tenant] < self.ranks[own]
            )
        }


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lanes_are_what_a_search_finds(seed: int) -> None:
    rng, ranks = random.Random(seed), dict.fromkeys(LANES, 0.0)
    queue, model, away = WaitingQueue(lambda sequence: sequence.request.tenant, ranks.__getitem__), Model(ranks), []
    pushed, roster = 0, engine().scheduler.roster
    for number in range(300):
        what = rng.random()
        if what < 0.45 or (away and what < 0.5):
            sequence = (
                away.pop()
                if away and rng.random() < 0.3
                else create(roster, number, rng.choice(LANES), rng.randint(0, 5))
            )
            sequence.status, pushed = SequenceStatus.WAITING, pushed + 1
            queue.push(sequence)
            model.waiting[sequence] = pushed
        elif what < 0.65:
            ranks[rng.choice(LANES)] += rng.choice((0.0, 1.0, 7.0))
        elif what < 0.8 and model.waiting:
            ended = rng.choice(list(model.waiting))
            ended.status = SequenceStatus.FINISHED
            del model.waiting[ended]
            queue.discard()
        elif what < 0.85:
            for sequence in model.waiting:
                sequence.order = (rng.randint(0, 5), sequence.order[1])
            queue.reorder()
        elif model.waiting:
            assert queue.peek() is model.head
            popped = queue.pop()
            del model.waiting[popped]
            popped.status = SequenceStatus.RUNNING
            away.append(popped)
        assert queue.peek() is model.head
        assert len(queue) == len(model.waiting)
    assert set(queue) == set(model.waiting)
    for sequence in list(model.waiting)[:5]:
        assert set(queue.ahead_of(sequence)) == model.ahead_of(sequence)


def test_a_queue_whose_orders_changed_is_sorted_anew_and_equals_keep_their_turn() -> None:
    roster = engine().scheduler.roster
    queue, made = WaitingQueue(), [create(roster, number, "a", number) for number in range(5)]
    for sequence in made:
        queue.push(sequence)
    for sequence in made:
        sequence.order = (-sequence.request_id // 2, 0)
    queue.reorder()
    order = []
    while queue.peek() is not None:
        order.append(queue.pop().request_id)
    assert order == sorted(range(5), key=lambda number: (-number // 2, number))


def test_lanes_that_never_empty_leave_nothing_behind() -> None:
    ranks = {"a": 0.0, "b": 0.0}
    queue, roster = WaitingQueue(lambda sequence: sequence.request.tenant, ranks.__getitem__), engine().scheduler.roster
    for number in range(6):
        queue.push(create(roster, number, "ab"[number % 2], number))
    for _ in range(500):  # the head begins and is pushed out again
        head = queue.peek()
        assert head is not None and queue.pop() is head
        ranks[head.request.tenant] += 1.0
        queue.push(head)
    assert len(queue) == 6 and len(queue._places) < 100
