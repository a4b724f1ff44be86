"""Who computes prompts and who answers: what is measured, when that changes, and that it does not change to and fro."""

from __future__ import annotations

import pytest

from headrace.disagg.roles import PATIENCE, PERIOD, REST, Change, Measured, Roles, Targets, memory_size, wanted

TARGETS = Targets(first=1.0, gap=0.01)
WELL = Measured(queue=0.1, gap=0.006, busy=0.5)
LATE = Measured(queue=2.0, gap=0.006, busy=1.0)


@pytest.mark.parametrize(
    ("measured", "prompts", "answers", "wish"),
    [
        (WELL, 2, 2, 2),
        (LATE, 1, 3, 2),
        (LATE, 1, 2, 1),  # the other would give a token every 12 ms
        (Measured(queue=2.0, gap=0.006, busy=1.0, least=0.005), 1, 2, 2),  # every 7 ms
        (Measured(queue=2.0, gap=0.012, busy=2.0), 2, 2, 2),  # too much of both
        (Measured(queue=2.0, gap=0.004, busy=1.0), 1, 1, 0),  # nobody is left to help
        (LATE, 1, 1, 1),
        (Measured(gap=0.012, busy=0.7), 2, 2, 1),
        (Measured(room=1.5, busy=0.7), 2, 2, 1),
        (Measured(gap=0.012, busy=0.9), 2, 2, 2),  # one would not do
        (Measured(gap=0.012, busy=0.7), 3, 1, 1),
        (Measured(gap=0.012, busy=0.2), 1, 3, 0),
        (Measured(gap=0.012, busy=0.4), 1, 3, 1),
        (Measured(gap=0.012, busy=0.7), 0, 4, 1),
        (Measured(gap=0.012, busy=0.9), 0, 4, 2),
        (Measured(gap=0.012, busy=0.4), 0, 4, 0),
        (Measured(gap=0.012, busy=1.7), 0, 2, 0),
        (Measured(queue=2.0, gap=0.009, busy=0.9), 0, 2, 0),
    ],
)
def test_who_is_late_gets_a_replica_of_who_is_not(measured: Measured, prompts: int, answers: int, wish: int) -> None:
    assert wanted(measured, prompts, answers, TARGETS) == wish


class World:
    """``roles`` and the time. ``heavy``: by replica, what it has to do."""

    def __init__(self, replicas: int, prompts: int, **given: object) -> None:
        self.now, self.heavy = 0.0, dict.fromkeys(range(replicas), (0, 0))
        self.roles = Roles(
            replicas,
            prompts,
            lambda: self.now,
            targets=TARGETS,
            load=self.heavy.__getitem__,
            **{"changes": True, **given},
        )  # type: ignore[arg-type]
        self.up = list(range(replicas))
        self._ids = iter(range(1 << 30))

    def late(self, periods: int) -> list[Change]:
        """Two prompts wait for each other, two seconds each."""
        return self._periods(periods, self._two_prompts)

    def slow(self, periods: int) -> list[Change]:
        """A token every 20 ms."""
        return self._periods(periods, self._slow_answer)

    def _periods(self, periods: int, happens: object) -> list[Change]:
        found = list[Change]()
        for _ in range(periods):
            happens()  # type: ignore[operator]
            found += self.roles.look(self.up)
        return found

    def _two_prompts(self) -> None:
        prompts, answers = self.roles.split(self.up)
        ids = [next(self._ids) for _ in range(4)]
        for each in ids:
            self.roles.asked(each, answers[0], prompts[0])
            self.roles.has_room(each)
        self.now += 4 * PERIOD
        for each in ids:
            self.roles.began(each)
            self.roles.ended(each)

    def _slow_answer(self) -> None:
        number, each = self.roles.split(self.up)[1][0], next(self._ids)
        self.roles.asked(each, number, number)
        self.roles.began(each)
        for _ in range(60):
            self.roles.stepped(number, self.now)
            self.now += 0.02
        self.roles.ended(each)


def test_roles_change_when_the_load_says_so_often_enough_and_the_lightest_goes() -> None:
    world = World(4, 1)
    world.heavy |= {1: (0, 9), 2: (0, 2), 3: (0, 5)}
    assert not world.late(PATIENCE - 1) and not world._periods(1, lambda: setattr(world, "now", world.now + PERIOD))
    (change,) = world.late(PATIENCE)
    assert (change.replica, change.prompts) == (2, True) and change.why.queue > 1.0
    assert world.roles.told == {0: 1, 1: 0, 2: 1, 3: 0} and world.roles.num_changes == 1
    assert world.roles.split([0, 1, 2, 3]) == ([0, 2], [1, 3])
    assert world.roles.split([0, 2]) == ((), [0, 2])  # who answers is gone


def test_changes_back_become_rarer() -> None:
    world = World(4, 2)
    looks = list[int]()
    for at in range(6):
        count = 0
        while not (world.slow(1) if at % 2 == 0 else world.late(1)):
            count += 1
        looks.append(count + 1)
    assert looks[0] == PATIENCE and looks[1] == REST
    assert looks[2:] == [2 * REST, 4 * REST, 8 * REST, 16 * REST]


def test_where_roles_stay_it_is_said_once_what_would_be_better() -> None:
    world = World(4, 1, changes=False)
    assert not world.late(3 * PATIENCE) and world.roles.num_changes == 0
    assert world.roles.advice is not None and "--prefill-replicas 2, or --technique swap_roles=on" in world.roles.advice
    world.roles.advice = None
    world.late(PATIENCE)
    assert world.roles.advice is None


def test_front_ends_share_roles() -> None:
    memory = memoryview(bytearray(memory_size(4))).cast("q")
    first = World(4, 1, memory=memory)
    others = Roles(4, 1, lambda: 0.0, memory=memory)
    assert len(first.late(PATIENCE)) == 1
    assert others.told == first.roles.told == Roles(4, 1, lambda: 0.0, memory=memory).told
    assert others.num_changes == 1


def test_those_who_are_left_all_do_both() -> None:
    world = World(4, 2)
    world.up = [0, 1]
    world.now += PERIOD
    world.roles.look(world.up)
    assert world.roles.told == {0: 0, 1: 0, 2: 0, 3: 0}
