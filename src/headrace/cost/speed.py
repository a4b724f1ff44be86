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
MOST = 4.0
SHARE_DOWN, SHARE_UP, SHARE_LEAST = 0.9, 1.003, 0.02
BROKEN, CLEARLY = 0.02, 1.5  # mixed steps may break so many promises, and so many times those that other steps break
WATCHED = 0.01  # by which one step moves what is known of either
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
    """``share`` of what seems to fit: it comes down while steps with prompts break their promises more often than steps with next to none. Those
    are broken by what a smaller chunk cannot help: other programs on the machine, answers that are too many by themselves."""

    __slots__ = ("_broken", "_unavoidable", "share")

    def __init__(self) -> None:
        self.share = 1.0
        self._broken = self._unavoidable = 0.0

    def observe(self, tokens: int, *, kept: bool) -> None:
        """One more promise, of a step with so many tokens of prompts."""
        if tokens <= FEW:
            self._unavoidable += WATCHED * ((not kept) - self._unavoidable)
        else:
            self._broken += WATCHED * ((not kept) - self._broken)
        if tokens > FEW and not kept and self._broken > BROKEN + CLEARLY * self._unavoidable:
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
