"""Fitting an efficiency and an overhead to steps."""

from __future__ import annotations

import pytest

from headrace.bench.steps import fit

FLOORS = [0.001, 0.002, 0.01, 0.1]


def test_steps_that_follow_the_law_give_its_numbers_back() -> None:
    found = fit(FLOORS, [floor / 0.8 + 0.003 for floor in FLOORS])
    assert found is not None
    assert (found.efficiency, found.overhead, found.error) == pytest.approx((0.8, 0.003, 0.0), abs=1e-9)


def test_an_overhead_is_never_negative_and_small_steps_count_as_much_as_large_ones() -> None:
    found = fit(FLOORS, [floor / 0.5 - 0.0002 for floor in FLOORS])
    assert found is not None
    assert found.overhead == 0.0
    assert 0.5 < found.efficiency < 0.56
    assert found.error < 0.1


@pytest.mark.parametrize("floors", [[], [0.001], [0.001, 0.0015, 0.0019], [0.0, 1.0]])
def test_steps_of_one_size_tell_nothing(floors: list[float]) -> None:
    assert fit(floors, [0.01] * len(floors)) is None
