"""How fast recent steps were on this device, and what the scheduler is told of that, along with the time.

    predicted seconds = floor · slope + overhead, by kind of step

The scheduler reads no clock and learns nothing by itself, so that a journal of its inputs replays exactly; StepSpeed is
one of those inputs. The fit is least squares on relative errors, so that a disturbed (and therefore long) step has
little weight; the five sums decay by ``KEEP`` per step. The prediction error is a metric of the running engine:
predicted / measured − 1, decaying, of the fit and, if this device and model were calibrated, of the calibration, which
is what ``headrace simulate`` would predict.

What lives here: the numbers, the fit, tracking how far steps exceed their prediction. What may not: floors
(cost_model.py), records (observe/metrics.py), numpy: all of it is on every step's path.
"""

from __future__ import annotations

from dataclasses import dataclass

EXCEED = 0.01  # the share of steps that may take longer than the tail says
PACE = 0.1  # by which one exceeding step moves the tail, relatively
MOST = 2.0  # half of the time at least is planned, however noisy the machine
SHARE_DOWN, SHARE_UP, SHARE_LEAST = 0.9, 1.003, 0.02
BROKEN = 0.02  # so many steps may break their promises,
MOSTLY = 0.4
MISJUDGED = 1.25  # and take so many times their prediction
WATCHED = 0.02  # by which one step moves what is known of either
KEEP = 0.98  # of what was known: some fifty steps count
STEPS_BEFORE_USE = 8
_SPREAD = 1e-3  # how different floors must be, relatively, to tell a slope from an overhead
ERROR_PACE = 0.02  # of one step in the mean: some fifty steps count
CALIBRATED_EVERY = 8  # steps: pricing one by a calibration takes some ten microseconds
FEW = 16  # tokens of prompts: a step with no more is as quick as one without


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step as a linear function of its floor in seconds."""

    slope: float = 1.0
    overhead: float = 0.0

    def seconds(self, floor: float) -> float:
        return floor * self.slope + self.overhead

    def floor(self, seconds: float) -> float:
        """The floor of a step of this duration; negative where even an empty step takes longer."""
        return (seconds - self.overhead) / self.slope


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """``mixed``: steps that compute parts of prompts together with decode tokens. ``tail``: all but EXCEED of them take
    at most this many times their prediction. ``gap``: seconds between two steps while there is work (scheduling, where
    nothing hides it). ``share``: the share of the estimated room to use; below 1 where promises are broken although the
    estimate says they hold (wrong limits)."""

    decode: Line = Line()
    mixed: Line = Line()
    prefill: Line = Line()
    tail: float = 1.0
    gap: float = 0.0
    share: float = 1.0

    def promised(self, seconds: float) -> float:
        """The floor of a mixed step that stays within this many seconds, including the gap before it, in all but EXCEED
        of cases."""
        return self.mixed.floor((seconds - self.gap) / self.tail)


class Steering:
    """Adapts ``share``. It falls while steps with prompts break their promises and most of them are misjudged, since
    the estimate is then wrong. If steps are judged correctly in the median, smaller chunks do not help: the cause is
    other programs on the machine, or too many decode tokens, and prompts would only progress very slowly."""

    __slots__ = ("_broken", "_misjudged", "share")

    def __init__(self) -> None:
        self.share = 1.0
        self._broken = self._misjudged = 0.0

    def observe(self, tokens: int, *, kept: bool, misjudged: bool) -> None:
        """One more promise, for a step with this many prompt tokens. ``misjudged``: it took over MISJUDGED times its
        prediction."""
        if tokens > FEW:
            self._broken += WATCHED * ((not kept) - self._broken)
            self._misjudged += WATCHED * (misjudged - self._misjudged)
        if tokens > FEW and not kept and self._broken > BROKEN and self._misjudged > MOSTLY:
            self.share = max(SHARE_LEAST, self.share * SHARE_DOWN)
        elif tokens:
            self.share = min(1.0, self.share * SHARE_UP)


class Tail:
    """Tracks a quantile of measured / predicted: each ratio that exceeds it raises it, each other one lowers it a
    little."""

    __slots__ = ("_exceed", "_most", "ratio")

    def __init__(self, exceed: float = EXCEED, most: float = MOST) -> None:
        self.ratio = 1.0
        self._exceed, self._most = exceed, most

    def observe(self, ratio: float) -> None:
        moved = self.ratio * (1.0 + PACE * ((ratio > self.ratio) - self._exceed))
        self.ratio = min(max(moved, 1.0), self._most)


class OnlineFit:
    """The fit of one kind of step on one device. Seconds in, seconds out."""

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
        """Adds one step. Steps without a floor or a time are ignored."""
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
        """slope and overhead that minimize Σ (slope · share + overhead · inverse − 1)²; neither is negative."""
        determinant = self._xx * self._yy - self._xy * self._xy
        if determinant > _SPREAD * self._xx * self._yy:
            slope = (self._x * self._yy - self._y * self._xy) / determinant
            overhead = (self._y * self._xx - self._x * self._xy) / determinant
            if slope > 0.0 and overhead >= 0.0:
                self._slope, self._overhead = slope, overhead
                return
        self._slope, self._overhead = self._x / self._xx, 0.0


class FadingError:
    """Decaying mean error; recent steps weigh most. ``signed`` above 0: steps are faster than predicted."""

    __slots__ = ("absolute", "count", "signed")

    def __init__(self) -> None:
        self.count = 0
        self.signed = self.absolute = 0.0

    def observe(self, predicted: float, measured: float) -> None:
        """Steps without a prediction or a time are ignored."""
        if predicted <= 0.0 or measured <= 0.0:
            return
        error = predicted / measured - 1.0
        self.count += 1
        pace = max(ERROR_PACE, 1.0 / self.count)  # a plain mean at first
        self.signed += pace * (error - self.signed)
        self.absolute += pace * (abs(error) - self.absolute)

    def as_dict(self) -> dict[str, float]:
        return {"count": self.count, "signed": self.signed, "absolute": self.absolute}
