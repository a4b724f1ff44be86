"""What measurements say: whether a series goes up, and how sure one may be of it; whether two samples are alike.

What lives here: arithmetic. What may not: what is measured, what is allowed.

Sources: Theil (1950) and Sen (1968): the median of the slopes of all pairs; Sen's interval from the variance of
Kendall's S. Mann and Whitney (1947): the rank-sum test, with the normal approximation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SURE = 1.96  # standard deviations: 95 %


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope and its interval."""

    slope: float
    low: float
    high: float

    def scaled(self, factor: float) -> Trend:
        return Trend(self.slope * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.slope:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def leasts(times: Sequence[float], values: Sequence[float], count: int) -> tuple[list[float], list[float]]:
    """The least value of each of ``count`` equal parts of the series, in the middle of its part."""
    size = max(1, len(times) // count)
    starts = range(0, len(times) - size + 1, size)
    return [statistics.fmean(times[start : start + size]) for start in starts], [
        min(values[start : start + size]) for start in starts
    ]


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    count = len(times)
    if count < 3:
        return Trend(0.0, -math.inf, math.inf)
    slopes = sorted(
        (values[j] - values[i]) / (times[j] - times[i])
        for i in range(count)
        for j in range(i + 1, count)
        if times[j] > times[i]
    )
    spread = SURE * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = int((len(slopes) - spread) / 2), math.ceil((len(slopes) + spread) / 2)
    return Trend(statistics.median(slopes), slopes[max(low, 0)], slopes[min(high, len(slopes) - 1)])


def alike(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability of ranks as uneven as these, or more, if both samples are of one kind."""
    n, m = len(first), len(second)
    wins = sum((a > b) + 0.5 * (a == b) for a in first for b in second)
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(wins - n * m / 2) / deviation / math.sqrt(2))
