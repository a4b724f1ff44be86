"""Arrivals have the rate, the burstiness and the tides that were asked for, and hang on nothing but their seed."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.planner.workload.arrivals import GAPS, Swing, arrival_times
from headrace.planner.workload.conversations import conversations_of
from headrace.planner.workload.load import Lengths, arriving, conversing, drawn

COUNT = 20_000


def variation(gaps: str, shape: float) -> float:
    """Standard deviation over mean, from the distributions' own formulas."""
    if gaps == "gamma":
        return 1 / math.sqrt(shape)
    return math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("shape", [0.6, 1.0, 3.0])
def test_gaps_have_their_mean_and_their_spread(gaps: str, shape: float) -> None:
    found = np.diff(arrival_times(COUNT, 8.0, burstiness=shape, gaps=gaps, seed=3), prepend=0.0)
    assert found.min() >= 0
    assert found.mean() == pytest.approx(1 / 8, rel=0.04)
    assert found.std() / found.mean() == pytest.approx(variation(gaps, shape), rel=0.06)


def test_the_two_distributions_meet_at_poisson_and_differ_elsewhere() -> None:
    """Half of a Poisson process's gaps are below ln 2 of the mean; a Weibull tail of shape 1/2 is heavier than the
    gamma one."""
    for gaps in GAPS:
        assert np.median(np.diff(arrival_times(COUNT, 1.0, gaps=gaps))) == pytest.approx(math.log(2), rel=0.04)
    tails = [(np.diff(arrival_times(COUNT, 1.0, burstiness=0.5, gaps=gaps)) > 8).mean() for gaps in GAPS]
    assert tails[1] > 1.5 * tails[0]


def test_an_endless_shape_is_a_metronome_and_an_endless_rate_a_crowd() -> None:
    assert np.diff(arrival_times(5, 4.0, burstiness=math.inf)).tolist() == [0.25] * 4
    assert arrival_times(3, math.inf, gaps="weibull", swing=Swing(0.5)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("gaps", GAPS)
def test_a_rate_swings_as_it_should(gaps: str) -> None:
    """Of each eighth of the period as many arrivals as its integral says, over many periods; none is lost."""
    amplitude, period = 0.8, 100.0
    times = arrival_times(COUNT, 10.0, gaps=gaps, swing=Swing(amplitude, period), seed=2)
    assert len(times) == COUNT and (np.diff(times) >= 0).all() and times[0] >= 0
    whole = times[times < period * (times[-1] // period)]
    counts, edges = np.histogram(whole % period, bins=8, range=(0, period))
    turn = 2 * math.pi / period
    integral = [
        (high - low) + amplitude / turn * (math.cos(turn * low) - math.cos(turn * high))
        for low, high in pairwise(edges)
    ]
    assert counts / len(whole) == pytest.approx(np.array(integral) / period, rel=0.08)
    assert len(whole) / (times[-1] // period * period) == pytest.approx(10.0, rel=0.03)


def test_a_swinging_poisson_process_is_one() -> None:
    """Bent back, its gaps are exponential again: what thinning would give."""
    amplitude, period = 0.9, 50.0
    times = arrival_times(COUNT, 5.0, swing=Swing(amplitude, period), seed=7)
    turn = 2 * math.pi / period
    steady = np.diff(times + amplitude / turn * (1 - np.cos(turn * times)), prepend=0.0) * 5.0
    assert steady.mean() == pytest.approx(1, rel=0.03) and steady.std() == pytest.approx(1, rel=0.03)
    assert np.median(steady) == pytest.approx(math.log(2), rel=0.03)


def test_the_seed_decides_and_a_rate_only_scales() -> None:
    first, again, other = (arrival_times(50, 3.0, burstiness=0.5, gaps="weibull", seed=seed) for seed in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    assert arrival_times(50, 6.0, burstiness=0.5, gaps="weibull", seed=1) == pytest.approx(first / 2)


@pytest.mark.parametrize("swing", [None, Swing(0.5, 20.0)])
def test_a_server_and_a_simulation_get_the_same_arrivals(swing: Swing | None) -> None:
    lengths, shape = Lengths(9, 5, 0.5), {"burstiness": 0.7, "gaps": "weibull", "swing": swing, "seed": 4}
    asked = arriving(drawn(30, lengths, seed=4), 2.0, **shape)  # type: ignore[arg-type]
    sent = conversations_of(asked, vocab_size=1000, seed=4)
    assert [each.at for each in asked] == [each.arrival for each in sent]
    talks = arriving(conversing(30, 3, lengths, system=4, think=1.0, seed=4), 2.0, **shape)  # type: ignore[arg-type]
    assert [each.at for each in talks if each.follows is None] == [each.arrival for each in sent]
    assert all(each.at is None for each in talks if each.follows is not None)


def test_what_cannot_be_meant_is_refused() -> None:
    for wrong in (
        {"rate": 0.0},
        {"rate": math.nan},
        {"rate": 1.0, "burstiness": 0.0},
        {"rate": 1.0, "burstiness": math.nan},
    ):
        with pytest.raises(ConfigError, match="above 0"):
            arrival_times(3, **wrong)
    with pytest.raises(ConfigError, match="choose one of gamma, weibull"):
        arrival_times(3, 1.0, gaps="pareto")
    for amplitude, period in ((1.0, 5.0), (-0.1, 5.0), (math.nan, 5.0), (0.5, 0.0), (0.5, math.inf)):
        with pytest.raises(ConfigError, match="0 to below 1"):
            Swing(amplitude, period)
