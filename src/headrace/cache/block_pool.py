"""The blocks of one KV group: which are in use, which are cached, which are free.

A block is in exactly one of three states, and their counts always add up to the pool:

    used    references > 0: in a sequence's table (or pinned by whoever called ``acquire``)
    cached  references = 0, but a prefix node still names its content: reusable until evicted, least recently used first
    free    in no table and named by no prefix node

What lives here: ids and counts. What may not: tokens, sequences, tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """``num_blocks`` ids from 0. ``on_evict(block)`` is called just before a cached block is reused."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._named = [False] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        # references beyond the first of each block: reads that a kernel spares who looks at a shared block once
        self.num_repeated = 0

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can return: free ones first, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Those that nothing is lost with."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def allocate(self) -> int:
        """Returns a block with one reference. The caller must have checked ``num_available``."""
        if not self._free:
            self._evict_oldest()
        block = self._free.pop()
        self._references[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Adds a reference. Pins are references too: a block that has any is never allocated again."""
        if self._references[block] == 0:
            del self._cached[block]
        else:
            self.num_repeated += 1
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drops a reference. Without references, a named block becomes cached (most recently used), any other free."""
        left = self._references[block] - 1
        assert left >= 0, f"block {block} released more often than held"
        self._references[block] = left
        if left:
            self.num_repeated -= 1
        else:
            if self._named[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def name(self, block: int) -> None:
        """Marks a block in use as named by a prefix node."""
        self._named[block] = True

    def unname(self, block: int) -> None:
        """No prefix node names the block any more; a cached one becomes free."""
        self._named[block] = False
        if self._references[block] == 0 and block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def _evict_oldest(self) -> None:
        block = next(iter(self._cached))
        self._on_evict(block)  # unnames it, and with it whatever can no longer be reached
        assert not self._named[block], f"evicted block {block} is still named"
