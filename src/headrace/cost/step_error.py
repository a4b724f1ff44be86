"""How wrong predictions of steps are, as a metric of the running engine: predicted / measured − 1, fading.

Two predictions are held against each step: the one that this engine learns as it goes (online_fit.py), and, where somebody calibrated this
device and model, that of the calibration, which is what ``headrace simulate`` would say.

What lives here: the fading mean. What may not: predictions, numpy (it is on every step's path).
"""

from __future__ import annotations

PACE = 0.02  # of one step in the mean: some fifty steps count
CALIBRATED_EVERY = 8  # steps: pricing one by a calibration takes some ten microseconds


class FadingError:
    """Of the steps so far, the last ones weighing most. ``signed``: above 0, steps are quicker than predicted."""

    __slots__ = ("absolute", "count", "signed")

    def __init__(self) -> None:
        self.count = 0
        self.signed = self.absolute = 0.0

    def observe(self, predicted: float, measured: float) -> None:
        """Steps without a prediction or a time say nothing."""
        if predicted <= 0.0 or measured <= 0.0:
            return
        error = predicted / measured - 1.0
        self.count += 1
        pace = max(PACE, 1.0 / self.count)  # a plain mean at first
        self.signed += pace * (error - self.signed)
        self.absolute += pace * (abs(error) - self.absolute)

    def as_dict(self) -> dict[str, float]:
        return {"count": self.count, "signed": self.signed, "absolute": self.absolute}
