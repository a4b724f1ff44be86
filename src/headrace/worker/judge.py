"""Whether what was proposed is right: by what was sampled, or by chance, so that shapes with made-up weights can be
measured.

What lives here: these two. What may not: sampling, rows' lengths (speculator.py), guesses (staged_drafts.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.speculative.settings import Acceptance, chance
from headrace.speculative.tree import MOST
from headrace.speculative.verify import accepted
from headrace.worker.rows import Ints


class Judge:
    """Equality with the samples (speculative/verify.py). ``alike``: rows with as many drafts may be judged together."""

    alike = True

    def begins(self, row: int, sequence: int) -> None:
        """From now on it is this sequence's."""

    def accepted(
        self, row: int, length: int, drafts: Sequence[int], samples: Sequence[int | None]
    ) -> tuple[list[int], range]:
        """Of a row that has ``length`` tokens: as ``accepted`` has it."""
        return accepted(drafts, samples)

    def count(self, rows: Ints, lengths: Ints, drafts: Ints, samples: Ints) -> Ints:  # [rows]
        """How many of the first of each row's ``drafts`` [rows, n] are right, by usable ``samples`` [rows, n + 1]."""
        return _leading(drafts == samples[:, :-1])

    def goes_on(self, row: int, place: int, *, equal: bool) -> bool:
        """Whether a guess of the token at ``place`` is right; ``equal``: to the one that was sampled there."""
        return equal


class Coins(Judge):
    """One for each place of each sequence, the same on all ranks: what stands there is right with the chance that
    ``acceptance`` gives it, by the drafts before it."""

    def __init__(self, acceptance: Acceptance, rows: int, places: int) -> None:
        self._chances = np.array([chance(acceptance, at) for at in range(MOST)], dtype=np.float32)
        self._tossed = np.ones((rows, places), dtype=np.float32)

    def begins(self, row: int, sequence: int) -> None:
        tossed = np.random.Generator(np.random.SFC64([sequence, 1]))
        self._tossed[row] = tossed.random(self._tossed.shape[1], dtype=np.float32)

    def accepted(
        self, row: int, length: int, drafts: Sequence[int], samples: Sequence[int | None]
    ) -> tuple[list[int], range]:
        tossed = self._tossed[row, length : length + len(drafts)]
        right = tossed < self._chances[: len(tossed)]
        wrong = int(right.argmin()) if not right.all() else len(right)
        usable = samples.index(None) if None in samples else len(samples)
        tokens = [token for token in samples[: min(wrong + 1, usable)] if token is not None]
        return tokens, range(1, len(tokens))

    def count(self, rows: Ints, lengths: Ints, drafts: Ints, samples: Ints) -> Ints:
        places = lengths[:, None] + np.arange(drafts.shape[1], dtype=np.int32)
        tossed = self._tossed[rows[:, None], np.minimum(places, self._tossed.shape[1] - 1)]
        return _leading(tossed < self._chances[: drafts.shape[1]])

    def goes_on(self, row: int, place: int, *, equal: bool) -> bool:
        return bool(self._tossed[row, place] < self._chances[0])


def _leading(right: NDArray[np.bool_]) -> Ints:  # [rows, n] → [rows]
    return np.asarray(np.minimum.accumulate(right, axis=1).sum(axis=1, dtype=np.int32))
