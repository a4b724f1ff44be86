"""One of several front ends, ``python -m headrace.server.frontends.child``: the server's whole face in a process of its
own, for an engine that their parent (parent.py) has launched.

What lives here: a front end's start and end. What may not: what it does in between (lifecycle.py, service.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from functools import partial
from typing import Any

from headrace.config import Decision
from headrace.engine.client import AsyncLLM
from headrace.engine.connection import JoinedEngine
from headrace.engine.replicas import Replicas
from headrace.errors import EngineDead, HeadraceError
from headrace.observe import logs
from headrace.processes.frames import parent_socket
from headrace.processes.messages import Channel, receive
from headrace.processes.tree import end_with_parent
from headrace.server.app import ROUTES
from headrace.server.exposition import Counters
from headrace.server.frontends import link
from headrace.server.lifecycle import EngineLife
from headrace.server.limits import Guard
from headrace.server.moderation.watch import moderating
from headrace.server.run import describe, run_loop, warn_of_template
from headrace.server.service import Service, State

log = logging.getLogger("headrace.server")


class FrontEnd:
    """What the parent's frames mean here."""

    def __init__(self, launch: link.Launch, control: socket.socket) -> None:
        self._launch, self._control = launch, control
        self._go = asyncio.Event()
        self._door = socket.socket(fileno=launch.door)
        self._engines: asyncio.Queue[tuple[int, socket.socket]] = asyncio.Queue()
        self._replicas: Replicas | None = None
        self._warning: asyncio.Future[None] | None = None
        counters = Counters.open(launch.counters, launch.server.api_server_count)
        routes, number = [route.path for route in ROUTES], launch.number - 1
        self._service = Service(
            launch.server, launch.version, routes, engine_config=launch.engine, counters=counters, number=number
        )
        self._service.created = launch.created
        # without its parent it cannot be reached, and would never be ended
        self._parent = Channel(link.FromParent, self._hear, partial(os._exit, 1), self._respond)
        self._service.observed.shared = link.PeersBehindParent(self._parent)

    async def run(self) -> int:
        await self._parent.open(self._control)
        try:
            status = await self._serve()
        except HeadraceError as error:
            self._parent.send(link.Failed(type(error).__name__, error.message))
            return 1
        return link.ENGINE_GONE if self._service.model.state is State.DEAD else status

    async def _serve(self) -> int:
        launch, service = self._launch, self._service
        guard, listener = Guard(launch.server, launch.secret), socket.socket(fileno=launch.listener)
        async with moderating(launch.server, launch.engine.model.model) as service.moderator:
            return await EngineLife(service, guard, listener, log.debug, self._join, self._ready).run()

    def _hear(self, frame: link.Go | link.Engine) -> None:
        self._go.set()
        if isinstance(frame, link.Engine):
            (fd,) = socket.recv_fds(self._door, 1, 1)[1]
            self._engines.put_nowait((frame.replica, socket.socket(fileno=fd)))

    async def _join(self) -> AsyncLLM:
        await self._go.wait()
        return await AsyncLLM.join(self._launch.engine, self._connect, self._launch.serial)

    async def _connect(self) -> JoinedEngine | Replicas:
        device = self._launch.engine.device
        first = dict[int, JoinedEngine]()
        while len(first) < device.data_parallel_size:
            number, sock = await self._engines.get()
            first[number] = JoinedEngine(sock)
        if device.data_parallel_size == 1:
            return first[0]
        router = link.create_router(self._launch)
        self._replicas = Replicas([first[number] for number in sorted(first)], self._launch.engine, router)
        self._replicas.on_change = lambda entry: self._parent.send(link.Changed(entry))
        self._replacing = asyncio.ensure_future(self._replace())
        return self._replicas

    async def _replace(self) -> None:
        """For ever: replicas that come for others that have died."""
        while self._replicas is not None:
            number, sock = await self._engines.get()
            engine = JoinedEngine(sock)
            with contextlib.suppress(EngineDead):
                await engine.started()
                self._replicas.replace(number, engine)

    def _ready(self, engine: AsyncLLM) -> None:
        number, does = self._launch.server.api_server_count, "front ends, each of which accepts, tokenises and streams"
        count = (Decision("api_server_count", number, does),) if number > 1 else ()
        self._parent.send(link.Ready(describe(engine, (*self._service.model.decisions, *count))))
        if self._launch.serial == 1:
            self._warning = asyncio.ensure_future(
                warn_of_template(engine, lambda line: self._parent.send(link.Warn(line)))
            )

    async def _respond(self, question: link.Ask) -> Any:
        """For another front end, whose client asks."""
        return await self._service.known(question.what, *question.about)


def main() -> None:
    control = parent_socket()
    launch = receive(control, link.Launch)
    end_with_parent(launch.parent)
    logs.configure(launch.server.log_format, **({"front": launch.number} if launch.server.api_server_count > 1 else {}))
    logging.getLogger("headrace").setLevel(launch.log_level)
    sys.exit(run_loop(_run(launch, control)))


async def _run(launch: link.Launch, control: socket.socket) -> int:
    return await FrontEnd(launch, control).run()


if __name__ == "__main__":
    main()
