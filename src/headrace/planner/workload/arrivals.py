"""When requests come in an open loop: gaps of a distribution, and a rate that may rise and fall.

    gaps       mean 1 / rate, shape k (``burstiness``)               squared variation of a gap
    gamma      scale 1 / (rate · k)                                  1 / k
    weibull    scale 1 / (rate · Γ(1 + 1/k))                         Γ(1 + 2/k) / Γ(1 + 1/k)² - 1

With k = 1 both are a Poisson process; below 1 they are burstier, above 1 more even, at infinity all gaps are equal.

A rate that swings, rate · (1 + a · sin(2πt / period)), bends time: arrivals of the steady process are moved to where as
many were to be expected. Of a Poisson process that is exactly the one with that rate (what thinning gives, too), and it
serves the others as well; the number of requests stays what was asked for.

What lives here: times. What may not: who comes (conversations.py, asked.py), clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError

GAPS = ("gamma", "weibull")
DAY = 86_400.0  # seconds
LEAST_SHAPE = 0.01  # below, nearly all gaps are 0 and a few are longer than any run
_ROUNDS = 60  # of halving: to the last bits of a float


@dataclass(frozen=True, slots=True)
class Swing:
    """``amplitude``: of the rate, 0 to below 1. ``period`` in seconds."""

    amplitude: float
    period: float = DAY

    def __post_init__(self) -> None:
        if not 0 <= self.amplitude < 1 or not 0 < self.period < math.inf:
            raise ConfigError(
                f"The rate swings by {self.amplitude:g} in {self.period:g} s; give 0 to below 1, and a time above 0."
            )


def arrival_times(
    count: int, rate: float, *, burstiness: float = 1.0, gaps: str = "gamma", swing: Swing | None = None, seed: int = 0
) -> np.ndarray:
    """``count`` ascending times in seconds. An infinite rate sends everything at once. Raises ConfigError."""
    if not rate > 0 or not burstiness >= LEAST_SHAPE:
        raise ConfigError(
            f"The request rate is {rate:g} and the burstiness {burstiness:g}; give numbers above 0, and from {LEAST_SHAPE:g} on."
        )
    if gaps not in GAPS:
        raise ConfigError(f"The gaps are {gaps!r}; choose one of {', '.join(GAPS)}.")
    times = np.cumsum(_gaps(count, rate, burstiness, gaps, np.random.default_rng(seed)))
    return times if swing is None or not swing.amplitude or math.isinf(rate) else _bent(times, swing)


def _gaps(count: int, rate: float, shape: float, gaps: str, rng: np.random.Generator) -> np.ndarray:
    if math.isinf(rate) or math.isinf(shape):
        return np.full(count, 1.0 / rate)
    if gaps == "weibull":
        return rng.weibull(shape, count) / (rate * math.gamma(1.0 + 1.0 / shape))
    return rng.gamma(shape, 1.0 / (rate * shape), count)


def _bent(times: np.ndarray, swing: Swing) -> np.ndarray:
    """Where t + a · period / 2π · (1 - cos(2πt / period)), the share of all that should have come until t, reaches each
    of ``times``."""
    turn = 2.0 * math.pi / swing.period
    reach = swing.amplitude / turn
    low, high = times - 2.0 * reach, times.copy()
    for _ in range(_ROUNDS):
        middle = (low + high) / 2.0
        over = middle + reach * (1.0 - np.cos(turn * middle)) > times
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return np.maximum.accumulate(np.maximum(high, 0.0))
