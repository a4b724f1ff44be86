"""A replica's part in handing over prompts: what it gives to others, and what it waits for from them.

Who decodes has the request from the start, and holds it back. Once there is room for the prompt, it takes blocks for
it and says so (Want); prefixes that it has are not sent again. Who computes the prompt does so as for any request of
one token. After each step, the nodes of the prefix tree that are computed and wanted are copied into free slots of
shared memory (Sent), while the device computes the next chunk. Who decodes copies them into its blocks, names them in
its own prefix tree, and gives the slots back (Taken). With the last one the request is entered, finds its prefix cached
like any other, and computes what is left: the last tokens that fill no block. So what follows is what one replica would
do, whatever the request asks for.

Whatever goes wrong, the request is entered with what has come, and the rest is computed here:

    no room                  it waits; once nothing else runs or comes, it is entered without, and the scheduler decides
    a slot was written anew  entered with what has come
    who computes has died    the front end finds another one, or says that nobody does: ``go_on``
    evicted before wanted    computed again there

Of requests whose prompts begin alike, the first one's nodes come, and the others find them cached.

Blocks that wait are held until the scheduler has seen the request, no longer: held blocks can keep nobody from running.

Sources: DistServe (Zhong et al. 2024), Splitwise (Patel et al. 2024), Mooncake (Qin et al. 2024).

What lives here: that. What may not: torch, copies (worker/executor.py), sockets, which replica (engine/routing.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from headrace.cache.manager import SequenceKV
from headrace.clock import Clock
from headrace.disagg.notes import Note, Sent, Taken, Want
from headrace.disagg.staging import num_slots, slot_widths
from headrace.engine.executor import Executor, ExportBlocks, ImportBlocks
from headrace.errors import HeadraceError
from headrace.request import Request, SamplingParams, SequenceStatus

if TYPE_CHECKING:  # front ends, which load no scheduler, ask who hands over
    from headrace.scheduler.scheduler import Scheduler

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


def prompt_alone(request: Request) -> Request:
    """The same prompt, and nothing asked for beyond."""
    return replace(request, params=_ONE_TOKEN, bad_word_ids=(), explain=False, grammar_seconds=0.0)


def is_apart(request: Request) -> bool:
    """Whether its prompt may be computed elsewhere: one that is scored is computed where the scores are wanted."""
    return request.params.prompt_logprobs is None


@dataclass(frozen=True, slots=True)
class HandOverCounts:
    """Since the start. ``early``: bytes that were handed over while the rest of their prompt was computed. ``alone``:
    requests that went on without the rest of their prompt."""

    given: int = 0  # prompts
    given_bytes: int = 0
    early_bytes: int = 0
    given_seconds: float = 0.0  # that this replica's loop spent copying
    taken: int = 0
    taken_bytes: int = 0
    taken_seconds: float = 0.0
    alone: int = 0
    waiting: int = 0  # now


@dataclass(slots=True)
class _Giving:
    request: Request
    nodes: int  # that the prompt fills
    next: int | None = None  # to be sent; None: none is wanted yet
    slots: set[int] = field(default_factory=set)  # that hold some of it


@dataclass(slots=True)
class _Coming:
    request: Request
    nodes: int
    names: Sequence[bytes] = ()
    kv: SequenceKV | None = None  # None: there was no room yet
    have: int = 0  # nodes that are there
    follows: tuple[int, int] = (-1, 0)  # a request, and how many of its nodes are this one's, too
    joined: bool = False  # it waits for those alone


class Engine(Protocol):
    """What it needs of an EngineCore. ``enter``: a request begins; ``knows``: it has begun, and has not ended;
    ``adapter_key``: its adapter's, in names of prefixes."""

    scheduler: Scheduler
    executor: Executor
    clock: Clock

    def enter(self, request: Request) -> None: ...

    def knows(self, request_id: int) -> bool: ...

    def adapter_key(self, request: Request) -> str | None: ...


class HandOver:
    """One replica's. ``replica``: its number, and that of its region, where it has one."""

    def __init__(self, engine: Engine, replica: int) -> None:
        self._scheduler, self._cache = engine.scheduler, engine.scheduler.cache
        self._control, self._now = engine.executor.control, engine.clock.now
        self._enter, self._knows, self._adapter = engine.enter, engine.knows, engine.adapter_key
        self._replica = replica
        self.widths = slot_widths(self._cache.specs, self._cache.block_tokens)
        self._slot_bytes = sum(self.widths)
        step_nodes = -(-self._scheduler.limits.max_num_batched_tokens // self._cache.block_tokens)
        self.slots = num_slots(self.widths, step_nodes)
        self._free = list(range(self.slots))  # a heap: low ones first, whose pages are there
        self._giving: dict[int, _Giving] = {}
        self._coming: dict[int, _Coming] = {}
        self._held: dict[int, SequenceKV] = {}  # of requests that were entered, until the scheduler has seen them
        self._notes: list[Note] = []
        self._counts = HandOverCounts()

    # --- what it is asked

    @property
    def busy(self) -> bool:
        return bool(self._giving or self._coming or self._held)

    @property
    def request_ids(self) -> list[int]:
        return [*self._giving, *self._coming]

    @property
    def waiting(self) -> list[Request]:
        """For their prompts."""
        return [each.request for each in self._coming.values()]

    @property
    def counts(self) -> HandOverCounts:
        return replace(self._counts, waiting=len(self._coming))

    def take_notes(self) -> list[Note]:
        """What others are to be told."""
        notes, self._notes = self._notes, []
        return notes

    # --- what it is told

    def give(self, request: Request) -> None:
        """Its prompt is to be computed here for another replica."""
        self._giving[request.request_id] = _Giving(request, self._nodes(request))
        self._enter(request)

    def expect(self, request: Request) -> None:
        """Its prompt is computed elsewhere."""
        self._coming[request.request_id] = _Coming(request, self._nodes(request))
        self.turn()

    def joins(self, request: Request) -> bool:
        """Whether a request that is computed here waits for what is on its way for another one whose prompt begins
        alike."""
        joining = _Coming(request, self._nodes(request), joined=True)
        if not self._coming or not is_apart(request) or not self._follows(joining):
            return False
        self._coming[request.request_id] = joining
        return True

    def go_on(self, request_id: int) -> None:
        """No more of its prompt comes."""
        if (coming := self._coming.get(request_id)) is not None:
            self._go_on(coming)
            self.turn()

    def drop(self, request_id: int) -> None:
        """Nobody wants it any more. (Somebody may still read its slots, and will see that they are another's.)"""
        if (giving := self._giving.pop(request_id, None)) is not None:
            self._release(giving.slots)
        coming = self._coming.pop(request_id, None)
        if coming is not None and coming.kv is not None:
            self._cache.free(coming.kv, -1)
        self.turn()

    def hear(self, note: Note) -> None:
        if isinstance(note, Sent):
            self._take(note)
        elif (giving := self._giving.get(note.request_id)) is not None:
            if isinstance(note, Want):
                giving.next = note.first
            else:
                self._release(giving.slots.intersection(note.slots))
                giving.slots.difference_update(note.slots)
            self._tidy(giving)
        self.turn()

    def forget(self) -> None:
        """What has come so far is found by nobody who begins later."""
        self._cache.forget_all([each.kv for each in self._coming.values() if each.kv is not None])

    def turn(self) -> None:
        """After each step, and whenever something was told: all that can be done now."""
        for giving in [each for each in self._giving.values() if each.next is not None and each.next < each.nodes]:
            if not self._free:
                break
            self._send(giving)
        room = True
        for waiting in list(self._coming.values()):
            if waiting.kv is not None or not (room or waiting.joined) or self._follows(waiting):
                continue
            if waiting.joined:
                self._begin(waiting)
            else:
                room = self._admit(waiting)
        for request_id in [each for each in self._held if self._seen(each)]:
            self._cache.free(self._held.pop(request_id), -1)

    # --- giving

    def _nodes(self, request: Request) -> int:
        return (len(request.prompt_token_ids) - 1) // self._cache.block_tokens

    def _send(self, giving: _Giving) -> None:
        request, first = giving.request, giving.next
        assert first is not None
        siblings = self._scheduler.requests.get(request.request_id)
        if siblings and siblings[0].status is SequenceStatus.WAITING:  # of a long queue nothing is looked up
            return
        path = self._cache.computed(request.cache_salt, self._adapter(request), request.prompt_token_ids, giving.nodes)
        ready = path[first : first + len(self._free)]
        if not ready:
            if not self._knows(request.request_id):  # it was computed before it was wanted, and is not there any more
                self._enter(request)
            return
        slots = tuple(heapq.heappop(self._free) for _ in ready)
        blocks = tuple(tuple(each or () for each in node.blocks) for node in ready)
        began = self._now()
        self._control(ExportBlocks(self._replica, slots, tuple(node.hash for node in ready), blocks))
        giving.slots.update(slots)
        giving.next = first + len(ready)
        last = giving.next == giving.nodes
        size = len(slots) * self._slot_bytes
        counts = self._counts
        self._counts = replace(
            counts,
            given=counts.given + last,
            given_bytes=counts.given_bytes + size,
            early_bytes=counts.early_bytes + (0 if last else size),
            given_seconds=counts.given_seconds + self._now() - began,
        )
        self._notes.append(Sent(request.request_id, self._replica, first, slots, last))

    def _release(self, slots: set[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)

    def _tidy(self, giving: _Giving) -> None:
        if giving.next == giving.nodes and not giving.slots:
            self._giving.pop(giving.request.request_id, None)

    # --- taking

    def _follows(self, coming: _Coming) -> bool:
        """Whether nodes that it shares with another request are on their way for that one: they come once."""
        leader, shared = coming.follows
        if (first := self._coming.get(leader)) is not None and first.have < shared:
            return True
        on_their_way = [each for each in self._coming.values() if each.kv is not None]
        found = [(self._shared(each.request, coming.request), each) for each in on_their_way]
        shared, first = max(
            ((nodes, each) for nodes, each in found if nodes > each.have), key=lambda pair: pair[0], default=(0, None)
        )
        coming.follows = (-1 if first is None else first.request.request_id, shared)
        return first is not None

    def _shared(self, one: Request, other: Request) -> int:
        """Nodes that their prompts begin with alike."""
        if (one.cache_salt, one.adapter) != (other.cache_salt, other.adapter):
            return 0
        size, ids, others = self._cache.block_tokens, one.prompt_token_ids, other.prompt_token_ids
        most = min(self._nodes(one), self._nodes(other))
        return next(
            (at for at in range(most) if ids[at * size : at * size + size] != others[at * size : at * size + size]),
            most,
        )

    def _admit(self, coming: _Coming) -> bool:
        """Gets its blocks, if there is room."""
        request, cache = coming.request, self._cache
        holds = [each for each in self._coming.values() if each.kv is not None]
        if not holds and not self._scheduler.has_work and not self._held:
            spare = 0
        else:
            spare = len(self._scheduler.roster.running) + 1
            rows = sum(each.request.params.n for each in holds) + request.params.n
            if len(self._scheduler.roster.free_rows) < rows:
                return False
            if holds and 2 * cache.block_tokens * sum(each.nodes for each in (coming, *holds)) > cache.num_tokens:
                return False  # what waits leaves half of them to what runs
        kv = cache.create(request.cache_salt, self._adapter(request))
        match = cache.lookup(kv, request.prompt_token_ids)
        cache.attach(kv, match)
        if not cache.try_reserve(kv, coming.nodes * cache.block_tokens, spare):
            cache.free(kv, -1)
            if spare:
                return False
            self._go_on(coming)  # it has all there is, and that is too little
            return True
        coming.kv, coming.have = kv, len(match.nodes)
        self._notes.append(Want(request.request_id, coming.have, match.num_tokens))
        if coming.have == coming.nodes:
            self._finish(coming)
        else:
            coming.names = cache.names(kv, request.prompt_token_ids, coming.nodes)
        return True

    def _take(self, sent: Sent) -> None:
        self._notes.append(Taken(sent.request_id, sent.slots))
        coming = self._coming.get(sent.request_id)
        if coming is None or coming.kv is None or sent.first != coming.have:
            return
        cache, kv, end = self._cache, coming.kv, coming.have + len(sent.slots)
        blocks = tuple(cache.node_blocks(kv, at) for at in range(coming.have, end))
        began = self._now()
        try:
            self._control(ImportBlocks(sent.source, sent.slots, tuple(coming.names[coming.have : end]), blocks))
        except HeadraceError:  # they have been written anew: whoever sent them was told to forget the request
            self._go_on(coming)
            return
        cache.link(kv, coming.request.prompt_token_ids, end * cache.block_tokens, None)
        coming.have = end
        counts = self._counts
        self._counts = replace(
            counts,
            taken_bytes=counts.taken_bytes + len(sent.slots) * self._slot_bytes,
            taken_seconds=counts.taken_seconds + self._now() - began,
        )
        if end == coming.nodes:
            self._finish(coming)

    def _finish(self, coming: _Coming) -> None:
        self._counts = replace(self._counts, taken=self._counts.taken + 1)
        self._begin(coming)

    def _go_on(self, coming: _Coming) -> None:
        self._counts = replace(self._counts, alone=self._counts.alone + 1)
        self._begin(coming)

    def _begin(self, coming: _Coming) -> None:
        del self._coming[coming.request.request_id]
        if coming.kv is not None:
            self._held[coming.request.request_id] = coming.kv
        self._enter(coming.request)

    def _seen(self, request_id: int) -> bool:
        return request_id in self._scheduler.requests or not self._knows(request_id)
