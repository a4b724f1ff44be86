"""The time that folders of tests may take, and what a slow machine changes about it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def budgets(seconds: float, counts: list[float]) -> conftest.Budgets:
    config: Any = SimpleNamespace(stash={conftest.SECONDS: Counter({"unit": seconds})}, getoption=lambda name: True)
    found = conftest.Budgets(config)
    found.counts = [each * conftest.COUNT_SECONDS for each in counts]
    return found


@pytest.mark.parametrize(
    ("counts", "times"),
    [
        ([], 1.0),
        ([0.5, 0.6, 0.7], 1.0),
        ([1.1, 1.2, 9.0], 1.2),
        ([7.0, 8.0], 5.0),
    ],  # a quick one gains nothing; the median; at most five times
)
def test_a_budget_is_longer_by_as_much_as_the_machine_counts_slower(counts: list[float], times: float) -> None:
    allowed = conftest.BUDGETS["unit"] * times
    assert budgets(allowed - 0.1, counts).exceeded() == []
    assert budgets(allowed + 0.1, counts).exceeded() == ["unit"]


def test_it_counts_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.0, 11.0, 12.5, 12.5])
    monkeypatch.setattr(conftest.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(conftest, "seconds_to_count", lambda: 0.004)
    found = budgets(1.0, [])
    for _ in range(3):
        found.pytest_runtest_logfinish()
    assert found.counts == [0.004, 0.004]
