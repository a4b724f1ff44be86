"""The searches of the simulated benchmarks: they end, whatever they are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.errors import ConfigError
from headrace.planner.workload.statistics import Sample
from lab import capacity, overload


@pytest.mark.parametrize("limit", [0.02, 1.0, 37.0])
def test_the_highest_rate_is_found_wherever_it_lies(limit: float) -> None:
    assert limit / capacity.CLOSE <= capacity.capacity(lambda rate: rate <= limit, 1.0) <= limit


def test_a_search_without_an_end_is_a_sentence() -> None:
    assert capacity.capacity(lambda rate: False, 1.0) == 0.0
    with pytest.raises(ConfigError, match="give more --requests"):
        capacity.capacity(lambda rate: True, 1.0)


def served(rate: float, sustained: float, seconds: float, answer: float = 1.0) -> list[Sample]:
    """Of a server that begins no more than ``sustained`` requests a second, and answers each for so long."""
    found, free = [], 0.0
    for number in range(int(rate * seconds)):
        sent = number / rate
        begin = free = max(sent, free + 1.0 / sustained)
        found.append(Sample(sent, [begin, begin + answer], ended=begin + answer))
    return found


@pytest.mark.parametrize(
    ("rate", "sustained", "seconds", "answer", "steady"),
    [
        (17.0, 18.0, 20.0, 1.0, "yes"),
        (20.7, 18.0, 20.0, 1.0, "no"),  # whose median first token comes after 1.3 s
        (19.5, 18.0, 200.0, 1.0, "no"),
        (17.0, 18.0, 20.0, 9.0, "yes"),
        (17.0, 18.0, 20.0, 15.0, "too short"),  # none of those that came in the second half can have ended
        (20.7, 18.0, 20.0, 15.0, "no"),
    ],
)
def test_a_queue_that_grows_is_no_capacity(
    rate: float, sustained: float, seconds: float, answer: float, steady: str
) -> None:
    assert capacity.steadiness_of(served(rate, sustained, seconds, answer)) == steady


def test_answers_that_pile_up_are_no_capacity_either() -> None:
    """Everybody is begun at once; each answer takes longer than the one before."""
    piling = [Sample(sent := number / 10, [sent, sent + 0.2 * sent], ended=sent * 1.2) for number in range(400)]
    assert capacity.steadiness_of(piling) == "no"
    lost = [Sample(number / 10, error="500: lost") for number in range(400)]
    assert capacity.steadiness_of(lost) == "no"


def test_what_a_device_can_do_is_not_told_by_answers_that_end_at_once() -> None:
    def bench(*ends: float) -> Any:
        return cast(
            Any,
            SimpleNamespace(
                at_rate=lambda rate: [], run=lambda config, asked: ({}, [Sample(0.0, ended=end) for end in ends])
            ),
        )

    limits = {"ttft": 1.0, "tpot": 0.1}
    assert overload.saturated(bench(1.0, 2.0, 3.0), limits) == 1.0
    with pytest.raises(ConfigError, match="All 2 answers end at one moment"):
        overload.saturated(bench(5.0, 5.0), limits)
