"""How steadily steps keep to their price: what disturbs a machine makes some of them longer, and lasts a while.

    seconds of a step = its price · ratio
    ratio             = drawn from those that were measured, so that a long step is as likely as it was; of steps with
    parts of prompts from those
                        of such steps (they are long, so what comes between is a smaller part of them)
    of its score      the share ``lasting`` moves from one value to the next within ``seconds``; the rest is each step's
    own

A price is what a step takes in the middle, not in the mean: without its ratio, every tail would be too short. The draws
are a function of a seed, the step's number and the time, so that a run is the same however it is computed.

What lives here: fitting the ratios to measured steps, drawing them. What may not: what is kept of them
(cost/calibrated.py), prices, clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from headrace.cost.calibrated import LONG, SHARES, Steadiness

STEADY = 0.005  # a spread (of the middle 90 %) below is none
LEAST_STEPS = 50
_NORMAL = NormalDist()
_DURATIONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # s
_LAGS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # s: edges
_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


class Disturbances:
    """The ratio of each step of one run."""

    __slots__ = ("_between", "_knots", "_own", "_place", "_seed", "_slow", "_steadiness")

    def __init__(self, steadiness: Steadiness, seed: int) -> None:
        self._steadiness = steadiness
        self._seed = (seed * _GOLDEN) & _MASK
        self._slow, self._own = math.sqrt(steadiness.lasting), math.sqrt(1.0 - steadiness.lasting)
        self._between = steadiness.seconds
        self._place = -1
        self._knots = (0.0, 0.0)

    def ratio(self, step: int, now: float, decode: bool = True) -> float:
        score = self._own * _normal(self._seed, 2 * step)
        if self._slow:
            score += self._slow * self._lasting(now)
        return self._steadiness.ratio(score, decode=decode)

    def _lasting(self, now: float) -> float:
        """Between two independent values, one at each end of the span that the time is in."""
        place = int(now / self._between)
        if place != self._place:
            self._place = place
            self._knots = _normal(self._seed, 2 * place + 1), _normal(self._seed, 2 * place + 3)
        share = now / self._between - place
        rest = 1.0 - share
        return (rest * self._knots[0] + share * self._knots[1]) / math.sqrt(rest * rest + share * share)


def _normal(seed: int, index: int) -> float:
    """A standard normal, by two rounds of mixing."""
    mixed = (seed + (index + 1) * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return _NORMAL.inv_cdf(((mixed ^ (mixed >> 31)) + 0.5) / 2.0**64)


# --- fitting


def fit_steadiness(
    times: Sequence[np.ndarray], ratios: Sequence[np.ndarray], decode: Sequence[np.ndarray]
) -> Steadiness | None:
    """By run: when steps began, in seconds, measured over price of each, and whether it computed single tokens alone.
    None where steps are steady, or too few."""
    every, single = np.concatenate(ratios), np.concatenate(decode).astype(bool)
    if len(every) < LEAST_STEPS or np.quantile(every, 0.95) / np.quantile(every, 0.05) - 1.0 < STEADY:
        return None
    kinds = [every[mask] if mask.sum() >= LEAST_STEPS else every for mask in (single, ~single)]
    decode, prompts = (tuple(np.quantile(each, SHARES).tolist()) for each in kinds)
    return Steadiness(decode, prompts, *_lasting(times, ratios), float(np.mean(every > LONG)))


def _lasting(times: Sequence[np.ndarray], ratios: Sequence[np.ndarray]) -> tuple[float, float]:
    """The share and the duration whose products of scores, over the seconds between two steps, come nearest to those
    that were measured."""
    between, products = _products(times, _scores(ratios))
    if not len(between):
        return 0.0, 1.0
    place = np.digitize(between, _LAGS) - 1
    count = np.bincount(place, minlength=len(_LAGS))[: len(_LAGS) - 1]
    seen = np.bincount(place, products, minlength=len(_LAGS))[: len(_LAGS) - 1] / np.maximum(count, 1)
    lag = np.bincount(place, between, minlength=len(_LAGS))[: len(_LAGS) - 1] / np.maximum(count, 1)
    weight = np.sqrt(count)
    best = min((_share(seconds, lag, seen, weight) for seconds in _DURATIONS), key=lambda each: each[0])
    return best[1], best[2]


def _share(seconds: float, lag: np.ndarray, seen: np.ndarray, weight: np.ndarray) -> tuple[float, float, float]:
    """What is left with this duration, and the share that leaves least."""
    form = _correlation(lag / seconds)
    length = float((weight * form) @ form)
    share = min(1.0, max(0.0, float((weight * form) @ seen) / length)) if length else 0.0
    left = seen - share * form
    return float((weight * left) @ left), share, seconds


def _correlation(lags: np.ndarray) -> np.ndarray:
    """Of ``Disturbances._lasting`` with itself so many spans later, in the mean over where in its span it begins."""
    begin = (np.arange(64) + 0.5) / 64
    later = begin + lags[:, None]
    whole, share = np.floor(later), later - np.floor(later)
    size = np.hypot(begin, 1.0 - begin) * np.hypot(share, 1.0 - share)
    same = ((1.0 - begin) * (1.0 - share) + begin * share) / size
    following = begin * (1.0 - share) / size
    found: np.ndarray = np.where(whole == 0, same, np.where(whole == 1, following, 0.0)).mean(axis=1)
    return found


def _scores(ratios: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of a standard normal, by the places of all in their order."""
    every = np.concatenate(ratios)
    order = np.empty(len(every))
    order[np.argsort(every, kind="stable")] = (np.arange(len(every)) + 0.5) / len(every)
    scores = np.array([_NORMAL.inv_cdf(each) for each in order])
    return np.split(scores, np.cumsum([len(each) for each in ratios])[:-1])


def _products(times: Sequence[np.ndarray], scores: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Of each two steps up to 32 apart: seconds between them, and the product of their scores."""
    between, products = [np.zeros(0)], [np.zeros(0)]
    for when, score in zip(times, scores, strict=True):
        for apart in (1, 2, 4, 8, 16, 32):
            between.append(np.asarray(when[apart:]) - np.asarray(when[:-apart]))
            products.append(score[apart:] * score[:-apart])
    return np.concatenate(between), np.concatenate(products)
