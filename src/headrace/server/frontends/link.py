"""Several front ends of one engine and the parent that started them (parent.py): what they tell and ask each other,
and what all of them have in common and one alone cannot tell: the engine's newest numbers, the dashboard, requests.

What lives here: the messages between parent and front end, and the common answers, where there is one front end and
where there are several. What may not: processes and their lives, HTTP, the engine's own socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.routing import Router, shared_memory
from headrace.errors import EngineDead
from headrace.processes.messages import Channel, Frame, Question, Reply
from headrace.request import Given
from headrace.server.dashboard import History
from headrace.server.exposition import ServerMetrics

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM
    from headrace.engine.connection import EngineSocket
    from headrace.engine.replicas import Replicas

FindEngine = Callable[[], "EngineSocket | Replicas | AsyncLLM | None"]
STATS_SECONDS = 1.0  # that a reader of /metrics waits for an engine in a long step
ENGINE_GONE = 3  # the exit status of a front end that ends because the engine does not go on
ANSWER_SECONDS = 2.5  # that a front end waits for the parent's answer
# that the parent waits for another's, which may wait one for the engine; less than who asks waits
PASSED_ON_SECONDS = 1.75


class Launch(Frame):
    """The first message to a front end: everything that it is. The descriptors are inherited. ``routing``: memory that
    routers share, -1 where there is one replica. ``door``: over which sockets of engines come."""

    engine: EngineConfig
    server: ServerConfig
    version: str
    secret: bytes  # that tenants' names are made with
    created: int
    listener: int
    counters: int
    parent: int
    log_level: str
    number: int = 0  # from 1: which place it takes; its page is the one before
    serial: int = 0  # of this start: no other front end has it, before or after
    routing: int = -1
    door: int = -1


class Ready(Frame):
    """It serves. ``lines`` are for the person who started the server."""

    lines: list[str]


class Warn(Frame):
    """For the person who started the server: from the first front end alone, they all would say the same."""

    line: str


class Failed(Frame):
    """It cannot start. ``kind`` is the class name of a HeadraceError."""

    kind: str
    message: str


class Go(Frame):
    """To a front end: the engine loads, and the model is on this machine."""


class Engine(Frame):
    """To a front end: the next socket at its door is one of this replica, which serves."""

    replica: int


class Ask(Question):
    """``what``: a method of Peers that the parent answers, or something that it passes on to the other front
    ends (child.py)."""

    what: str
    about: Sequence[Any]


class Changed(Frame):
    """The role of a replica did: what the decision log says of it."""

    entry: tuple[Any, ...]


FromFront = Ready | Warn | Failed | Changed | Reply | Ask
FromParent = Go | Engine | Reply | Ask


def create_router(launch: Launch) -> Router:
    """With what all front ends know."""
    device, fronts = launch.engine.device, launch.server.api_server_count
    memory = shared_memory(launch.routing, device.data_parallel_size, fronts)
    return Router(
        device.data_parallel_size, memory, fronts=fronts, front=launch.number - 1, routing=device.data_parallel_routing
    )


async def ask_all(talks: Iterable[Channel], what: str, about: Sequence[Any]) -> list[Any]:
    """All answers that come in time; a front end that does not answer is left out."""
    asked = (talk.ask(Ask, what, about, seconds=PASSED_ON_SECONDS) for talk in talks)
    answers = await asyncio.gather(*asked)
    return [answer for answer in answers if answer is not None]


class Peers:
    """Answered alike by every front end; as here where there is one."""

    def __init__(self, find_engine: FindEngine, metrics: Callable[[], ServerMetrics]) -> None:
        self._find_engine = find_engine
        self._metrics = metrics
        self._last: Given = {}
        self._history = History()

    async def run(self) -> None:
        """For as long as the server runs."""
        await self._history.run(self._find_engine, self._metrics)

    async def engine_stats(self) -> Given:
        """The engine's numbers; the last known ones while it is loading, gone, or in a step that takes long."""
        engine = self._find_engine()
        if engine is not None and engine.alive:
            with contextlib.suppress(TimeoutError, EngineDead):
                self._last = await asyncio.wait_for(engine.stats(), STATS_SECONDS)
        return self._last

    async def dashboard(self, *after: int) -> Given:
        """What is newer than this sample, step and decision."""
        return self._history.after(*after)

    async def others(self, what: str, *about: Any) -> list[Any]:
        """What the other front ends know."""
        return []


class PeersBehindParent(Peers):
    """The common answers of one front end among several: the parent's, and through it the others'."""

    def __init__(self, parent: Channel) -> None:
        self._parent = parent
        self._last: Given = {}

    async def _ask(self, what: str, *about: Any) -> Any:
        return await self._parent.ask(Ask, what, about, seconds=ANSWER_SECONDS)

    async def run(self) -> None:
        """The parent does."""

    async def engine_stats(self) -> Given:
        self._last = await self._ask("engine_stats") or self._last
        return self._last

    async def dashboard(self, *after: int) -> Given:
        return await self._ask("dashboard", *after) or History().after(*after)

    async def others(self, what: str, *about: Any) -> list[Any]:
        return await self._ask(what, *about) or []
