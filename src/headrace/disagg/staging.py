"""The memory through which replicas of one host hand over keys and values: a file without a name that all of them map.

Each replica that computes prompts has a region of slots, and alone writes there; others read. A slot holds one node of
the prefix tree: the blocks of all KV groups that hold its tokens, as they lie in the cache, one behind the other. Its
header says what is there: the node's name (a hash of all tokens up to its end, the model and the KV format), and which
groups. The writer clears the header, writes the data, then the header. A reader looks at the header before and after it
has copied: a slot that was written anew meanwhile has another name, or none. So no message that comes late, twice or
never, from whoever has died, can bring one prompt's keys into another's.

Regions are sparse: pages are taken at first touch, and the lowest slots are taken first.

What lives here: that memory. What may not: torch, who hands over what (hand_over.py), copies (worker/executor.py).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

from headrace.engine.executor import ExportBlocks
from headrace.errors import ConfigError, HeadraceError
from headrace.spec import KVSpec

# Bytes of one replica: a step of 8,192 tokens whose keys and values take 128 KiB each. Where files are not sparse, less.
REGION = 1 << (30 if hasattr(os, "memfd_create") else 28)
MOST_SLOTS = 4096
ALIGNED = 64
_HEADER = struct.Struct("=16sQ32x")  # name, bits of the groups
NOTHING = bytes(_HEADER.size)


def staging_size(replicas: int) -> int:
    """Bytes of the file, for so many that compute prompts."""
    return replicas * REGION


def slot_widths(specs: Sequence[KVSpec], node_tokens: int) -> tuple[int, ...]:
    """Bytes of one node's blocks in each group."""
    return tuple(node_tokens // spec.block_size * spec.bytes_per_block for spec in specs)


def slot_bytes(widths: Sequence[int]) -> int:
    return -(-sum(widths) // ALIGNED) * ALIGNED


def num_slots(widths: Sequence[int], step_nodes: int) -> int:
    """In a region: two steps' worth of nodes, if there is room for so many: while others take what a step has completed,
    the next one's come. Raises ConfigError where not even one fits."""
    size = slot_bytes(widths)
    if not (count := min(MOST_SLOTS, 2 * step_nodes, REGION // (size + _HEADER.size))):
        raise ConfigError(
            f"The blocks of one hand-over take {size} bytes, and {REGION} are set aside; lower --block-size, or leave --prefill-replicas out."
        )
    return count


class Staging:
    """All regions, of so many ``slots``. ``fd``: as ``portability.shared_file`` makes it, of ``staging_size`` bytes."""

    def __init__(self, fd: int, replicas: int, widths: Sequence[int], slots: int) -> None:
        self.map = mmap.mmap(fd, staging_size(replicas))
        self.widths, self.replicas, self.region_bytes = widths, replicas, slots * slot_bytes(widths)
        self._view, self._size = memoryview(self.map), slot_bytes(widths)

    def offset(self, source: int, slot: int) -> int:
        """Where its data begins in the map."""
        return source * REGION + slot * self._size

    def data(self, source: int, slot: int, group: int) -> memoryview:
        begin = self.offset(source, slot) + sum(self.widths[:group])
        return self._view[begin : begin + self.widths[group]]

    def clear(self, order: ExportBlocks) -> None:
        """Something else is going to be there."""
        for slot in order.slots:
            self._header(order.source, slot)[:] = NOTHING

    def seal(self, order: ExportBlocks) -> None:
        """All its data is there."""
        for slot, name, blocks in zip(order.slots, order.names, order.blocks, strict=True):
            self._header(order.source, slot)[:] = _HEADER.pack(name, groups_of(blocks))

    def check(self, order: ExportBlocks) -> None:
        """Raises HeadraceError where a slot holds something else, or lacks a group's blocks."""
        for slot, name, blocks in zip(order.slots, order.names, order.blocks, strict=True):
            found, there = _HEADER.unpack(self._header(order.source, slot))
            if found != name or groups_of(blocks) & ~there:
                raise HeadraceError("The keys and values that were handed over are another prompt's by now.")

    def _header(self, source: int, slot: int) -> memoryview:
        begin = (source + 1) * REGION - (slot + 1) * _HEADER.size  # from the end: data is aligned
        return self._view[begin : begin + _HEADER.size]


def groups_of(blocks: Sequence[Sequence[int]]) -> int:
    """Bits of the groups that have some."""
    return sum(1 << group for group, held in enumerate(blocks) if held)
