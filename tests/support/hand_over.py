"""Replicas in this process that hand over prompts, and the real front end before them: turns in any order.

What lives here: that house. What may not: assertions about one test's requests.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from headrace.config import DeviceConfig, EngineConfig
from headrace.disagg.hand_over import HandOver
from headrace.engine import connection as frames
from headrace.engine.core import EngineCore
from headrace.engine.executor import OpenStaging
from headrace.engine.loop import EngineLoop
from headrace.engine.replicas import Replicas
from headrace.engine.routing import Router
from headrace.errors import EngineDead
from headrace.processes.messages import Reply, Unpacker, pack
from headrace.request import Request
from tests.support.hash_engine import Answers, assert_at_rest


class Replica:
    """One engine's loop, turn by turn, and the front end's end of its socket."""

    def __init__(self, core: EngineCore, number: int, fd: int, givers: int, slots: int | None) -> None:
        self.core = core
        desk = core.hand_over = HandOver(core, number)
        if slots is not None:
            desk._free = list(range(slots))
        self.slots = len(desk._free)
        core.executor.control(OpenStaging(fd, givers, desk.widths, desk.slots))
        self._loop = EngineLoop(SimpleNamespace(core=self.core), self, SimpleNamespace())  # type: ignore[arg-type]
        self._heard, self._told = Unpacker(frames.Command), Unpacker(frames.Event)
        self._link = SimpleNamespace(serial=0, send=lambda data: self.outbox.extend(self._told.feed(data)))
        self.inbox: deque[Any] = deque()
        self.outbox: deque[Any] = deque()
        self.death: EngineDead | None = None
        self.asleep = 0
        self.on_note: Any = None

    alive = property(lambda self: self.death is None)
    dead = property(lambda self: self.death is not None)
    ailment = property(lambda self: self.death)

    def listen(self, on_event: Any, on_death: Any) -> None:
        self._on_event, self._on_death = on_event, on_death

    def send(self, data: bytes) -> None:
        self.inbox.extend(self._heard.feed(data))

    def submit(self, asked: Request) -> None:
        self.send(pack(asked))

    def abort(self, request_id: int) -> None:
        self.send(pack(frames.Abort(request_id)))

    def finish(self, request_id: int, index: int, num_tokens: int) -> None:
        self.send(pack(frames.Finish(request_id, index, num_tokens)))

    @property
    def has_work(self) -> bool:
        return self.alive and bool(self.inbox or self.core.has_work)

    def turn(self) -> None:
        while self.inbox:
            command = self.inbox.popleft()
            self._loop._handlers[type(command)](self._link, command)  # type: ignore[arg-type]
        if self.core.has_work and (outputs := self.core.step()):
            self.outbox.extend(self._told.feed(frames.pack_step(outputs)))
        if self._loop._asked:
            self._loop._answer()
        assert self.core.hand_over is not None
        for note in self.core.hand_over.take_notes():
            self.outbox.extend(self._told.feed(frames.pack_note(note)))

    def tell(self) -> None:
        frame = self.outbox.popleft()
        if not isinstance(frame, Reply):  # nobody has asked
            self._on_event(frame) if isinstance(frame, frames.Step) else self.on_note(frame.note)

    def die(self) -> None:
        """What it has said is heard."""
        while self.outbox:
            self.tell()
        self.death = EngineDead("killed")
        self._on_death(self.death, None)

    def assert_at_rest(self) -> None:
        assert_at_rest(self.core)
        desk = self.core.hand_over
        assert desk is not None and not desk.busy and len(desk._free) == self.slots, vars(desk)


class House:
    """The first ``givers`` of the ``cores`` compute prompts. ``slots``: of each region; None: as many as there are.
    ``swaps``: roles may change; ``seconds`` is the front end's time."""

    def __init__(
        self,
        fd: int,
        cores: Sequence[EngineCore],
        givers: int = 1,
        slots: int | None = None,
        swaps: bool = False,
        router: Router | None = None,
    ) -> None:
        count, self.seconds = len(cores), 0.0
        device = DeviceConfig(data_parallel_size=count, prefill_replicas=givers, swap_roles=swaps)
        self.replicas = [Replica(core, number, fd, device.staging_regions, slots) for number, core in enumerate(cores)]
        self.front = Replicas(self.replicas, EngineConfig(device=device), router, now=lambda: self.seconds)  # type: ignore[arg-type]
        for number in range(count):
            self.front._router.learn(number, cores[0].scheduler.cache.num_blocks, cores[0].scheduler.cache.block_tokens)
        self.answers, self.lost = Answers(), set[int]()
        self.front.listen(
            lambda frame: self.answers.take(frames.unpack_step(frame)), lambda _, ids: self.lost.update(ids or ())
        )

    def run(self, rng: random.Random | None = None) -> None:
        """Until nobody has anything to do; in any order, if there is an ``rng``."""
        while busy := [each for each in self.replicas if each.has_work or (each.alive and each.outbox)]:
            for each in [rng.choice(busy)] if rng is not None else busy:
                if each.has_work and (rng is None or rng.random() < 0.5):
                    each.turn()
                while each.outbox and (rng is None or rng.random() < 0.7):
                    each.tell()

    def handed(self, number: int) -> Any:
        return self.replicas[number].core.hand_over.counts  # type: ignore[union-attr]

    def assert_at_rest(self) -> None:
        for each in self.replicas:
            if each.alive:
                each.assert_at_rest()
        assert not self.front._relay._open and not self.front._roles._asked
        for load in self.front._roles._loads:
            assert not (load.prompts.length or load.room.length or load.answering)
        assert not any(map(sum, (*self.front._router._waiting, *self.front._router._rows)))
