"""Places of the queue among tenants: one that floods leaves room for whoever comes, equal parts follow, and a front end
that dies gives back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import ServerConfig
from headrace.server.exposition import CELLS, Counters, most_places
from headrace.server.limits import cell_of


def flood(counters: Counters, limit: int, cell: int | None, front: int = 0) -> int:
    """As many places as there are, one by one."""
    return sum(
        1
        for _ in itertools.takewhile(
            bool, (counters.try_hold(counters.pages[front], 1, limit, cell) for _ in range(limit + 1))
        )
    )


@pytest.mark.parametrize("limit", [1, 2, 8, 64, 1024])
def test_one_that_floods_gets_nearly_all_and_whoever_comes_gets_in(limit: int) -> None:
    counters = Counters.create(2)
    held = flood(counters, limit, 0) + flood(counters, limit, 0, front=1)  # by both front ends
    assert held == most_places(limit, 0) and held >= limit * 8 // 9
    assert limit == 1 or counters.try_hold(counters.pages[1], 1, limit, 1)
    assert not counters.try_hold(counters.pages[0], 1, limit, 0)


def test_without_tenants_the_queue_is_anybodys() -> None:
    counters = Counters.private()
    assert flood(counters, 64, None) == most_places(64, None) == 64


def test_those_who_want_more_come_to_equal_parts() -> None:
    """The flood of one is there first; as its requests end, the others take their places, and it gets no more than
    they."""
    counters, limit, page = Counters.private(), 256, 0
    flood(counters, limit, 0)
    for _ in range(400):
        counters.give_back(counters.pages[page], 1, 0)
        for cell in (1, 2, 3, 0):
            counters.try_hold(counters.pages[page], 1, limit, cell)
    held = [counters.held_by(cell) for cell in range(4)]
    assert min(held) > 0.8 * limit / 4 and max(held) - min(held) <= 8, held
    assert counters.try_hold(counters.pages[page], 1, limit, 9)  # and there is room for a fifth


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(-20, 20)), max_size=80), st.integers(1, 100)
)
def test_whatever_comes_and_goes_nobody_holds_more_than_there_is(moves: list[tuple[int, int, int]], limit: int) -> None:
    counters, held = Counters.create(2), {(front, cell): 0 for front in range(2) for cell in range(6)}
    for front, cell, count in moves:
        if count <= 0:
            count = min(-count, held[front, cell])
            counters.give_back(counters.pages[front], count, cell)
            held[front, cell] -= count
        elif counters.try_hold(counters.pages[front], count, limit, cell):
            held[front, cell] += count
        assert counters.live == sum(held.values()) <= limit
        assert all(
            counters.held_by(each) == held[0, each] + held[1, each] <= most_places(limit, each) for each in range(6)
        )


def test_places_of_a_front_end_that_died_come_back() -> None:
    counters = Counters.create(2)
    flood(counters, 64, 3, front=1)
    counters.pages[1].vacate()
    assert counters.live == counters.held_by(3) == 0


def test_who_counts_as_one() -> None:
    """Without keys, with one of them, and whatever users a client names: one, unless users are the tenants by the
    operator's word."""
    keys, user = ("a" * 8, "b" * 8), "somebody"
    assert {
        cell_of(config, "key1", user)
        for config in (ServerConfig(), ServerConfig(api_key=keys[:1]), ServerConfig(tenant_by="key"))
    } == {None}
    several = ServerConfig(api_key=keys, tenant_by="user")
    assert cell_of(several, "key1", "x") == cell_of(several, "key1", "y") != cell_of(several, "key2", "x")
    by_user = ServerConfig(tenant_by="user")
    assert cell_of(by_user, "", "") == cell_of(by_user, "", "") != cell_of(by_user, "", user)
    assert all(0 <= (cell_of(by_user, "", name) or 0) < CELLS for name in ("", "\ud800", "x" * 500))
