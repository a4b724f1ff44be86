"""The soak in seconds, and what its judgement sees. The real ones are minutes or hours, by tests/reliability/run.py."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.reliability import soak
from tests.reliability.trend import leasts, trend
from tests.support.snapshot import Memory


def tally(
    *, grows: float = 0.0, wrong: int = 0, engine: bool = False, minutes: int = 60, slower: float = 0.0
) -> soak.Tally:
    """So many minutes of a process of 80 MiB, of which one part grows by so many MiB an hour, under what comes and goes
    and an allocator's steps."""
    samples, rng = [], random.Random(59)
    for second in range(0, 60 * minutes, 2):
        steps = (second > 300) * 132 << 10
        moment = int(rng.expovariate(1 / (200 << 10)))
        grown, flat = (
            Memory(size, size, size)
            for size in (int((80 + grows * second / 3600) * 2**20) + steps + moment, 80 * 2**20 + moment)
        )
        samples.append((float(second), flat, grown) if engine else (float(second), grown, flat))
    paces = [(float(each), 0.01 * rng.uniform(1, 1.5) * (1 + slower * each / 6000)) for each in range(6000)]
    return soak.Tally(Counter(whole=10_000), ["x"] * wrong, samples, paces)


def test_a_soak_of_seconds_passes() -> None:
    soak.soak(0.08)


@pytest.mark.parametrize("minutes", [13, 60])
def test_what_grows_is_noticed(minutes: int) -> None:
    soak.judge(tally(minutes=minutes), 60)
    for engine in (False, True):
        with pytest.raises(AssertionError, match=f"memory of the {soak.PROCESSES[engine]} grows"):
            soak.judge(tally(grows=4.0, engine=engine, minutes=minutes), 60)
    with pytest.raises(AssertionError, match="memory of the front end grew"):
        soak.judge(tally(grows=20), 3)
    with pytest.raises(AssertionError, match="drift"):
        soak.judge(tally(slower=0.2), 60)


def test_a_trend_by_hand() -> None:
    assert trend([0, 1, 2, 3, 4], [5, 7, 9, 11, 100]).slope == 2.0
    flat = trend(list(range(40)), [1.0] * 40)
    assert (flat.slope, flat.low, flat.high) == (0.0, 0.0, 0.0)
    found = trend(list(range(40)), [2 * each + (each * 7919 % 13) for each in range(40)])
    assert found.low < 2 < found.high and found.high - found.low < 0.3
    assert leasts([0, 1, 2, 3, 4], [9, 3, 8, 1, 7], 2) == ([0.5, 2.5], [3, 1])


def test_what_fails_is_noticed() -> None:
    soak.judge(tally(wrong=9), 60)
    with pytest.raises(AssertionError, match="11 of 10000 failed"):
        soak.judge(tally(wrong=11), 60)
