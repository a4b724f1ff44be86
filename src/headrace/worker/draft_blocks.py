"""A draft's cache with fewer blocks than the target's: which of the target's blocks have a place there.

Memory of drafts can be bounded (SpecMemo: Yildirim and Chen 2025, for devices with little of it). A row whose blocks
all have places may draft. Who finds none goes without until its sequence ends, and gives back what it had; places of
blocks that no such row has any more are given away, those that were taken longest ago first.

What lives here: that. What may not: how many places there are (allocation.py), drafting.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.request import StepPlan
from headrace.worker.rows import Ints, ints, ship_all

_NONE = -1
_ELSEWHERE = 2**30  # the first new block of a row that computes nothing: it has none


class DraftBlocks:
    """``table``: the target's, of the KV group ``group``. ``view``: the same rows' places."""

    def __init__(self, group: int, num_blocks: int, places: int, table: Tensor, block_size: int) -> None:
        self.group = group
        self.view = torch.zeros_like(table)
        self.bare = np.zeros(len(table), dtype=bool)  # rows that go without
        self._block_size = block_size
        self._tables: Ints = np.full(tuple(table.shape), _NONE, dtype=np.int32)
        self._place: Ints = np.full(num_blocks, _NONE, dtype=np.int32)
        self._taken: dict[int, None] = {}  # blocks with a place, in the order in which they took it
        self._free = list(range(places - 1, -1, -1))

    def forget(self) -> None:
        """All rows are gone; what lies in blocks does not."""
        self._tables[:], self.bare[:] = _NONE, False

    def apply(self, plan: StepPlan) -> None:
        """Its rows and table edits."""
        dropped = list(plan.rows_dropped)
        self._tables[dropped], self.bare[dropped] = _NONE, False
        edits = zip(plan.table_group, plan.table_row, plan.table_index, plan.table_block, strict=True)
        last = {(row, index): block for group, row, index, block in edits if group == self.group}
        if not last:
            return
        row, index = ints(list(last)).T
        block = ints(list(last.values()))
        self._tables[row, index] = block
        first = np.full(len(self.bare), _ELSEWHERE)
        first[list(plan.rows)] = ints(plan.starts) // self._block_size
        new = index >= first[row]
        self._expect(row[~new], block[~new], set(block[new].tolist()))
        copied = dict(zip(plan.copy_target, plan.copy_source, strict=True))
        for each, taken in zip(row[new].tolist(), block[new].tolist(), strict=True):
            known = taken not in copied or self._place[copied[taken]] != _NONE
            if not known or self.bare[each] or not self._take(taken):
                self.bare[each] = True
        self._expect(row[~new], block[~new])
        self._release(block[new & self.bare[row]].tolist())
        shown = ~self.bare[row]
        at = ship_all(self.view.device, row[shown], index[shown], self._place[block[shown]])
        self.view[at[0].long(), at[1].long()] = at[2]

    def _expect(self, rows: Ints, blocks: Ints, coming: Collection[int] = ()) -> None:
        """These rows found these blocks: what has no place, and is not written in this step, is lost."""
        for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
            self.bare[row] |= self._place[block] == _NONE and block not in coming

    def copies(self, plan: StepPlan) -> tuple[Sequence[int], Sequence[int]]:
        """(from, to): places, of the plan's copies of blocks that both have one."""
        pairs = zip(plan.copy_group, plan.copy_source, plan.copy_target, strict=True)
        places = ((self._place[a], self._place[b]) for own, a, b in pairs if own == self.group)
        found = [(int(a), int(b)) for a, b in places if a != _NONE and b != _NONE]
        return [a for a, _ in found], [b for _, b in found]

    def _take(self, block: int) -> bool:
        if self._place[block] != _NONE:
            return True
        if not self._free:
            self._reclaim()
        if not self._free:
            return False
        self._place[block] = self._free.pop()
        self._taken[block] = None
        return True

    def _reclaim(self) -> None:
        """A quarter of the places whose blocks no row that drafts has; others may be found again."""
        held = set(self._tables[~self.bare].ravel().tolist())
        idle = [block for block in self._taken if block not in held]
        self._release(idle[: -(-len(idle) // 4)])

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._place[block] != _NONE:
                self._free.append(int(self._place[block]))
                self._place[block] = _NONE
                del self._taken[block]
