"""The adapters that a device holds: which of its slots each has, and which blocks of a pool its factors lie in.

The pool is that of the first KV group, or one of their own. An adapter that sequences have holds its blocks as a
sequence does. One that nobody has keeps them as cached prefixes keep theirs: they count as available, and whoever needs
one takes all, those used longest ago first. (Unified paging: S-LoRA, Sheng et al. 2023.)

What lives here: slots, blocks and users of adapters. What may not: who may start (scheduler/step_planner.py), what lies in a
block (lora/layout.py), tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.cache.block_pool import BlockPool
from headrace.spec import AdapterSpace


@dataclass(slots=True, eq=False)
class ResidentAdapter:
    """``users``: sequences that have it, and those that have left while a step in flight may name it."""

    name: str
    slot: int
    blocks: tuple[int, ...]
    users: int = 0


class AdapterBlocks:
    """``shared``: the pool of the first KV group, whose ``on_evict`` asks here; used where the space has no blocks of
    its own. ``most_in_use``: blocks that adapters in use may have together."""

    def __init__(self, space: AdapterSpace, shared: BlockPool) -> None:
        self.is_shared = not space.blocks
        self.pool = shared if self.is_shared else BlockPool(space.blocks, self.evict)
        self.most_in_use = self.pool.num_blocks // (2 if self.is_shared else 1)
        self.num_brought = 0
        self._free_slots = list(range(space.slots - 1, -1, -1))
        self._sizes: dict[str, int] = {}  # blocks of each that was ever expected
        self._resident: OrderedDict[str, ResidentAdapter] = OrderedDict()  # used longest ago first
        self._owners: dict[int, ResidentAdapter] = {}  # by block
        self._leaving: list[tuple[int, ResidentAdapter]] = []  # (last step that names it, of whom)
        self._retired = -1

    # --- what is there

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_leaving(self) -> int:
        """Blocks that nobody will have once the steps in flight have been collected."""
        if not self._leaving:
            return 0
        last = {id(each): each for _, each in self._leaving if each.users == self._num_leaving(each)}
        return sum(len(each.blocks) for each in last.values())

    def _num_leaving(self, adapter: ResidentAdapter) -> int:
        return sum(1 for _, each in self._leaving if each is adapter)

    def owns(self, block: int) -> bool:
        return block in self._owners

    def is_resident(self, name: str) -> bool:
        return name in self._resident

    def expect(self, name: str, blocks: int) -> None:
        """Sequences that have it will come."""
        self._sizes[name] = blocks

    def size(self, name: str) -> int:
        """In blocks."""
        return self._sizes.get(name, 0)

    def to_take(self, name: str) -> int:
        """Of the available blocks, how many one more sequence takes that has it."""
        held = self._resident.get(name)
        return self.size(name) if held is None else 0 if held.users else len(held.blocks)

    def can_place(self, name: str) -> bool:
        """Whether there is a slot for it, and a block of their own, if they have some."""
        if not self.is_shared and self.to_take(name) > self.pool.num_available:
            return False
        return (
            name in self._resident or bool(self._free_slots) or any(not each.users for each in self._resident.values())
        )

    # --- users

    def take(self, name: str) -> tuple[ResidentAdapter, bool]:
        """One more sequence has it; whether it must be brought in. As many blocks as ``to_take`` says are available,
        and it can be placed."""
        held = self._resident.get(name)
        missing = held is None
        if held is None:
            held = self._place(name)
        elif not held.users:
            for block in held.blocks:
                self.pool.acquire(block)
        held.users += 1
        return held, missing

    def join(self, held: ResidentAdapter | None) -> ResidentAdapter | None:
        """One more sequence has what another one has."""
        if held is not None:
            held.users += 1
        return held

    def release(self, held: ResidentAdapter, last_step: int) -> None:
        """A sequence has it no more, from now on or once ``last_step`` has been collected."""
        if last_step > self._retired:
            self._leaving.append((last_step, held))
            return
        held.users -= 1
        if held.users:
            return
        for block in held.blocks:
            self.pool.release(block)
        if self._resident.get(held.name) is held:
            self._resident.move_to_end(held.name)

    def retire(self, step_id: int) -> None:
        self._retired = step_id
        if self._leaving:
            entries, self._leaving = self._leaving, []
            for last_step, held in entries:
                self.release(held, last_step)

    # --- coming and going

    def _place(self, name: str) -> ResidentAdapter:
        if not self._free_slots:
            self._forget(next(each for each in self._resident.values() if not each.users))
        slot = self._free_slots.pop()
        held = ResidentAdapter(name, slot, tuple(self.pool.allocate() for _ in range(self.size(name))))
        for block in held.blocks:
            self._owners[block] = held
            self.pool.name(block)
        self._resident[name] = held
        self.num_brought += 1
        return held

    def evict(self, block: int) -> None:
        """The block is about to be somebody else's: the adapter that it belongs to is gone."""
        self._forget(self._owners[block])

    def clear(self) -> None:
        """What the device holds is not known any more."""
        for held in list(self._resident.values()):
            self._forget(held)

    def _forget(self, held: ResidentAdapter) -> None:
        """Sequences that have it keep its blocks until they end."""
        del self._resident[held.name]
        self._free_slots.append(held.slot)
        for block in held.blocks:
            del self._owners[block]
            self.pool.unname(block)
