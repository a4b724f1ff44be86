"""Which of several replicas of one model a request goes to.

The rule: where its first token is expected soonest, counted in prompt tokens:

    cost(replica) = tokens of this prompt that are not cached there
                  + tokens of prompts that were sent there and have no answer yet
                  + ROW_COST for each answer under way there

The least cost wins; among equals the replica with the fewest answers, then each in turn. So a conversation returns to
the replica that has its beginning, unless so much waits there that computing it anew elsewhere is sooner.

With replicas that compute prompts for the others, an answer goes by the same rule to one of those others, and its prompt
to where it is expected soonest; unless no more than SHORT of its tokens are missing where it is answered: then it is
computed there, which a decode step hardly feels.

What is cached is known from what was sent: each replica has a table of hashes of blocks, each chained to the one before,
as large as its cache; a new block overwrites what stood at its place, much as it would evict a block there. A table that
is wrong costs time, never tokens. Tables, loads and roles lie in one block of memory, which several front ends may share:
each writes its own loads, all of them write the tables, and the first one the roles.

What lives here: the rule and what it looks at. What may not: sockets, processes, a replica's state.
"""

from __future__ import annotations

import mmap
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.disagg import roles
from headrace.request import Request

BLOCK = 16  # tokens, until a replica's cache is known
SLOTS = 1 << 16  # hashes of a replica at most
ROW_COST = 128  # prompt tokens; simulated chats, agents and shared prefixes do well from 64 to 256
SHORT = 64  # tokens; a decode step reads all weights anyway
_LOADS = 2  # integers: tokens without an answer, answers under way


def memory_size(replicas: int, fronts: int) -> int:
    """Bytes."""
    return 8 * replicas * (SLOTS + _LOADS * fronts) + roles.memory_size(replicas)


def chain(ids: array[int], block: int, salt: str = "") -> list[int]:
    """A 64-bit number for each full block of a prompt, of everything up to its end. The last token is always
    computed."""
    number, found = zlib.crc32(salt.encode()) + 1, []
    listed = ids.tolist()
    for begin in range(0, (len(listed) - 1) // block * block, block):
        number = hash((number, *listed[begin : begin + block]))
        found.append(number)
    return found


@dataclass(slots=True)
class _Sent:
    replica: int
    rows: int  # answers that have not ended
    missing: int  # tokens that have to be computed before the first answer comes
    prompt: int  # the replica that computes them
    ended: set[int] = field(default_factory=set)  # answers, by index


class Router:
    """One front end's choices. ``memory``: as ``memory_size`` says, zeros at first; ``front``: whose loads are written
    here, -1 where nothing is routed. ``routing``: "prefix", "load" (the same without a look at caches) or "turns"."""

    def __init__(
        self,
        replicas: int,
        memory: memoryview | None = None,
        *,
        fronts: int = 1,
        front: int = 0,
        routing: str = "prefix",
    ) -> None:
        whole = (memoryview(bytearray(memory_size(replicas, fronts))) if memory is None else memory).cast("B").cast("q")
        tables, loads = whole[: replicas * SLOTS], whole[replicas * SLOTS :]
        self._tables = [tables[number * SLOTS : (number + 1) * SLOTS] for number in range(replicas)]
        # everybody's, by replica; ours is one of each
        self._waiting = [loads[number * fronts : (number + 1) * fronts] for number in range(replicas)]
        rest = loads[replicas * fronts :]
        self._rows = [rest[number * fronts : (number + 1) * fronts] for number in range(replicas)]
        self.roles, self.fronts, self.front = rest[replicas * fronts :], fronts, front
        self._routing, self._turn = routing, 0
        self._sizes = [SLOTS] * replicas
        self._block = BLOCK
        self._sent: dict[int, _Sent] = {}
        for number in range(replicas if front >= 0 else 0):  # of whoever was at our place before
            self._waiting[number][front] = self._rows[number][front] = 0

    def learn(self, replica: int, num_blocks: int, block_size: int) -> None:
        """What its cache can hold."""
        self._block = block_size
        self._sizes[replica] = max(1, min(SLOTS, num_blocks))

    def forget_prefixes(self, *replicas: int) -> None:
        """Nothing is cached there."""
        for number in replicas:
            self._tables[number][:] = memoryview(bytes(8 * SLOTS)).cast("q")

    def route(self, request: Request, up: Sequence[int]) -> int:
        """One of the replicas ``up``, of which there is at least one. ``ended`` or ``lost`` has to follow."""
        return self.pair(request, up, ())[0]

    def pair(self, request: Request, up: Sequence[int], prompts: Sequence[int]) -> tuple[int, int]:
        """(who answers, one of ``up``; who computes the prompt: the same, or one of ``prompts``)."""
        hashes, self._turn = self._hashes(request), self._turn + 1
        chosen, missing = self._soonest(request, hashes, up)
        computes = chosen
        if prompts and missing > SHORT:
            computes, missing = self._soonest(request, hashes, prompts)
        for number in {chosen, computes}:
            self._note(number, hashes)
        self._sent[request.request_id] = _Sent(chosen, request.params.n, missing, computes)
        self._waiting[computes][self.front] += missing
        self._rows[chosen][self.front] += request.params.n
        return chosen, computes

    def move_prompt(self, request: Request, prompts: Sequence[int]) -> int:
        """Another of ``prompts`` computes it, in place of one that has died."""
        sent, hashes = self._sent[request.request_id], self._hashes(request)
        self._waiting[sent.prompt][self.front] -= sent.missing
        sent.prompt, sent.missing = self._soonest(request, hashes, prompts)
        self._waiting[sent.prompt][self.front] += sent.missing
        self._note(sent.prompt, hashes)
        return sent.prompt

    def _hashes(self, request: Request) -> list[int]:
        salt = f"{request.adapter or ''}\n{request.cache_salt}"
        return chain(request.prompt_token_ids, self._block, salt) if self._routing == "prefix" else []

    def _soonest(self, request: Request, hashes: Sequence[int], up: Sequence[int]) -> tuple[int, int]:
        """(the replica, tokens of the prompt that it lacks)."""
        length = len(request.prompt_token_ids)
        missing = {number: length - self._block * self._cached(number, hashes) for number in up}
        chosen = min(up, key=lambda number: self._rank(number, missing[number]))
        return chosen, missing[chosen]

    def began(self, request_id: int) -> None:
        """It has its first token."""
        if (sent := self._sent.get(request_id)) is not None:
            self._waiting[sent.prompt][self.front] -= sent.missing
            sent.missing = 0

    def answered(self, request_id: int, index: int) -> None:
        """One of its answers has ended: here, by a stop string, or there, or both."""
        if (sent := self._sent.get(request_id)) is not None and index not in sent.ended:
            sent.ended.add(index)
            if sent.rows == 1:
                self.ended(request_id)
            else:
                sent.rows -= 1
                self._rows[sent.replica][self.front] -= 1

    def ended(self, request_id: int) -> int | None:
        """Where it was; None for one that has ended before."""
        self.began(request_id)
        if (sent := self._sent.pop(request_id, None)) is None:
            return None
        self._rows[sent.replica][self.front] -= sent.rows
        return sent.replica

    def lost(self, replica: int) -> list[int]:
        """The requests that were there when it died."""
        found = [request_id for request_id, sent in self._sent.items() if sent.replica == replica]
        for request_id in found:
            self.ended(request_id)
        return found

    def load(self, replica: int) -> tuple[int, int]:
        """(prompt tokens that wait there, answers under way), of all front ends."""
        return sum(self._waiting[replica]), sum(self._rows[replica])

    def where(self, request_id: int) -> int | None:
        sent = self._sent.get(request_id)
        return None if sent is None else sent.replica

    def _rank(self, number: int, missing: int) -> tuple[int, int, int]:
        turn = (number - self._turn) % len(self._tables)
        if self._routing == "turns":
            return 0, 0, turn
        waiting, rows = self.load(number)
        return missing + waiting + ROW_COST * rows, rows, turn

    def _cached(self, number: int, hashes: Sequence[int]) -> int:
        """Blocks from the first on: the last one that is known, for whoever has it has had all before it."""
        table, size = self._tables[number], self._sizes[number]
        known = (at + 1 for at in range(len(hashes) - 1, -1, -1) if table[hashes[at] % size] == hashes[at])
        return next(known, 0)

    def _note(self, number: int, hashes: Sequence[int]) -> None:
        table, size = self._tables[number], self._sizes[number]
        for each in hashes:
            table[each % size] = each


def shared_memory(fd: int, replicas: int, fronts: int) -> memoryview:
    """What another process has made by ``portability.shared_file``."""
    return memoryview(mmap.mmap(fd, memory_size(replicas, fronts)))
