"""The cache manager: the scheduler's only interface to the KV cache.

For each sequence, it keeps one block table per KV group (SequenceKV), finds reusable prefixes, allocates blocks, copies
on write, and takes blocks back only when no step in flight can still touch them.

    tokens of a sequence   0 ........ num_linked_blocks·B ........ num_computed ........ capacity
                           | named in the prefix tree | computed, not named | allocated, not written |

What lives here: the rules over pools and tree. What may not: who is scheduled (scheduler/), token budgets, tensors.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.cache.adapters import AdapterBlocks, ResidentAdapter
from headrace.cache.block_pool import BlockPool, Blocks, PrefixNode, PrefixTree, chained
from headrace.spec import AdapterSpace, KVGroup, KVSpec

BlockTable = list[int | None]  # None: behind a sliding window, given back
_NEVER = 2**62  # as many linked blocks no sequence has: it names none
_ID_BYTES = array("i").itemsize


@dataclass(slots=True, eq=False)
class SequenceKV:
    """The blocks that one sequence holds. ``capacity``: how many tokens the tables of all groups cover."""

    salt: str
    adapter: str | None
    tables: list[BlockTable]
    capacity: int = 0
    node: PrefixNode | None = None  # the deepest one on this sequence's path
    num_linked_blocks: int = 0
    num_matched_blocks: int = 0  # of those, found and not written by this sequence
    tail_shared: bool = False  # the last, partly filled block may have other holders: copy before writing
    resident: ResidentAdapter | None = None  # its adapter's blocks, while it runs


@dataclass(slots=True)
class TableEdits:
    """Block-table edits and block copies of one plan, as parallel lists."""

    row: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    copy_group: list[int] = field(default_factory=list)
    copy_source: list[int] = field(default_factory=list)
    copy_target: list[int] = field(default_factory=list)

    def set(self, row: int, group: int, index: int, block: int) -> None:
        self.row.append(row)
        self.group.append(group)
        self.index.append(index)
        self.block.append(block)

    def copy(self, group: int, source: int, target: int) -> None:
        self.copy_group.append(group)
        self.copy_source.append(source)
        self.copy_target.append(target)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A reusable prefix: ``nodes``, starting with the root's child."""

    nodes: Seq[PrefixNode]
    num_tokens: int


NO_MATCH = PrefixMatch((), 0)


class CacheManager:
    """The blocks of all KV groups. With ``prefix_caching`` off, blocks are not named, so none are found.

    With ``sliding`` off, blocks that slid out of a window are kept: recomputation and up-front reservation need all of
    them, and the dummy tokens of padding look further back than the real ones.
    """

    def __init__(
        self,
        groups: Seq[KVGroup],
        *,
        prefix_caching: bool = True,
        sliding: bool = True,
        lookahead: bool = False,
        namespace: bytes,
        adapters: AdapterSpace | None = None,
    ) -> None:
        """``lookahead``: what lies in a block depends on the first token behind it, too. ``adapters``: None: where
        sequences' adapters lie is not asked."""
        self.specs: tuple[KVSpec, ...] = tuple(group.spec for group in groups)
        self.prefix_caching = prefix_caching
        self._lookahead = lookahead
        self.pools = [BlockPool(group.num_blocks, self._evict_from(index)) for index, group in enumerate(groups)]
        self.adapters = None if adapters is None else AdapterBlocks(adapters, self.pools[0])
        self.tree = PrefixTree(len(groups), namespace)
        self.block_tokens = math.lcm(*(spec.block_size for spec in self.specs))  # tokens of one prefix node
        self._node_of: list[dict[int, PrefixNode]] = [{} for _ in groups]
        # step in flight → nodes whose blocks it writes, and for whom
        self._written: dict[int, list[tuple[SequenceKV, PrefixNode]]] = {}
        # blocks of unusable rows that somebody may still hold: never named again
        self._distrusted: list[set[int]] = [set() for _ in groups]
        self._leaving: list[tuple[int, int, int]] = []  # (last step that names it, group, block)
        self._slid: set[tuple[int, int, int]] = set()  # those of them that slid out of a window
        self._copies: list[tuple[int, int, int, int]] = []  # (step in flight, group, source, copy)
        self._retired = -1  # the last step collected
        self._windows = tuple(spec.window if sliding else None for spec in self.specs)
        self._sliding = tuple(index for index, window in enumerate(self._windows) if window is not None)

    # --- sizes

    def capacity_tokens(self, max_chunk: int, adapter: str | None = None) -> int:
        """The longest sequence that fits into the cache on its own, beside its ``adapter``, when at most ``max_chunk``
        tokens are computed at a time."""
        longest, books = 2**31 - 1, self.adapters
        for spec, pool, window in zip(self.specs, self.pools, self._windows, strict=True):
            beside = books.size(adapter) if adapter is not None and books is not None and books.pool is pool else 0
            whole = (pool.num_blocks - beside) * spec.block_size
            slides = window is not None and whole >= window + min(max_chunk, spec.block_size) + 2 * spec.block_size
            longest = longest if slides else min(longest, whole)
        return longest

    @property
    def num_tokens(self) -> int:
        """How many tokens all groups can hold at once, if nothing slides out of a window."""
        return min(spec.block_size * pool.num_blocks for spec, pool in zip(self.specs, self.pools, strict=True))

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used_blocks(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def shared_tokens(self) -> int:
        """KV tokens that tables share, counted once for each table beyond the first; the largest over all groups."""
        return max(pool.num_repeated * spec.block_size for spec, pool in zip(self.specs, self.pools, strict=True))

    @property
    def num_leaving(self) -> int:
        """Blocks that return once the steps in flight that use them have been collected."""
        return len(self._leaving) + (0 if self.adapters is None else self.adapters.num_leaving)

    def num_coming(self) -> list[int]:
        """How many of the leaving blocks other sequences can then have, by group. Excluded are blocks that slid out of
        a window, because their sequence takes another block in exchange, and blocks that another sequence still holds.
        """
        coming = [0] * len(self.pools)
        freed = {entry[1:] for entry in self._leaving if entry not in self._slid}
        entries = Counter(entry[1:] for entry in self._leaving) if freed else {}
        for group, block in freed:
            coming[group] += self.pools[group].references(block) == entries[group, block]
        if self.adapters is not None and self.adapters.is_shared:
            coming[0] += self.adapters.num_leaving
        return coming

    def create(self, salt: str = "", adapter: str | None = None) -> SequenceKV:
        return SequenceKV(salt, adapter, [[] for _ in self.specs])

    # --- prefixes

    def lookup(self, kv: SequenceKV, token_ids: array[int]) -> PrefixMatch:
        """The longest usable prefix of full blocks. At least one token is left to compute, because its logits are
        needed. Of blocks that look ahead the last one that matches is computed again: what follows it may be another
        token."""
        root = self.tree.find_root(kv.salt, kv.adapter) if self.prefix_caching else None
        if root is None:
            return NO_MATCH
        most = (len(token_ids) - 1) // self.block_tokens
        path = self.tree.walk(root, token_ids.tobytes(), self.block_tokens * _ID_BYTES, most)
        count = self._usable(path[: len(path) - self._lookahead])
        return PrefixMatch(path[:count], count * self.block_tokens) if count else NO_MATCH

    def _usable(self, path: list[PrefixNode]) -> int:
        """How many nodes of a path can be reused: a full-attention group needs all of them, a sliding one those in its
        window."""
        if not self._sliding:
            return len(path)  # a node without its full-group blocks is not in the tree
        runs = [0] * len(self._sliding)  # consecutive nodes with blocks, up to and including the current one
        best = 0
        for count, node in enumerate(path, start=1):
            fits = True
            for which, group in enumerate(self._sliding):
                runs[which] = runs[which] + 1 if node.blocks[group] is not None else 0
                fits = (
                    fits
                    and runs[which] >= count - self._first_needed(group, count * self.block_tokens) // self.block_tokens
                )
            best = count if fits else best
        return best

    def _first_needed(self, group: int, start: int) -> int:
        """The first token whose keys a query at position ``start`` reads."""
        window = self._windows[group]
        return 0 if window is None else max(0, start - window + 1)

    def blocks_to_take(self, match: PrefixMatch, num_tokens: int, *, whole: bool = False) -> list[int]:
        """Unreferenced blocks, by group, that ``num_tokens`` tokens would take: new ones, and those of the match.
        ``whole``: computed in one step, so that no block slides out of a window before the last one is taken."""
        wanted = self.idle_blocks(match)
        for group, (spec, window) in enumerate(zip(self.specs, self._windows, strict=True)):
            fresh = -(-num_tokens // spec.block_size) - match.num_tokens // spec.block_size
            wanted[group] += fresh if window is None or whole else min(fresh, -(-window // spec.block_size) + 1)
        return wanted

    def idle_blocks(self, match: PrefixMatch) -> list[int]:
        """How many blocks of a match have no references, by group: they count as available now, and will not once
        attached."""
        idle = []
        for group, (spec, pool) in enumerate(zip(self.specs, self.pools, strict=True)):
            first, inside = divmod(
                self._first_needed(group, match.num_tokens) // spec.block_size, self.block_tokens // spec.block_size
            )
            reused = [block for node in match.nodes[first:] for block in node.blocks[group] or ()]
            idle.append(sum(1 for block in reused[inside:] if pool.is_cached(block)))
        return idle

    def attach(self, kv: SequenceKV, match: PrefixMatch) -> None:
        """Gives an empty sequence the blocks of a match."""
        for group, spec in enumerate(self.specs):
            per_node = self.block_tokens // spec.block_size
            first = self._first_needed(group, match.num_tokens) // spec.block_size
            table, acquire = kv.tables[group], self.pools[group].acquire
            for depth, node in enumerate(match.nodes):
                for offset in range(per_node):
                    blocks = node.blocks[group]
                    needed = depth * per_node + offset >= first and blocks is not None
                    table.append(blocks[offset] if needed and blocks is not None else None)
                    if needed and blocks is not None:
                        acquire(blocks[offset])
        if match.nodes:
            kv.node = match.nodes[-1]
            kv.num_linked_blocks = kv.num_matched_blocks = len(match.nodes)
            kv.capacity = match.num_tokens

    def link(self, kv: SequenceKV, token_ids: array[int], num_tokens: int, step_id: int | None) -> None:
        """Names the blocks of the first ``num_tokens`` tokens (known and computed, or being computed by
        ``step_id``)."""
        if not self.prefix_caching or num_tokens // self.block_tokens <= kv.num_linked_blocks:
            return
        if kv.node is not None and kv.node.detached:
            kv.node, kv.num_linked_blocks, kv.num_matched_blocks = None, 0, 0  # its path was evicted: name it anew
        node = kv.node or self.tree.ensure_root(kv.salt, kv.adapter)
        for depth in range(kv.num_linked_blocks, num_tokens // self.block_tokens):
            start = depth * self.block_tokens
            key = token_ids[start : start + self.block_tokens].tobytes()
            child = node.children.get(key)
            if child is not None:
                self._complete(child, kv, depth, step_id)
            elif (child := self._name(node, key, kv, depth, step_id)) is None:
                self.tree.prune(node)  # a root may have been made for nothing
                break
            kv.node = node = child
            kv.num_linked_blocks = depth + 1

    def _name(
        self, parent: PrefixNode, key: bytes, kv: SequenceKV, depth: int, step_id: int | None
    ) -> PrefixNode | None:
        blocks = [self._node_blocks(kv.tables[group], group, depth) for group in range(len(self.specs))]
        if not any(blocks):
            return None  # all behind the window: there is nothing to name
        if any(not bad.isdisjoint(held or ()) for bad, held in zip(self._distrusted, blocks, strict=True)):
            return None
        if any(block in self._node_of[group] for group, held in enumerate(blocks) for block in held or ()):
            # a sibling's node has begun with the same block, where a node is longer than a block of this group
            return None
        node = self.tree.add_child(parent, key, [None] * len(blocks))
        for group, held in enumerate(blocks):
            self._hold(node, kv, group, held, step_id)
        return node

    def _complete(self, node: PrefixNode, kv: SequenceKV, depth: int, step_id: int | None) -> None:
        """Puts newly computed blocks into nodes whose own were evicted after sliding out of a window."""
        for group in self._sliding:
            held = self._node_blocks(kv.tables[group], group, depth) if node.blocks[group] is None else None
            if held is not None and not any(block in self._node_of[group] for block in held):
                self._hold(node, kv, group, held, step_id)

    def _hold(self, node: PrefixNode, kv: SequenceKV, group: int, held: Blocks | None, step_id: int | None) -> None:
        node.blocks[group] = held
        for block in held or ():
            self._node_of[group][block] = node
            self.pools[group].name(block)
        if step_id is not None and held is not None:
            self._written.setdefault(step_id, []).append((kv, node))

    def _node_blocks(self, table: BlockTable, group: int, depth: int) -> Blocks | None:
        per_node = self.block_tokens // self.specs[group].block_size
        held = table[depth * per_node : (depth + 1) * per_node]
        return tuple(block for block in held if block is not None) if all(block is not None for block in held) else None

    def _evict_from(self, group: int) -> Callable[[int], None]:
        def evict(block: int) -> None:
            if not group and self.adapters is not None and self.adapters.owns(block) and self.adapters.is_shared:
                self.adapters.evict(block)
                return
            node = self._node_of[group][block]
            if self._windows[group] is None:
                self.forget(node)  # nothing below can be reached without it
            else:
                self._unname(node, group)
                self.tree.prune(node)

        return evict

    def forget(self, node: PrefixNode) -> None:
        """Removes a node and its subtree from the tree. Blocks in use stay with their holders; the others become
        free."""
        for gone in self.tree.detach(node):
            for group in range(len(self.specs)):
                self._unname(gone, group)

    def _unname(self, node: PrefixNode, group: int) -> None:
        for block in node.blocks[group] or ():
            del self._node_of[group][block]
            self.pools[group].unname(block)
        node.blocks[group] = None

    def forget_written_by(self, kv: SequenceKV) -> None:
        """Unnames all blocks that this sequence wrote, because their contents cannot be trusted, including those that
        others hold or copied."""
        for group, spec in enumerate(self.specs):
            own = kv.num_matched_blocks * (self.block_tokens // spec.block_size)
            self._distrust(
                group, self._with_copies(group, {block for block in kv.tables[group][own:] if block is not None})
            )

    def _with_copies(self, group: int, blocks: set[int]) -> set[int]:
        """Adds the blocks that steps in flight copy from or to these; several sequences may have copied a shared
        one."""
        for _, copied_in, *pair in 2 * self._copies:
            if copied_in == group and not blocks.isdisjoint(pair):
                blocks.update(pair)
        return blocks

    def forget_written_since(self, kv: SequenceKV, step_id: int) -> None:
        """The same for blocks that step ``step_id`` and later ones write for it, whether or not it still holds them."""
        for step, written in self._written.items():
            for node in [node for owner, node in written if owner is kv and step >= step_id]:
                for group, held in enumerate(tuple(node.blocks)):
                    self._distrust(group, held or ())

    def _distrust(self, group: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._distrusted[group].add(block)
            if (node := self._node_of[group].get(block)) is not None:
                self.forget(node)

    def forget_all(self, sequences: Iterable[SequenceKV]) -> None:
        """Makes everything computed so far unreachable for prefix matches. ``sequences``: all sequences. Those that
        hold blocks keep using them, but name neither these blocks nor later ones, which depend on them."""
        for node in list(self.tree.tops()):
            self.forget(node)
        for kv in sequences:
            if kv.capacity:
                kv.node, kv.num_linked_blocks, kv.num_matched_blocks = None, _NEVER, _NEVER

    # --- blocks that another replica computes, or has asked for

    def computed(self, salt: str, adapter: str | None, token_ids: array[int], most: int) -> list[PrefixNode]:
        """The first nodes of a prompt, at most so many, whose blocks no step in flight still writes."""
        root = self.tree.find_root(salt, adapter)
        path = [] if root is None else self.tree.walk(root, token_ids.tobytes(), self.block_tokens * _ID_BYTES, most)
        coming = {node for written in self._written.values() for _, node in written}
        return path[: next((at for at, node in enumerate(path) if node in coming), len(path))]

    def names(self, kv: SequenceKV, token_ids: array[int], count: int) -> list[bytes]:
        """The hashes of a prompt's first nodes, whether or not they are in the tree."""
        digest, size, found = self.tree.root_hash(kv.salt, kv.adapter), self.block_tokens, list[bytes]()
        for start in range(0, count * size, size):
            found.append(digest := chained(digest, token_ids[start : start + size].tobytes()))
        return found

    def try_reserve(self, kv: SequenceKV, num_tokens: int, spare: int) -> bool:
        """Blocks for whole nodes that others compute, up to ``num_tokens``: of a sliding group those that a query behind
        them sees. All or nothing; False where fewer than ``spare`` were left in a pool."""
        skipped, fresh = [], []
        for group, (spec, table) in enumerate(zip(self.specs, kv.tables, strict=True)):
            first = self._first_needed(group, num_tokens) // self.block_tokens * self.block_tokens // spec.block_size
            skipped.append(max(0, first - len(table)))
            fresh.append(max(0, num_tokens // spec.block_size - len(table) - skipped[group]))
        if any(want + spare > pool.num_available for want, pool in zip(fresh, self.pools, strict=True)):
            return False
        for table, pool, bad, none, want in zip(kv.tables, self.pools, self._distrusted, skipped, fresh, strict=True):
            table += [None] * none
            table += (blocks := [pool.allocate() for _ in range(want)])
            bad.difference_update(blocks)
        kv.capacity = max(kv.capacity, num_tokens)
        return True

    def node_blocks(self, kv: SequenceKV, depth: int) -> tuple[Blocks, ...]:
        """What a sequence holds for one node, by group; () where that is behind a window."""
        return tuple(self._node_blocks(table, group, depth) or () for group, table in enumerate(kv.tables))

    # --- blocks

    def try_prepare(self, kv: SequenceKV, start: int, end: int, row: int, edits: TableEdits, step_id: int) -> bool:
        """Prepares tokens [start, end) to be written by ``step_id``: tables cover them, and no other holder sees the
        write.

        All or nothing; returns False when a pool has too few blocks.
        """
        wanted = [-(-end // spec.block_size) - len(table) for spec, table in zip(self.specs, kv.tables, strict=True)]
        shared = self._shared_tail(kv, start) if kv.tail_shared else {}
        for group, pool in enumerate(self.pools):
            if max(wanted[group], 0) + (group in shared) > pool.num_available:
                return False
        for group, index in shared.items():
            self._copy_block(kv, group, index, row, edits, step_id)
        kv.tail_shared = False
        self._extend(kv, wanted, row, edits)
        return True

    def _extend(self, kv: SequenceKV, wanted: list[int], row: int, edits: TableEdits) -> None:
        for group, want in enumerate(wanted):
            table, pool = kv.tables[group], self.pools[group]
            for _ in range(want):
                block = pool.allocate()
                self._distrusted[group].discard(block)
                edits.set(row, group, len(table), block)
                table.append(block)
        kv.capacity = min(len(table) * spec.block_size for spec, table in zip(self.specs, kv.tables, strict=True))

    def _shared_tail(self, kv: SequenceKV, start: int) -> dict[int, int]:
        """Group → index of the partly filled block at ``start``, where other sequences hold it too; with ``lookahead``
        also of a full one before it, whose last entry is still to come.

        Holders that have released it but wait for a step in flight do not count: what they read was written before.
        """
        shared = {}
        for group, spec in enumerate(self.specs):
            index, offset = divmod(start - self._lookahead, spec.block_size)
            written = offset or self._lookahead
            block = kv.tables[group][index] if written and index < len(kv.tables[group]) else None
            if block is not None:
                leaving = sum(1 for entry in self._leaving if entry[1:] == (group, block))
                if self.pools[group].references(block) - leaving > 1:
                    shared[group] = index
        return shared

    def _copy_block(self, kv: SequenceKV, group: int, index: int, row: int, edits: TableEdits, step_id: int) -> None:
        block = kv.tables[group][index]
        assert block is not None
        own = self.pools[group].allocate()
        self._distrusted[group].discard(own)
        edits.copy(group, block, own)
        self._copies.append((step_id, group, block, own))
        edits.set(row, group, index, own)
        kv.tables[group][index] = own
        self._leave(step_id, group, block)  # this very step still reads it, to copy it

    def has_room(self, num_blocks: int) -> bool:
        """Whether every group has this many blocks available."""
        return all(pool.num_available >= num_blocks for pool in self.pools)

    def tokens_available(self, kv: SequenceKV) -> int:
        """How many tokens the sequence's tables could cover with all available blocks."""
        return min(
            (len(table) + pool.num_available) * spec.block_size
            for spec, table, pool in zip(self.specs, kv.tables, self.pools, strict=True)
        )

    def describe(self, kv: SequenceKV, row: int, edits: TableEdits) -> None:
        """Adds a sequence's complete tables to the edits, for a row that is new to the workers."""
        for group, table in enumerate(kv.tables):
            for index, block in enumerate(table):
                if block is not None:
                    edits.set(row, group, index, block)

    def fork(self, kv: SequenceKV, num_tokens: int) -> SequenceKV:
        """A second holder of the blocks of the first ``num_tokens`` tokens. The first to write to a partly filled block
        copies it."""
        tables = [table[: -(-num_tokens // spec.block_size)] for spec, table in zip(self.specs, kv.tables, strict=True)]
        capacity = min(len(table) * spec.block_size for spec, table in zip(self.specs, tables, strict=True))
        twin = SequenceKV(kv.salt, kv.adapter, tables, capacity, kv.node, kv.num_linked_blocks, kv.num_linked_blocks)
        for group, table in enumerate(tables):
            for block in table:
                if block is not None:
                    self.pools[group].acquire(block)
        kv.tail_shared = twin.tail_shared = True
        return twin

    def trim(self, kv: SequenceKV, start: int, last_step: int) -> None:
        """Gives back blocks that no query from ``start`` on can see (sliding windows)."""
        for group in self._sliding:
            table = kv.tables[group]
            for index in range(self._first_needed(group, start) // self.specs[group].block_size - 1, -1, -1):
                block = table[index]
                if block is None:
                    break
                table[index] = None
                self._leave(last_step, group, block)
                if last_step > self._retired:
                    self._slid.add((last_step, group, block))

    def give_back(self, kv: SequenceKV, num_tokens: int, last_step: int) -> None:
        """Returns whole blocks beyond ``num_tokens``, which were allocated for tokens that did not come."""
        for group, (spec, table) in enumerate(zip(self.specs, kv.tables, strict=True)):
            while len(table) > -(-num_tokens // spec.block_size):
                block = table.pop()
                if block is not None:
                    self._leave(last_step, group, block)
        kv.capacity = min(len(table) * spec.block_size for spec, table in zip(self.specs, kv.tables, strict=True))

    def free(self, kv: SequenceKV, last_step: int) -> None:
        """Returns all blocks, deepest first, immediately or once ``last_step`` has been collected."""
        for group, table in enumerate(kv.tables):
            for block in reversed(table):
                if block is not None:
                    self._leave(last_step, group, block)
        kv.tables = [[] for _ in self.specs]
        kv.capacity = kv.num_linked_blocks = kv.num_matched_blocks = 0
        kv.node, kv.tail_shared = None, False
        if kv.resident is not None and self.adapters is not None:
            self.adapters.release(kv.resident, last_step)
            kv.resident = None

    def _leave(self, last_step: int, group: int, block: int) -> None:
        if last_step <= self._retired:
            self.pools[group].release(block)
        else:
            self._leaving.append((last_step, group, block))

    # --- steps

    def retire(self, step_id: int) -> None:
        """A step was collected: its writes are complete, and blocks that waited for it are released."""
        self._retired = step_id
        if self.adapters is not None:
            self.adapters.retire(step_id)
        self._written.pop(step_id, None)
        if self._copies:
            self._copies = [copy for copy in self._copies if copy[0] > step_id]
        if self._leaving:
            entries, self._leaving = self._leaving, []
            for last_step, group, block in entries:
                self._leave(last_step, group, block)
            if self._slid:
                self._slid.intersection_update(self._leaving)

    def fail(self, step_id: int) -> None:
        """A step failed: blocks that it or a later step was to write can no longer be matched."""
        for step in [step for step in self._written if step >= step_id]:
            for _, node in self._written.pop(step):
                if not node.detached:
                    self.forget(node)
