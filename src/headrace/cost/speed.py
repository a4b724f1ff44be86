"""How fast steps have been going on this device, as plain numbers: what the scheduler is told beside the time.

    predicted seconds = floor · slope + overhead, by kind of step

The scheduler reads no clock and learns nothing by itself, so that a journal of its inputs replays exactly; this is one of those inputs.

What lives here: the numbers, and the watch over how far steps exceed their prediction. What may not: floors (cost_model.py), fitting
(online_fit.py), numpy: both are on every step's path.
"""

from __future__ import annotations

from dataclasses import dataclass

EXCEED = 0.01  # the share of steps that may take longer than the tail says
PACE = 0.1  # by which one exceeding step moves the tail, relatively
MOST = 2.0  # half of the time at least is planned, however noisy the machine
SHARE_DOWN, SHARE_UP, SHARE_LEAST = 0.9, 1.003, 0.02
BROKEN, MOSTLY, MISJUDGED = 0.02, 0.4, 1.25  # so many steps may break their promises, and take so many times their prediction
WATCHED = 0.02  # by which one step moves what is known of either
FEW = 16  # tokens of prompts: a step with no more is as quick as one without


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a step from its floor in seconds."""

    slope: float = 1.0
    overhead: float = 0.0

    def seconds(self, floor: float) -> float:
        return floor * self.slope + self.overhead

    def floor(self, seconds: float) -> float:
        """The floor of a step that takes so long; below 0 where not even an empty one does."""
        return (seconds - self.overhead) / self.slope


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """``mixed``: steps that compute parts of prompts beside single tokens. ``tail``: all but EXCEED of them take at most so many times
    their prediction. ``gap``: seconds between two steps while there is work (scheduling, where nothing hides it).
    ``share``: of what seems to fit, what is to be taken: less where promises break although the price says that they hold (wrong limits)."""

    decode: Line = Line()
    mixed: Line = Line()
    prefill: Line = Line()
    tail: float = 1.0
    gap: float = 0.0
    share: float = 1.0

    def promised(self, seconds: float) -> float:
        """The floor of a mixed step that keeps to so many seconds, the gap before it included, all but EXCEED of the times."""
        return self.mixed.floor((seconds - self.gap) / self.tail)


class Steering:
    """``share`` of what seems to fit: it comes down while steps with prompts break their promises and most of them are misjudged, for then the
    price is wrong. What breaks promises of steps that are judged right in the middle, a smaller chunk cannot help: other programs on the machine,
    answers that are too many by themselves. Prompts would only crawl."""

    __slots__ = ("_broken", "_misjudged", "share")

    def __init__(self) -> None:
        self.share = 1.0
        self._broken = self._misjudged = 0.0

    def observe(self, tokens: int, *, kept: bool, misjudged: bool) -> None:
        """One more promise, of a step with so many tokens of prompts. ``misjudged``: it took over MISJUDGED times its prediction."""
        if tokens > FEW:
            self._broken += WATCHED * ((not kept) - self._broken)
            self._misjudged += WATCHED * (misjudged - self._misjudged)
        if tokens > FEW and not kept and self._broken > BROKEN and self._misjudged > MOSTLY:
            self.share = max(SHARE_LEAST, self.share * SHARE_DOWN)
        elif tokens:
            self.share = min(1.0, self.share * SHARE_UP)


class Tail:
    """The ratio measured / predicted that all but a share of them stay below: each that exceeds it raises it, each other lowers it a little."""

    __slots__ = ("_exceed", "_most", "ratio")

    def __init__(self, exceed: float = EXCEED, most: float = MOST) -> None:
        self.ratio = 1.0
        self._exceed, self._most = exceed, most

    def observe(self, ratio: float) -> None:
        moved = self.ratio * (1.0 + PACE * ((ratio > self.ratio) - self._exceed))
        self.ratio = min(max(moved, 1.0), self._most)
