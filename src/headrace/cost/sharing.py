"""Counts the keys that decoding sequences share and a step reads once, as cascade attention does on a GPU, from plans
alone.

Block tables are followed through the plans' edits. A block that two sequences have at the same place of their tables
holds the same keys, and so does everything before it. Each sequence chooses the depth that saves most reading, depth ×
(sequences that share it − 1). Sequences that chose the same block form a group, cut into chunks that read it together.

What lives here: that count. What may not: attention itself (kernels/attention/triton_sharing.py finds the same on the
device, by the same rules).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from headrace.config import DeviceConfig
from headrace.request import StepPlan
from headrace.spec import DecoderSpec, KVSpec

QUERIES = 64  # × heads of a KV head, in one tile over shared keys
UNIT = 128  # shared tokens are a multiple of it
FEWEST = 16  # sequences: below, nothing is looked for
LEAST_SAVED = 1024  # tokens that need not be read again, or a group is not worth it

_Place = tuple[int, int]  # index in the table, block


class SharedBlocks:
    """Follows every plan of one engine. ``heads``: query heads per KV head; groups with a window share nothing."""

    def __init__(self, groups: Sequence[KVSpec], heads: int) -> None:
        self._sharing = [index for index, group in enumerate(groups) if group.window is None]
        self._sizes = [group.block_size for group in groups]
        self._members = max(1, QUERIES // (1 << (heads - 1).bit_length()))
        self._tables: dict[int, dict[tuple[int, int], int]] = {}  # row → (group, index) → block
        self._uses: list[Counter[_Place]] = [Counter() for _ in groups]
        self._shared = [0] * len(groups)  # places that several rows have
        self._known: dict[bytes, tuple[float, ...]] = {}  # since the tables last changed in what is shared
        self._none = (0.0,) * len(groups)

    @property
    def followed(self) -> int:
        """Rows whose tables are known."""
        return len(self._tables)

    def observe(self, plan: StepPlan) -> tuple[float, ...]:
        """By KV group: keys that this step's decode tokens need not read, because they are read together with another
        sequence's."""
        for row in plan.rows_dropped:
            self._drop(row)
        for new in plan.rows_added:
            self._tables.setdefault(new.row, {})
        for row, group, index, block in zip(
            plan.table_row, plan.table_group, plan.table_index, plan.table_block, strict=True
        ):
            self._set(row, group, index, block)
        return self._none if not any(self._shared) else self._look(plan)

    def _drop(self, row: int) -> None:
        for (group, index), block in self._tables.pop(row, {}).items():
            self._use(group, (index, block), -1)

    def _set(self, row: int, group: int, index: int, block: int) -> None:
        if group not in self._sharing:
            return
        table = self._tables.setdefault(row, {})
        before = table.get((group, index))
        if before is not None:
            self._use(group, (index, before), -1)
        table[group, index] = block
        self._use(group, (index, block), 1)

    def _use(self, group: int, place: _Place, change: int) -> None:
        uses = self._uses[group]
        was = uses[place]
        uses[place] = was + change
        if was + change <= 0:
            del uses[place]
        if max(was, was + change) > 1:
            self._shared[group] += (was + change > 1) - (was > 1)
            self._known.clear()

    def _look(self, plan: StepPlan) -> tuple[float, ...]:
        lone = array("i", (row for row, count in zip(plan.rows, plan.counts, strict=True) if count == 1))
        if len(lone) < FEWEST:
            return self._none
        key = lone.tobytes()
        if key not in self._known:
            starts = dict(zip(plan.rows, plan.starts, strict=True))
            self._known[key] = tuple(
                self._saved(group, lone, starts) if self._shared[group] else 0.0 for group in range(len(self._sizes))
            )
        return self._known[key]

    def _saved(self, group: int, rows: Iterable[int], starts: dict[int, int]) -> float:
        size = self._sizes[group]
        paths = {row: self._path(group, row, starts[row] // size) for row in rows}
        counts = Counter(place for path in paths.values() for place in path)
        groups = Counter(best for path in paths.values() if (best := _best(path, counts, size)) is not None)
        saved = 0.0
        for (index, _), members in groups.items():
            tokens = _whole(index, size)
            if members > 1 and tokens * (members - 1) >= LEAST_SAVED:
                saved += tokens * (members - -(-members // self._members))
        return saved

    def _path(self, group: int, row: int, whole: int) -> list[_Place]:
        """The leading blocks of a row that other rows have too, as far as its token sees whole blocks."""
        table, uses, path = self._tables[row], self._uses[group], list[_Place]()
        for index in range(whole):
            place = (index, table.get((group, index), -1))
            if uses[place] < 2:
                break
            path.append(place)
        return path


def shared_blocks(
    config: DeviceConfig, kind: str, spec: DecoderSpec, dtype: str, groups: Sequence[KVSpec]
) -> SharedBlocks | None:
    """None where keys that sequences share are read by each (kernels/attention/candidates.py declines the site)."""
    cascades = kind == "cuda" and config.cascade_attention and not config.batch_invariant and dtype != "float32"
    return SharedBlocks(groups, spec.num_heads // spec.num_kv_heads) if cascades else None


def _whole(index: int, size: int) -> int:
    """Tokens up to and including a block, rounded down to a multiple of UNIT."""
    return (index + 1) * size // UNIT * UNIT


def _best(path: Sequence[_Place], counts: Counter[_Place], size: int) -> _Place | None:
    """The deepest of the places that save most."""
    best, most = None, 0
    for place in path:
        saved = _whole(place[0], size) * (counts[place] - 1)
        if saved and saved >= most:
            best, most = place, saved
    return best
