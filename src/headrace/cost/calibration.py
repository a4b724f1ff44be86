"""How far real steps are from their floor, in two numbers: the efficiency and the overhead that make predictions fit.

What lives here: the fit. What may not: records' origin, clocks, keeping results (DeviceProfile has fields for them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Calibration:
    """measured ≈ floor / efficiency + overhead. ``error`` is the median of |predicted / measured - 1| with these two."""

    efficiency: float
    overhead: float  # s
    error: float


def fit(floors: Sequence[float], measured: Sequence[float]) -> Calibration | None:
    """Least squares on relative errors over pairs in seconds; neither number may be negative.

    None when the floors do not differ enough to tell an efficiency from an overhead (less than a factor of two).
    """
    if len(floors) < 2 or min(floors) <= 0 or min(measured) <= 0 or max(floors) < 2 * min(floors):
        return None
    x, y = np.asarray(floors, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    design = np.stack([x / y, 1.0 / y], axis=1)
    (slope, overhead), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
    if overhead < 0:  # then the best fit without any
        share = x / y
        slope, overhead = float(share.sum() / (share @ share)), 0.0
    if slope <= 0:
        return None
    predicted = x * slope + overhead
    return Calibration(1.0 / float(slope), float(overhead), float(np.median(np.abs(predicted / y - 1.0))))
