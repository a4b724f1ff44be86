"""Whether a draft model that has a device of its own goes on while its drafts are verified (PipeInfer: Butler et al.
2024).

A run that was right spares the passes of the next drafts; the pass that is under way when a run turns out wrong is
waited for, half of one on average. So runs pay from a share of right ones on that depends on how many drafts there are.

What lives here: that decision. What may not: running, clocks, torch.
"""

from __future__ import annotations

from dataclasses import dataclass

RUNS = 2  # steps' drafts that are drawn before it is known whether any of them is right
PACE = 0.02  # of one run in what is known
REST, LONGEST_REST = 8, 512  # steps without a run, after which one tries: twice as many each time


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
