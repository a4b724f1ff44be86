"""How much of a prompt fits beside the tokens of a step that is to take no longer than so many seconds.

Tokens of a step are cheap where it waits for memory anyway, and dear where it computes; a long context makes them
dearer. So a bound in tokens is a poor bound on time (Sarathi-Serve, Agrawal et al. 2024, §4.3, profiles one for each
model and device). Here the cost model prices the step that would be, and the largest chunk that keeps it within its
seconds is searched: a few sums, tens of microseconds.

    what a step computes                     its prompts get
    no single tokens (no answer waits) all that the token budget allows
    single tokens, below the budget          what fits beside them
    single tokens, over the budget alone     what LEAST_SHARE of the budget allows, one token at least: prompts never
    stand still

What lives here: the meter of one step in the making. What may not: whose prompt it is (step_planner.py), how fast steps
go (an input), numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cost.cost_model import Forecast, StepSpeed, keys_of, keys_of_singles, pairs_of

LEAST_SHARE = 0.25  # of the budget: what a prompt gets beside tokens that fill it by themselves
NEAR = 0.03  # of the room may stay empty: the search ends
SLICE = 16  # tokens: of a second prompt, no less is worth a row of its own
ROUNDS = 12


class StepMeter:
    """One step. ``starts``: positions of the single tokens that it computes already. ``overfull``: they alone exceed
    ``seconds``."""

    __slots__ = (
        "_answer", "_asked", "_chunks", "_floor", "_forecast", "_keys", "_least",
        "_pairs", "_share", "_target", "_tokens", "bound", "overfull",
    )  # fmt: skip

    def __init__(self, forecast: Forecast, speed: StepSpeed, seconds: float, starts: Sequence[int]) -> None:
        self.bound = bool(starts)
        self._forecast = forecast
        self._tokens = len(starts)
        self._chunks = 0
        self._keys = [keys_of_singles(starts, window) for window in forecast.windows]
        self._pairs = self._keys[:]
        self._asked, self._answer = (0, 0), 0
        self._target = speed.promised(seconds)
        self._share = speed.share
        self._least = LEAST_SHARE * seconds / speed.mixed.slope
        self._floor = self.floor_with(0, 0) if self.bound else 0.0
        self.overfull = self.bound and self._floor > self._target

    def fits(self, start: int, most: int) -> int:
        """Tokens of a prompt from ``start``, at most ``most``, that the step has time for; of its first prompt one at
        least."""
        if not self.bound or most <= 0:
            return most
        if self._asked != (start, most):
            self._asked, self._answer = (start, most), self._count(start, most)
        return self._answer

    def add(self, start: int, count: int) -> None:
        """Planned. Its last token may be sampled."""
        self._chunks += 1
        self._tokens += count
        for group, window in enumerate(self._forecast.windows):
            self._pairs[group] += pairs_of(start, count, window)
            self._keys[group] += keys_of(start, count, window)
        self._asked = (0, 0)
        if self.bound:
            self._floor = self.floor_with(0, 0)

    def _count(self, start: int, most: int) -> int:
        if self._chunks:
            count = int(self._share * self._largest(start, most, self._target))
            return count if count >= min(most, SLICE) else 0
        return max(1, int(self._share * self._largest(start, most, max(self._target, self._floor + self._least))))

    def _largest(self, start: int, most: int, target: float) -> int:
        """The most tokens whose step has a floor of at most ``target``, or a few less: chord and middle in turn, from
        below."""
        low, high, at_low, at_high = 0, most, self._floor, self.floor_with(start, most)
        if at_high <= target or at_low > target:
            return most if at_high <= target else 0
        near = target - NEAR * (target - at_low)
        for turn in range(ROUNDS):
            if high - low <= 1 or at_low >= near:
                break
            share = 0.5 if turn % 2 else (target - at_low) / (at_high - at_low)
            middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
            floor = self.floor_with(start, middle)
            if floor <= target:
                low, at_low = middle, floor
            else:
                high, at_high = middle, floor
        return low

    def floor_with(self, start: int, count: int) -> float:
        """The step's floor with one more chunk."""
        if not count:
            return self._forecast.floor_seconds(self._tokens, self._tokens, self._pairs, self._keys)
        windows = self._forecast.windows
        pairs = [known + pairs_of(start, count, window) for known, window in zip(self._pairs, windows, strict=True)]
        keys = [known + keys_of(start, count, window) for known, window in zip(self._keys, windows, strict=True)]
        return self._forecast.floor_seconds(self._tokens + count, self._tokens + 1, pairs, keys)
