"""The searches of the simulated benchmarks: they end, whatever they are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.bench import capacity, overload
from headrace.bench.statistics import Sample
from headrace.errors import ConfigError


@pytest.mark.parametrize("limit", [0.02, 1.0, 37.0])
def test_the_highest_rate_is_found_wherever_it_lies(limit: float) -> None:
    assert limit / capacity.CLOSE <= capacity.capacity(lambda rate: rate <= limit, 1.0) <= limit


def test_a_search_without_an_end_is_a_sentence() -> None:
    assert capacity.capacity(lambda rate: False, 1.0) == 0.0
    with pytest.raises(ConfigError, match="give more --requests"):
        capacity.capacity(lambda rate: True, 1.0)


def test_what_a_device_can_do_is_not_told_by_answers_that_end_at_once() -> None:
    def bench(*ends: float) -> Any:
        return cast(Any, SimpleNamespace(at_rate=lambda rate: [], run=lambda config, asked: ({}, [Sample(0.0, ended=end) for end in ends])))

    limits = {"ttft": 1.0, "tpot": 0.1}
    assert overload.saturated(bench(1.0, 2.0, 3.0), limits) == 1.0
    with pytest.raises(ConfigError, match="All 2 answers end at one moment"):
        overload.saturated(bench(5.0, 5.0), limits)
