"""Whether drafting goes on while drafts are verified (PipeInfer: Butler et al. 2024).

A draft model with a device of its own: a run that was right spares the passes of the next drafts; the pass that is under
way when a run turns out wrong is waited for, half of one on average. So runs pay from a share of right ones on that
depends on how many drafts there are.

A pipeline: a run costs nothing where each stage has a device and memory of its own. Where all read one memory, steps in
flight slow each other down, those that turn out wrong too. So time decides: steps are tried with runs and without.

What lives here: these decisions. What may not: running, clocks, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul

RUNS = 2  # steps' drafts that are drawn before it is known whether any of them is right
PACE = 0.02  # of one run in what is known
REST, LONGEST_REST = 8, 512  # steps without a run, after which one tries: twice as many each time
# Steps of a pipeline: by which the way without runs is judged, and the way with them, whose steps differ more; between
# two trials, twice as many each time.
LEARN, TRIAL = 16, 48
FIRST_TRIED, SELDOM_TRIED = 128, 4096
ROUGH = 3.0  # times what is known: no step counts as more, however long it was held up
WORTH = 1.02  # times the speed without: below, there are no runs


@dataclass(slots=True)
class RunsAhead:
    """``right``: the share of runs behind which the target went on as they did. ``resting``: steps until one tries."""

    right: float = 1.0
    seen: int = 0
    resting: int = 0
    rest: int = REST

    def told(self, right: int, wrong: int) -> None:
        """Of so many rows that a run drew for."""
        if count := right + wrong:
            self.seen += count
            self.right += min(0.5, count * max(PACE, 1.0 / self.seen)) * (right / count - self.right)
            self.rest = REST if right else min(2 * self.rest, LONGEST_REST)

    def wanted(self, drafts: int) -> bool:
        """Whether to begin one behind so many drafts of each row."""
        if self.right * drafts >= 0.5 * (1.0 - self.right):
            self.rest = REST
            return True
        self.resting = min(self.resting, self.rest) - 1
        if self.resting > 0:
            return False
        self.resting = self.rest
        return True


@dataclass(slots=True)
class _Pace:
    """Of steps with runs, or of those without. ``seconds``: from one's tokens to the next one's; ``chunks``: by their
    drafts, those of a step that count."""

    seconds: float = 0.0
    chunks: list[float] = field(default_factory=list)
    seen: int = 0

    def speed(self, worth: Sequence[float]) -> float:
        """Tokens/s, where a chunk with so many drafts gives so many tokens; 0 where nothing is known."""
        tokens = sum(map(mul, self.chunks, worth))
        return tokens / self.seconds if self.seconds > 0.0 else 0.0

    def add(self, seconds: float, drafts: Sequence[int]) -> None:
        self.seen += 1
        seconds = min(seconds, ROUGH * self.seconds) if self.seen > 1 else seconds
        self.seconds += max(2 * PACE, 1.0 / self.seen) * (seconds - self.seconds)
        self.chunks.extend([0.0] * (1 + max(drafts, default=0) - len(self.chunks)))
        for at, before in enumerate(self.chunks):
            self.chunks[at] += max(PACE, 1.0 / self.seen) * (drafts.count(at) - before)


class StagedRuns:
    """Of a pipeline whose stages have nothing to do now and then. ``on``: there are runs, but for trials of steps
    without them. ``speeds``: tokens/s with runs and without; 0: not known yet."""

    def __init__(self, stages: int) -> None:
        self.on = self._trying = False
        self.speeds = (0.0, 0.0)
        self._stages = stages
        self._paces = _Pace(), _Pace()  # without, with
        self._idle = self._settling = (
            0  # steps that may be counted; steps that are not, as they were begun before a turn
        )
        self._left, self._rest = LEARN, FIRST_TRIED  # steps before the next turn; of the next rest

    @property
    def using(self) -> bool:
        return self.on != self._trying

    def wanted(self) -> bool:
        """Whether to begin one. Asked where a stage would have nothing to do: others are as fast either way."""
        self._idle = self._stages
        return self.using

    def told(self, seconds: float, drafts: Sequence[int], worth: Sequence[float]) -> bool:
        """Of a step, so long after the one before: the drafts of each of its chunks that count, and the tokens that one
        with so many gives. Whether ``on`` has changed."""
        before = self.on, self.using
        if self._idle and not self._settling:
            self._paces[self.using].add(seconds, drafts)
            without, runs = (each.speed(worth) for each in self._paces)
            self.speeds = runs, without
            self._left -= 1
            if not self._left:
                self._turn()
            if not self._trying and runs and without:
                self._judge(runs > WORTH * without)
        self._idle, self._settling = max(0, self._idle - 1), max(0, self._settling - 1)
        if before[1] != self.using:
            self._settling = self._stages
        return before[0] != self.on

    def _turn(self) -> None:
        self._trying = not self._trying
        if self._trying:
            self._left = TRIAL if self.using else LEARN
        else:
            self._left, self._rest = self._rest, min(2 * self._rest, SELDOM_TRIED)

    def _judge(self, on: bool) -> None:
        if self.on != on:
            self.on, self._left, self._rest = on, FIRST_TRIED, 2 * FIRST_TRIED
