"""The invariants that hold after every event, over blocks, rows, names of prefixes and tokens.

    blocks    used + cached + free = all; references are owners: tables, and what waits for a step in flight
    in flight what a step in flight reads or writes is nobody's to hand out
    names     a prefix names a block only if it holds the prefix, written by a step that was submitted; and no block
    twice
    rows      one owner each, or free, or waiting for a step in flight
    tokens    known = prompt + told; placeholders = samples in flight; computed <= known; who waits holds nothing
    requests  those that have come and not ended are there, and no others

Everything is compared in whole lists and dictionaries, and what was right and is the same is right: looking costs no
more than what happens.

What lives here: looking. What may not: order and starvation (order.py), answers (life.py), changing anything.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain as joined
from itertools import repeat
from operator import add

from headrace.cache.block_pool import PrefixNode
from headrace.cache.manager import BlockTable
from headrace.request import SequenceStatus
from headrace.scheduler.roster import Sequence
from headrace.scheduler.scheduler import Scheduler
from tests.support.simulation import oracle
from tests.support.simulation.broken import Broken
from tests.support.simulation.device import Device, slots_of
from tests.support.simulation.oracle import Line

Leaving = list[tuple[int, int, int]]


class Books:
    """``settled``: records are looked at as they should be; else a cohort's lag is reckoned with."""

    def __init__(self, scheduler: Scheduler, device: Device, *, settled: bool) -> None:
        self._scheduler = scheduler
        self._device = device
        self._settled = settled
        num_groups = len(scheduler.cache.pools)
        self._holdings: list[tuple[list[BlockTable], Leaving, list[int]]] = [
            ([], [], [])
        ] * num_groups  # as they were when all was right
        self._nothing: list[BlockTable] = [[] for _ in scheduler.cache.pools]
        self._owners: list[list[int]] = [[0] * pool.num_blocks for pool in scheduler.cache.pools]  # then
        self._pools: list[tuple[list[int], list[int], list[int], list[int], list[bool]]] = [
            ([], [], [], [], [])
        ] * num_groups  # likewise
        self._named: list[dict[int, PrefixNode]] = [
            {} for _ in scheduler.cache.pools
        ]  # as found last time, contents right
        self._links: dict[PrefixNode, array[int]] = {}  # the hash after each token of a node
        self._told: dict[Sequence, array[int]] = {}  # what is known of each, as its line grows
        self._doubtful = False  # names of steps that have failed may still stand
        self._rows = list(range(scheduler.limits.max_num_seqs))

    def check(self, lines: Mapping[tuple[int, int], Line], live: Collection[int] | None) -> None:
        """``live``: the requests that must be there; None while some are on their way in or out."""
        scheduler = self._scheduler
        if self._settled:
            scheduler.settle()
        roster = scheduler.roster
        if live is not None and roster.requests.keys() != live:
            raise Broken("requests", f"{sorted(roster.requests)} are there, {sorted(live)} should be")
        everybody, running = [*joined.from_iterable(roster.requests.values())], []
        waiting, nothing = SequenceStatus.WAITING, self._nothing
        for sequence in everybody:
            if sequence.status is not waiting:
                running.append(sequence)
            elif sequence.row is not None or sequence.num_computed_tokens or sequence.kv.tables != nothing:
                raise Broken("tokens", f"{_name(sequence)} waits and holds something")
        if len(everybody) - len(running) != len(roster.waiting):
            raise Broken("queue", f"{len(roster.waiting)} are said to wait, {len(everybody) - len(running)} do")
        self._check_blocks(running)
        self._check_users()
        self._check_names()
        self._check_rows(running)
        self._check_tokens(everybody, running, lines)

    # --- blocks

    def _check_blocks(self, running: list[Sequence]) -> None:
        """Nobody else holds any."""
        cache = self._scheduler.cache
        for group, pool in enumerate(cache.pools):
            tables = [sequence.kv.tables[group] for sequence in running]
            if (tables, cache._leaving, pool._references) != self._holdings[group]:
                self._owners[group] = self._count_owners(group, tables)
                self._holdings[group] = ([table[:] for table in tables], cache._leaving[:], pool._references[:])
            self._check_pool(group)
            for plan, touched in self._device.in_flight:
                if not all(map(self._owners[group].__getitem__, touched[group])):
                    raise Broken("in flight", f"step {plan.step_id} uses blocks of group {group} that nobody holds")

    def _count_owners(self, group: int, tables: list[BlockTable]) -> list[int]:
        pool = self._scheduler.cache.pools[group]
        owners = [0] * pool.num_blocks
        for block in self._adapters_blocks(group):
            owners[block] += 1
        for block in joined.from_iterable(tables):
            if block is not None:
                owners[block] += 1
        for _, left_group, block in self._scheduler.cache._leaving:
            if left_group == group:
                owners[block] += 1
        if owners != pool._references:
            wrong = [(block, n, m) for block, (n, m) in enumerate(zip(owners, pool._references, strict=True)) if n != m]
            raise Broken("references", f"group {group}: (block, owners, references) {wrong}")
        return owners

    def _adapters_blocks(self, group: int) -> list[int]:
        """That some sequence has, or has had for a step in flight."""
        books = self._scheduler.cache.adapters
        if books is None or not books.is_shared or group:
            return []
        held = {id(each): each for each in [*books._resident.values(), *(left for _, left in books._leaving)]}
        for siblings in self._scheduler.roster.requests.values():
            held |= {id(each.kv.resident): each.kv.resident for each in siblings if each.kv.resident is not None}
        return [block for each in held.values() if each.users for block in each.blocks]

    def _check_users(self) -> None:
        """Whoever runs has its adapter, and nobody else; slots have one adapter each, or none."""
        books, roster = self._scheduler.cache.adapters, self._scheduler.roster
        if books is None:
            return
        having = [(each, each.kv.resident) for siblings in roster.requests.values() for each in siblings]
        users = Counter(id(held) for _, held in having if held is not None)
        users.update(id(held) for _, held in books._leaving)
        for sequence, held in having:
            wanted = sequence.request.adapter if sequence.row is not None else None
            if (None if held is None else held.name) != wanted or (
                held is not None and sequence.adapter_slot != held.slot
            ):
                raise Broken("adapters", f"{_name(sequence)} wants {wanted} and has {held}")
        for held in [*books._resident.values(), *(held for _, held in having if held is not None)]:
            if held.users != users[id(held)]:
                raise Broken("adapters", f"{held} has {users[id(held)]} users")
        slots = [each.slot for each in books._resident.values()]
        if sorted([*slots, *books._free_slots]) != list(range(slots_of(self._device._setting))):
            raise Broken("adapters", f"slots {slots} are taken and {books._free_slots} free")
        idle = books.pool.num_blocks - books.pool.num_available
        if not books.is_shared and idle != sum(
            len(each.blocks)
            for each in {
                id(e): e
                for e in [
                    *books._resident.values(),
                    *(held for _, held in having if held is not None),
                    *(held for _, held in books._leaving),
                ]
            }.values()
            if each.users
        ):
            raise Broken("adapters", f"{idle} blocks of adapters are used")

    def _check_pool(self, group: int) -> None:
        """Whoever nobody owns is free or cached, once; a cached one is named, a free one is not."""
        pool, named, owners = (
            self._scheduler.cache.pools[group],
            self._scheduler.cache._node_of[group],
            self._owners[group],
        )
        books = self._scheduler.cache.adapters
        if books is not None and books.is_shared and not group:
            if not named.keys().isdisjoint(books._owners):
                raise Broken("names", f"blocks {named.keys() & books._owners.keys()} have a prefix and an adapter")
            named = {**named, **books._owners}  # type: ignore[dict-item]
        state = (owners, pool._free, [*pool._cached], [*named], pool._named)
        if state == self._pools[group]:
            return
        idle = [*pool._free, *pool._cached]
        if len(idle) != owners.count(0) or len(set(idle)) != len(idle) or any(map(owners.__getitem__, idle)):
            counts = (
                f"{len(pool._free)} free, {len(pool._cached)} cached, {owners.count(0)} of {len(owners)} without owner"
            )
            raise Broken("blocks", f"group {group}: {counts}")
        if sum(pool._named) != len(named) or not all(map(pool._named.__getitem__, named)):
            raise Broken("names", f"group {group}: the pool and the tree name different blocks")
        if not pool._cached.keys() <= named.keys() or not named.keys().isdisjoint(pool._free):
            raise Broken("names", f"group {group}: a cached block without a name, or a free one with one")
        self._pools[group] = (owners, pool._free[:], state[2], state[3], pool._named[:])

    # --- names

    def _check_names(self) -> None:
        """New names, and those whose blocks have been written again."""
        device, groups = self._device, self._scheduler.cache._node_of
        if device.broken:
            self._doubtful = True  # its step has written nothing, and takes its names along when it is collected
            return
        if kept := [(group, block) for group, block in device.unusable if block in groups[group]]:
            raise Broken("unusable", f"(group, block) {kept} hold what an unusable row has written, and can be found")
        for group, named in enumerate(groups):
            known = {} if self._doubtful else self._named[group]
            fresh = set(device.written[group].intersection(named))
            device.written[group].clear()
            if named != known:
                fresh.update([block for block, node in named.items() if known.get(block) is not node])
                self._named[group] = dict(named)
            for block in fresh:
                self._check_name(group, block, named[block])
        self._doubtful = False

    def _check_name(self, group: int, block: int, node: PrefixNode) -> None:
        blocks = node.blocks[group]
        if node.detached or blocks is None or block not in blocks:
            raise Broken("names", f"block {block} of group {group} has the name of a prefix that is not its own")
        if node.parent is None or node.parent.detached or node.parent.children.get(node.key) is not node:
            raise Broken("names", f"block {block} of group {group} has a name that cannot be found")
        size = self._device._specs[group].block_size
        first = blocks.index(block) * size
        if self._device.contents(group, block) != self._links_of(node)[first : first + size]:
            raise Broken("names", f"block {block} of group {group} has a name and does not hold its tokens")

    def _links_of(self, node: PrefixNode) -> array[int]:
        links = self._links.get(node)
        if links is None:
            parent = node.parent
            top = parent is None or not parent.key
            head = self._root_of(parent) if top else self._links_of(parent)[-1]
            links = self._links[node] = oracle.chain(array("i", node.key), head)
        return links

    def _root_of(self, top: PrefixNode | None) -> int:
        cache = self._scheduler.cache
        return oracle.root(cache.tree._name_of[top][1] if top is not None and cache.adapters is not None else None)

    # --- rows

    def _check_rows(self, running: list[Sequence]) -> None:
        roster = self._scheduler.roster
        held = [*roster.free_rows, *[row for _, row in roster.leaving_rows]]
        for sequence in running:
            if sequence.row is not None:
                held.append(sequence.row)
                held += sequence.sibling_rows
        held.sort()
        if held != self._rows:
            raise Broken("rows", f"rows in some hand: {held} of {len(self._rows)}")

    # --- tokens

    def _check_tokens(
        self, everybody: list[Sequence], running: list[Sequence], lines: Mapping[tuple[int, int], Line]
    ) -> None:
        """Known = prompt + told, less what a cohort has kept back; placeholders = samples in flight; computed <=
        known."""
        samples, lag = self._samples(), {} if self._settled else _lags(self._scheduler)
        known = [sequence.token_ids for sequence in everybody]
        for sequence in everybody:
            if sequence not in self._told:
                self._told[sequence] = lines[sequence.request_id, sequence.index].ids
        wanted = [*map(self._told.__getitem__, everybody)]
        counts, due = [sequence.num_tokens for sequence in everybody], map(len, known)
        if samples:
            due = map(add, due, map(samples.get, everybody, repeat(0)))
        if lag:
            behind = [lag.get(sequence, (0, 0)) for sequence in everybody]
            wanted = [ids[: len(ids) - taken] for ids, (taken, _) in zip(wanted, behind, strict=True)]
            due = map(add, due, [taken - planned for taken, planned in behind])
        if known != wanted or counts != [*due]:
            self._raise_tokens(everybody, wanted, samples)
        for sequence in running:
            self._check_running(sequence)

    def _samples(self) -> dict[Sequence, int]:
        """How many tokens of each are in flight."""
        samples: dict[Sequence, int] = {}
        for step in self._scheduler.in_flight:
            step_id = step.plan.step_id
            drafts = step.plan.drafts
            for j, (work, sequence) in enumerate(zip(step.plan.sample_work, step.sampled, strict=True)):
                if sequence.ignore_through < step_id:
                    drafted = drafts[work] if drafts and j not in step.settled else 0
                    samples[sequence] = samples.get(sequence, 0) + 1 + drafted
        for sequence in samples:
            samples[sequence] += max(0, len(sequence.forced_ids) - 1)  # these are on their way with a sample
        return samples

    def _raise_tokens(
        self, everybody: list[Sequence], wanted: list[array[int]], samples: Mapping[Sequence, int]
    ) -> None:
        """Says whose are wrong."""
        for sequence, ids in zip(everybody, wanted, strict=True):
            prompt, coming = sequence.num_prompt_tokens, samples.get(sequence, 0)
            if sequence.token_ids != ids:
                raise Broken(
                    "tokens", f"{_name(sequence)}: knows {list(sequence.token_ids[prompt:])}, told {list(ids[prompt:])}"
                )
            if sequence.num_tokens != len(ids) + coming:
                raise Broken(
                    "tokens", f"{_name(sequence)}: {sequence.num_tokens} tokens, {len(ids)} known, {coming} in flight"
                )
        raise Broken("tokens", "a cohort's records have been made up for wrongly")

    def _check_running(self, sequence: Sequence) -> None:
        computed, known = sequence.num_computed_tokens, sequence.num_tokens
        covered = (
            sequence.kv.capacity if self._scheduler.limits.keeps_kv else known
        )  # who recomputes all keeps no account
        if sequence.row is None or computed > known or computed > covered:
            raise Broken("tokens", f"{_name(sequence)}: {computed} of {known} computed, {sequence.kv.capacity} covered")


def _lags(scheduler: Scheduler) -> dict[Sequence, tuple[int, int]]:
    """What a cohort's records have yet to be made up for: tokens taken, tokens planned."""
    cohort = scheduler._cohort
    if cohort is None:
        return {}
    return {
        member: (cohort._taken - cohort._taken_at[place], cohort._planned - cohort._planned_at[place])
        for place, member in enumerate(cohort.members)
    }


def _name(sequence: Sequence) -> str:
    return f"request {sequence.request_id}.{sequence.index}"
