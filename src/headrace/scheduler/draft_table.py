"""Running sequences that draft, as columns: those of which nothing is asked but their next tokens.

A step with drafts moves each of them by another number of tokens, so they are no cohort (plan_builder.py); but what is
done with each is the same, and is done with all at once. What a record would say lies in columns meanwhile, and the
record is right when its sequence needs a block, fills one that others may find, or is looked at. One that nears its end,
or may have come to it, is released: it goes by its record again.

What lives here: the columns. What may not: deciding what released ones need (step_planner.py, scheduler.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.request import Runs, StepPlan, column_of, counts_of

if TYPE_CHECKING:
    from headrace.scheduler.roster import Sequence

_KEPT = 256  # tokens of a row that its record may lack


class Members(NamedTuple):
    """Those inside at a time, in one order."""

    sequences: list[Sequence]
    rows: NDArray[np.int64]
    plan_rows: array[int]  # the same for plans
    request_ids: list[int]
    indices: list[int]
    stop_ids: frozenset[int]


class Alike(NamedTuple):
    """One token of each of these, and ``drafts`` after it."""

    sequences: list[Sequence]
    rows: array[int]
    starts: array[int]
    drafts: int


class DraftTable:
    """Columns by row. ``block_tokens``: so many more than it needs, and a sequence gives blocks back; None: none does."""

    def __init__(self, rows: int, block_tokens: int | None) -> None:
        self._block_tokens = block_tokens
        self._inside = np.zeros(rows, dtype=bool)
        # as of Sequence: tokens planned, those known, slack; fast_until, check_at, and the capacity of its blocks
        self._total, self._known, self._slack, self._fast, self._check, self._capacity = np.zeros((6, rows), np.int64)
        self._end = np.zeros(rows, dtype=np.int64)  # known tokens from which on it may have come to its end
        self._kept = np.zeros(rows, dtype=np.int64)
        self._ids = np.zeros((rows, _KEPT), dtype=np.int32)
        self._flat = self._ids.reshape(-1)
        self._sequences: dict[int, Sequence] = {}  # by row
        self._members: Members | None = None
        self._late = np.zeros(0, dtype=bool)  # of them
        self._last_step = -1

    def __len__(self) -> int:
        return len(self._sequences)

    # --- coming and going

    def take_in(self, sequences: Iterable[Sequence], retired: int) -> None:
        """Who is planned like any other, and gets nothing but tokens from steps after ``retired``."""
        for each in sequences:
            if each.extra_outputs or each.ignore_through > retired or each.row is None:
                continue
            self.read(each, each.row)
            if not each.tabled:
                self._inside[each.row], self._sequences[each.row], each.tabled = True, each, True
                self._members = None

    def read(self, sequence: Sequence, row: int) -> None:
        """Its record is right, and now its columns are."""
        known = len(sequence.token_ids)
        self._total[row], self._known[row], self._slack[row] = sequence.num_tokens, known, sequence.slack
        self._fast[row], self._check[row] = sequence.fast_until, sequence.check_at
        self._capacity[row] = sequence.kv.capacity
        self._end[row] = sequence.max_num_tokens if sequence.repetition is None else sequence.check_at

    def release(self, sequence: Sequence) -> None:
        """Its record is right, and counts from now on."""
        if sequence.tabled and sequence.row is not None:
            self._settle(sequence, sequence.row)
            sequence.tabled, self._inside[sequence.row], self._members = False, False, None
            del self._sequences[sequence.row]

    def release_all(self) -> None:
        for each in list(self._sequences.values()):
            self.release(each)

    def settle(self) -> None:
        """All records are right, for whoever looks at them."""
        for row, each in self._sequences.items():
            self._settle(each, row)

    def _settle(self, sequence: Sequence, row: int) -> None:
        if kept := int(self._kept[row]):
            sequence.token_ids.frombytes(self._ids[row, :kept].tobytes())
            self._kept[row] = 0
        sequence.num_tokens, sequence.slack = int(self._total[row]), int(self._slack[row])
        sequence.num_computed_tokens = sequence.num_tokens - 1
        sequence.last_step = max(sequence.last_step, self._last_step)

    def members(self) -> Members:
        if self._members is None:
            sequences = list(self._sequences.values())
            rows = array("i", self._sequences)
            stops = frozenset[int]().union(*{each.stop_ids for each in sequences})
            ids, indices = [each.request_id for each in sequences], [each.index for each in sequences]
            self._members = Members(sequences, np.array(rows, dtype=np.int64), rows, ids, indices, stops)
        return self._members

    # --- steps

    def late(self, most: int) -> list[Sequence]:
        """Those whose next token and ``most`` drafts after it need more than a place, their records right."""
        found = self.members()
        self._late = self._total[found.rows] + most > self._fast[found.rows]
        late = list(compress(found.sequences, self._late)) if self._late.any() else []
        for each in late:
            assert each.row is not None
            self._settle(each, each.row)
        return late

    def plan(self, most: int, step_id: int) -> Alike:
        """The next step of the members that are not late: one token, and ``most`` drafts."""
        sequences, rows, plan_rows = self.members()[:3]
        if self._late.any():
            chosen = ~self._late
            sequences, rows = list(compress(sequences, chosen)), rows[chosen]
            plan_rows = _as_array(rows)
        starts = self._total[rows] - 1
        self._total[rows] += 1 + most
        self._slack[rows] += most
        self._last_step = step_id
        return Alike(sequences, plan_rows, _as_array(starts), most)

    def take(
        self, plan: StepPlan, tokens: Seq[tuple[int, ...]], errors: Mapping[int, str], fill: Callable[[Sequence], None]
    ) -> Seq[bool]:
        """Of each sample of a step, whether its tokens have been taken here; the others' sequences are released. ``fill``:
        lets others find the blocks of one that has filled some."""
        found, column = self.members(), column_of(tokens)
        if isinstance(tokens, Runs):
            got, ids = np.asarray(tokens.sizes), np.asarray(tokens.values)
        else:
            got, ids = np.array(counts_of(tokens), dtype=np.int64), np.array(column, dtype=np.int32)
        alike = plan.sample_rows == found.plan_rows
        rows = found.rows if alike else np.array(plan.sample_rows, dtype=np.int64)
        drafted = np.array(plan.drafts)[np.array(plan.sample_work)] if plan.drafts else np.zeros_like(rows)
        total, known = self._total[rows] + got - drafted - 1, self._known[rows] + got
        mine = (got > 0) & (known < self._end[rows])
        if self._block_tokens is not None:
            mine &= self._capacity[rows] <= total + drafted + self._block_tokens
        if not alike:
            mine &= self._inside[rows]
        if errors:
            mine[list(errors)] = False
        if not found.stop_ids.isdisjoint(column):
            mine &= [found.stop_ids.isdisjoint(each) for each in tokens]
        if not mine.all():
            for row in rows[self._inside[rows] & ~mine].tolist():
                self.release(self._sequences[row])
            ids = ids[np.repeat(mine, got)]
            rows, got, drafted, total, known = (each[mine] for each in (rows, got, drafted, total, known))
        self._total[rows], self._known[rows] = total, known
        self._slack[rows] -= drafted
        self._keep(rows, got, ids)
        for row in rows[known >= self._check[rows]].tolist():
            self._settle(self._sequences[row], row)
            fill(self._sequences[row])
            self.read(self._sequences[row], row)
        return mine.tolist()  # type: ignore[no-any-return]

    def _keep(self, rows: NDArray[np.int64], counts: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        kept = self._kept[rows] + counts
        if len(rows) and kept.max() > _KEPT:
            self.settle()
            kept = counts
        before = rows * _KEPT + kept - np.cumsum(counts)  # less what others have before it
        self._flat[np.repeat(before, counts) + np.arange(len(ids))] = ids
        self._kept[rows] = kept


def _as_array(values: NDArray[np.int64]) -> array[int]:
    return array("i", values.astype(np.int32).tobytes())
