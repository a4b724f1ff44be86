"""The soak in seconds, and what its judgement sees. The real ones are minutes or hours, by tests/reliability/run.py."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.reliability import soak


def tally(*, grows: float = 0.0, wrong: int = 0, engine: bool = False) -> soak.Tally:
    """An hour of a process of 80 MiB, of which one part grows by so many MiB an hour."""
    samples = []
    for second in range(0, 3600, 10):
        grown = 80 * 2**20 + int(grows * 2**20 * second / 3600) + (second * 7919 % 13) * 4096
        samples.append((float(second), 80 * 2**20, grown) if engine else (float(second), grown, 80 * 2**20))
    return soak.Tally(Counter(whole=10_000), ["x"] * wrong, samples, [(float(each), 0.01) for each in range(30)])


def test_a_soak_of_seconds_passes() -> None:
    soak.soak(0.07)


def test_what_grows_is_noticed() -> None:
    soak.judge(tally(grows=0.5), 60)
    for engine in (False, True):
        with pytest.raises(AssertionError, match="memory grows"):
            soak.judge(tally(grows=1.5, engine=engine), 60)
    with pytest.raises(AssertionError, match="memory grew"):
        soak.judge(tally(grows=20), 3)


def test_what_fails_is_noticed() -> None:
    soak.judge(tally(wrong=9), 60)
    with pytest.raises(AssertionError, match="11 of 10000 failed"):
        soak.judge(tally(wrong=11), 60)
