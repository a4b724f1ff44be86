"""The blocks of one KV group: which are in use, which are cached, which are free.

A block is in exactly one of three states, and their counts always add up to the pool:

    used    references > 0: in a sequence's table (or pinned by whoever called ``acquire``)
    cached  references = 0, but a prefix node still names its content: reusable until evicted, least recently used first
    free    in no table and named by no prefix node

And the prefix tree: a trie of full blocks, compared by token ids, that records which blocks hold which prefix.

A node stands for the ``block_tokens`` tokens after its parent's. For each KV group, it names the blocks that hold their
keys and values, or None when that group's were evicted (a sliding group loses its oldest first). Equality is decided by
the ids themselves; a 128-bit chained hash is the node's *name* in tiers, routers and traces, computed only on demand.

Source: RadixAttention (SGLang, Zheng et al. 2024, §3), with blocks in place of variable-length edges.

What lives here: ids and counts, nodes and their links. What may not: sequences, tensors, who is evicted for whom.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


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


Blocks = tuple[int, ...]  # of one group, covering one node's tokens


@dataclass(slots=True, eq=False)
class PrefixNode:
    """``key``: the node's token ids as bytes. ``blocks[g]``: the blocks of group g, or None. A detached node is no
    longer in the tree."""

    parent: PrefixNode | None
    key: bytes
    blocks: list[Blocks | None]
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    detached: bool = False
    digest: bytes | None = None

    @property
    def hash(self) -> bytes:
        """128-bit chained hash over (parent, ids); the root's covers salt, adapter, model and KV format."""
        pending: list[PrefixNode] = []
        node = self
        while node.digest is None:
            pending.append(node)
            assert node.parent is not None
            node = node.parent
        digest = node.digest
        for node in reversed(pending):
            digest = node.digest = chained(digest, node.key)
        return digest


def chained(digest: bytes, key: bytes) -> bytes:
    """The hash of a node below one with this hash."""
    return hashlib.blake2b(digest + key, digest_size=16).digest()


class PrefixTree:
    """One trie per (salt, adapter): prefixes of different tenants or adapters never match.

    ``namespace`` names the model and the KV format, so that hashes of engines with different blocks differ.
    """

    def __init__(self, num_groups: int, namespace: bytes) -> None:
        self.num_groups = num_groups
        self._namespace = namespace
        self._roots: dict[tuple[str, str | None], PrefixNode] = {}
        self._name_of: dict[PrefixNode, tuple[str, str | None]] = {}  # of each root

    def find_root(self, salt: str, adapter: str | None) -> PrefixNode | None:
        return self._roots.get((salt, adapter))

    def ensure_root(self, salt: str, adapter: str | None) -> PrefixNode:
        root = self._roots.get((salt, adapter))
        if root is None:
            root = PrefixNode(None, b"", [None] * self.num_groups, digest=self.root_hash(salt, adapter))
            self._roots[(salt, adapter)], self._name_of[root] = root, (salt, adapter)
        return root

    def root_hash(self, salt: str, adapter: str | None) -> bytes:
        """That its root has, or would have."""
        seed = b"\0".join((self._namespace, salt.encode("utf-8", "surrogatepass"), (adapter or "").encode()))
        return hashlib.blake2b(seed, digest_size=16).digest()

    def walk(self, root: PrefixNode, tokens: bytes, key_bytes: int, max_nodes: int) -> list[PrefixNode]:
        """The nodes of the longest known prefix of ``tokens`` (ids as bytes), at most ``max_nodes``."""
        path: list[PrefixNode] = []
        node: PrefixNode | None = root
        for start in range(0, max_nodes * key_bytes, key_bytes):
            node = node.children.get(tokens[start : start + key_bytes])  # type: ignore[union-attr]
            if node is None:
                break
            path.append(node)
        return path

    def add_child(self, parent: PrefixNode, key: bytes, blocks: list[Blocks | None]) -> PrefixNode:
        node = PrefixNode(parent, key, blocks)
        parent.children[key] = node
        return node

    def detach(self, node: PrefixNode) -> list[PrefixNode]:
        """Removes a subtree and returns its nodes. Ancestors left without blocks and children are removed too,
        including roots."""
        removed = list(subtree(node))
        for gone in removed:
            gone.detached = True
        self._unhook(node)
        return removed

    def prune(self, node: PrefixNode) -> None:
        """Removes a node that has neither blocks nor children, and then such ancestors."""
        if not node.children and not any(node.blocks) and not node.detached:
            node.detached = True
            self._unhook(node)

    def _unhook(self, node: PrefixNode) -> None:
        """Cuts a node from its parent, and then ancestors that are left empty, up to the root."""
        while node.parent is not None:
            parent = node.parent
            if parent.children.get(node.key) is node:
                del parent.children[node.key]
            if parent.children or any(parent.blocks) or parent.detached:
                return
            parent.detached = True
            node = parent
        del self._roots[self._name_of.pop(node)]

    def tops(self) -> Iterator[PrefixNode]:
        """The first node of every prefix."""
        for root in list(self._roots.values()):
            yield from list(root.children.values())

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node below the roots (for tests and diagrams)."""
        for top in self.tops():
            yield from subtree(top)


def subtree(node: PrefixNode) -> Iterator[PrefixNode]:
    """A node and everything below it, parents before children, without recursion."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(current.children.values())
