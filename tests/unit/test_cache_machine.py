"""The cache manager alone, as a state machine: pools, prefix tree and copy-on-write under any order of calls.

A model of the truth runs beside it: every block a sequence holds remembers which tokens were written into it, so a
block that is shared, evicted or given back too early is noticed by its contents.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.cache.block_pool import BlockPool, PrefixTree
from headrace.cache.manager import CacheManager, SequenceKV, TableEdits
from headrace.spec import KVGroup, KVKind, KVSpec

BLOCK = 2


@dataclass(eq=False)
class Holder:
    kv: SequenceKV
    tokens: list[int]
    written: int = 0
    last_step: int = -1


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        window=st.sampled_from([None, 3, 5]),
        blocks=st.integers(4, 14),
        more=st.sampled_from([0, 0, 8]),
        lookahead=st.booleans(),
    )
    def start(self, window: int | None, blocks: int, more: int, lookahead: bool = False) -> None:
        """``more`` blocks of the full group: those behind a window are evicted long before the prefix is. With
        ``lookahead`` each slot has an entry that is made of the token behind its own, too."""
        specs = [KVSpec((0,), KVKind.FULL, BLOCK, 1, 1, 8)]
        if window is not None:
            specs.append(KVSpec((1,), KVKind.SLIDING, BLOCK, 1, 1, 8, window=window))
        self.cache = CacheManager(
            [KVGroup(spec, blocks + more * (spec.window is None)) for spec in specs], namespace=b"", lookahead=lookahead
        )
        self.entries: list[dict[tuple[int, int], tuple[int, ...]]] | None = [{} for _ in specs] if lookahead else None
        self.windows = [spec.window for spec in specs]
        self.slots: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in specs]
        self.holders: list[Holder] = []
        self.step = 0
        self.retired = -1

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(["", "x"]))
    def admit(self, tokens: list[int], salt: str) -> None:
        holder = Holder(self.cache.create(salt), tokens)
        match = self.cache.lookup(holder.kv, array("i", tokens))
        assert match.num_tokens < len(tokens)
        self.cache.attach(holder.kv, match)
        holder.written = match.num_tokens
        self.holders.append(holder)
        self._check_contents(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def write(self, data: Any) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.written == len(holder.tokens):
            holder.tokens.append(data.draw(st.integers(0, 1)))
        self.write_to(holder, data.draw(st.integers(holder.written + 1, len(holder.tokens))))

    def write_to(self, holder: Holder, end: int) -> None:
        edits = TableEdits()
        self.cache.trim(holder.kv, holder.written, holder.last_step)
        if not self.cache.try_prepare(holder.kv, holder.written, end, 0, edits, self.step):
            return
        for group, source, target in zip(edits.copy_group, edits.copy_source, edits.copy_target, strict=True):
            for offset in range(BLOCK):
                for kept in (self.slots, self.entries or self.slots):
                    if (source, offset) in kept[group]:
                        kept[group][target, offset] = kept[group][source, offset]
        for group in range(len(self.slots)):
            for position in range(holder.written, end):
                block = holder.kv.tables[group][position // BLOCK]
                assert block is not None
                self.slots[group][block, position % BLOCK] = tuple(holder.tokens[: position + 1])
            for position in range(max(0, holder.written - 1), end - 1) if self.entries is not None else ():
                block = holder.kv.tables[group][position // BLOCK]
                if block is not None:
                    self.entries[group][block, position % BLOCK] = tuple(holder.tokens[: position + 2])
        holder.written, holder.last_step = end, self.step
        self.cache.link(holder.kv, array("i", holder.tokens), end, self.step)
        self.step += 1
        for other in self.holders:
            self._check_contents(other)

    def _check_contents(self, holder: Holder) -> None:
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, holder.written - window + 1)
            for position in range(first, holder.written):
                block = holder.kv.tables[group][position // BLOCK]
                assert block is not None, f"group {group} gave back a block in the window"
                assert self.slots[group][block, position % BLOCK] == tuple(holder.tokens[: position + 1])
                if self.entries is not None and position < holder.written - 1:
                    assert self.entries[group][block, position % BLOCK] == tuple(holder.tokens[: position + 2])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.written:
            twin = Holder(
                self.cache.fork(holder.kv, holder.written),
                holder.tokens[: holder.written],
                holder.written,
                holder.last_step,
            )
            self.holders.append(twin)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.cache.free(holder.kv, holder.last_step)

    @rule()
    def retire(self) -> None:
        if self.retired < self.step - 1:
            self.retired += 1
            self.cache.retire(self.retired)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "cache"):
            return
        for group, pool in enumerate(self.cache.pools):
            held: dict[int, int] = {}
            for holder in self.holders:
                for block in holder.kv.tables[group]:
                    if block is not None:
                        held[block] = held.get(block, 0) + 1
            for _, leaving_group, block in self.cache._leaving:
                if leaving_group == group:
                    held[block] = held.get(block, 0) + 1
            assert all(pool.references(block) == held.get(block, 0) for block in range(pool.num_blocks))
            assert pool.num_used == len(held)
            assert pool.num_repeated == sum(held.values()) - len(held)
            assert pool.num_used + pool.num_available == pool.num_blocks

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for holder in list(self.holders):
                self.cache.free(holder.kv, holder.last_step)
            self.cache.retire(self.step)
            assert self.cache.num_used_blocks == 0
            for node in list(self.cache.tree.nodes()):
                if not node.detached:
                    self.cache.forget(node)
            assert len(self.cache.tree._roots) == 0, "an empty tree keeps no roots"


def test_cache_machine() -> None:
    quick = settings(
        max_examples=150,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(CacheMachine, settings=quick)


def test_the_oldest_cached_block_is_evicted_first() -> None:
    evicted: list[int] = []

    def evict(block: int) -> None:
        evicted.append(block)
        pool.unname(block)

    pool = BlockPool(3, evict)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.name(block)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.acquire(blocks[1])  # used again: no longer the oldest
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]] == evicted


def test_releasing_what_nobody_holds_is_noticed() -> None:
    pool = BlockPool(1, lambda block: None)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0)


def test_a_prefix_that_has_slid_out_of_every_window_leaves_no_trace() -> None:
    spec = KVSpec((0,), KVKind.SLIDING, 4, num_kv_heads=1, head_dim=1, dtype_bytes=8, window=8)
    cache = CacheManager([KVGroup(spec, 32)], namespace=b"")
    for salt in ("one", "two"):
        kv, tokens = cache.create(salt), array("i", range(40))
        assert cache.try_prepare(kv, 0, 40, 0, TableEdits(), 0)
        cache.trim(kv, 30, -1)
        cache.link(kv, tokens, 40, None)
        cache.free(kv, -1)
    assert len(cache.tree._roots) == 0 and cache.num_used_blocks == 0


def test_where_blocks_look_ahead_the_last_that_match_is_computed_again() -> None:
    spec, tokens = KVSpec((0,), KVKind.FULL, 4, num_kv_heads=1, head_dim=1, dtype_bytes=8), array("i", range(16))
    for lookahead, found in ((False, [12, 4, 0]), (True, [8, 0, 0])):
        cache = CacheManager([KVGroup(spec, 32)], lookahead=lookahead, namespace=b"")
        kv = cache.create()
        assert cache.try_prepare(kv, 0, 16, 0, TableEdits(), 0)
        cache.link(kv, tokens, 16, None)
        cache.free(kv, -1)
        assert [cache.lookup(cache.create(), tokens[:size]).num_tokens for size in (14, 5, 3)] == found


def test_hashes_name_contents_and_their_context() -> None:
    """Equal ids under an equal parent have equal hashes in any engine; another salt, parent or namespace changes
    them."""

    def digest(namespace: bytes, salt: str, *keys: bytes) -> bytes:
        tree = PrefixTree(1, namespace)
        node = tree.ensure_root(salt, None)
        for key in keys:
            node = tree.add_child(node, key, [(0,)])
        return node.hash

    base = digest(b"m", "", b"a", b"b")
    assert base == digest(b"m", "", b"a", b"b") and len(base) == 16
    assert (
        len(
            {
                base,
                digest(b"n", "", b"a", b"b"),
                digest(b"m", "s", b"a", b"b"),
                digest(b"m", "", b"b", b"b"),
                digest(b"m", "", b"a"),
            }
        )
        == 5
    )


def test_a_path_of_a_hundred_thousand_blocks_needs_no_recursion() -> None:
    tree = PrefixTree(1, b"")
    node = tree.ensure_root("", None)
    first = None
    for _ in range(100_000):
        node = tree.add_child(node, b"k", [None])
        first = first or node
    assert len(node.hash) == 16
    node.blocks[0] = (1,)
    assert first is not None
    assert len(tree.detach(node)) == 1
    assert len(tree._roots) == 0 and first.detached


def test_a_prefix_whose_window_was_evicted_is_found_again_once_it_has_been_computed_again() -> None:
    machine = CacheMachine()
    machine.start(window=5, blocks=4, more=16)
    prompt, found = [0, 1] * 6, []
    for tokens in (prompt, prompt, [1] * 12, prompt, prompt):
        machine.admit(tokens, "")
        (holder,) = machine.holders
        found.append(holder.written)
        while holder.written < len(tokens):
            machine.write_to(holder, holder.written + 1)
            machine.cache.retire(machine.step - 1)
        machine.holders.clear()
        machine.cache.free(holder.kv, holder.last_step)
    assert found == [0, 10, 0, 0, 10]
    machine.teardown()


def test_what_a_match_takes_from_the_cache_is_not_there_for_others() -> None:
    machine = CacheMachine()
    machine.start(window=5, blocks=8, more=16)
    machine.admit([0] * 16, "")
    (holder,) = machine.holders
    while holder.written < 16:
        machine.write_to(holder, holder.written + 1)
        machine.cache.retire(machine.step - 1)
    machine.cache.free(holder.kv, holder.last_step)
    taken = [machine.cache.pools[1].allocate() for _ in range(5)]  # what lies behind the window is evicted
    match = machine.cache.lookup(machine.cache.create(), array("i", [0] * 15))
    assert match.num_tokens == 14 and machine.cache.pools[1].num_available == 3  # two of them are the match's own
    assert machine.cache.blocks_to_take(match, 15)[1] == 3
    for block in taken:
        machine.cache.pools[1].release(block)
    machine.holders.clear()
    machine.teardown()
