"""How long a step takes here, learned from the steps before it: measured ≈ floor · slope + overhead, with a memory that fades.

What lives here: the fit and its prediction. What may not: floors (cost_model.py), records (metrics.py), numpy (it is on every step's path).

Least squares on relative errors, so that a step that was disturbed (and took long) weighs little; the five sums fade by ``KEEP`` a step.
"""

from __future__ import annotations

from headrace.cost.speed import Line

KEEP = 0.98  # of what was known: some fifty steps count
STEPS_BEFORE_USE = 8
_SPREAD = 1e-3  # how different floors must be, relatively, to tell a slope from an overhead


class OnlineFit:
    """One kind of step on one device. Seconds in, seconds out."""

    __slots__ = ("_count", "_overhead", "_slope", "_x", "_xx", "_xy", "_y", "_yy")

    def __init__(self) -> None:
        self._count = 0
        self._xx = self._xy = self._yy = self._x = self._y = 0.0
        self._slope, self._overhead = 1.0, 0.0

    @property
    def ready(self) -> bool:
        return self._count >= STEPS_BEFORE_USE

    @property
    def line(self) -> Line:
        return Line(self._slope, self._overhead)

    def predict(self, floor: float) -> float:
        return floor * self._slope + self._overhead

    def observe(self, floor: float, measured: float) -> None:
        """One step. Steps without a floor or a time teach nothing."""
        if floor <= 0.0 or measured <= 0.0:
            return
        share, inverse = floor / measured, 1.0 / measured
        self._xx = KEEP * self._xx + share * share
        self._xy = KEEP * self._xy + share * inverse
        self._yy = KEEP * self._yy + inverse * inverse
        self._x = KEEP * self._x + share
        self._y = KEEP * self._y + inverse
        self._count += 1
        self._solve()

    def _solve(self) -> None:
        """slope and overhead that bring Σ (slope · share + overhead · inverse − 1)² to its least; neither is negative."""
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > _SPREAD * self._xx * self._yy:
            slope = (self._x * self._yy - self._y * self._xy) / determinant
            overhead = (self._y * self._xx - self._x * self._xy) / determinant
            if slope > 0.0 and overhead >= 0.0:
                self._slope, self._overhead = slope, overhead
                return
        self._slope, self._overhead = self._x / self._xx, 0.0
