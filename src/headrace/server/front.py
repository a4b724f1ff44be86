"""One of several front ends, ``python -m headrace.server.front``: the server's whole face in a process of its own, for an engine
that their parent (household.py) has launched.

What lives here: a front end's start and end. What may not: what it does in between (lifecycle.py, service.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from typing import Any

from headrace import logs
from headrace.config import Decision
from headrace.engine.client import AsyncLLM
from headrace.engine.connection import JoinedEngine
from headrace.engine.process import Unpacker
from headrace.errors import HeadraceError
from headrace.process_tree import end_with_parent
from headrace.server import requests, together
from headrace.server.api import ROUTES
from headrace.server.auth import Guard
from headrace.server.ledger import Ledger
from headrace.server.lifecycle import Lifecycle
from headrace.server.moderation.watch import Moderator
from headrace.server.run import describe, model_folders, run_loop, warn_of_template
from headrace.server.service import Engine, Service, State

log = logging.getLogger("headrace.server")


class FrontEnd:
    """What the parent's frames mean here."""

    def __init__(self, launch: together.Launch) -> None:
        self._launch = launch
        self._go = asyncio.Event()
        self._warning: asyncio.Future[None] | None = None
        ledger = Ledger.open(launch.ledger, launch.server.api_server_count)
        self._service = Service(
            launch.server,
            launch.version,
            [route.path for route in ROUTES],
            engine_config=launch.engine,
            ledger=ledger,
            number=launch.number - 1,
        )
        self._service.created = launch.created
        self._parent = together.Talk(together.FromParent, self._respond, lambda frame: self._go.set(), _end_orphaned)
        self._service.commons = together.Together(self._parent)

    async def run(self) -> int:
        control = socket.socket(fileno=self._launch.control)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._parent, sock=control)
        try:
            status = await self._serve()
        except HeadraceError as error:
            self._parent.send(together.Failed(type(error).__name__, error.message))
            return 1
        return together.ENGINE_GONE if self._service.state is State.DEAD else status

    async def _serve(self) -> int:
        launch, service = self._launch, self._service
        guard, listener = Guard(launch.server, launch.secret), socket.socket(fileno=launch.listener)
        service.moderator = await Moderator.start(launch.server, model_folders(launch.engine.model.model))
        try:
            return await Lifecycle(service, guard, listener, self._join, log.debug, self._ready).run()
        finally:
            await service.moderator.close()

    async def _join(self) -> Engine:
        await self._go.wait()
        engine = await JoinedEngine.invite()
        self._parent.send(together.Listening(engine.address, engine.secret))
        return await AsyncLLM.join(self._launch.engine, engine, self._launch.serial)

    def _ready(self, engine: Engine) -> None:
        count = Decision("api_server_count", self._launch.server.api_server_count, "front ends, each of which accepts, tokenises and streams")
        self._parent.send(together.Ready(describe(engine, (*self._service.decisions, count))))
        if self._launch.serial == 1:
            self._warning = asyncio.ensure_future(warn_of_template(engine, lambda line: self._parent.send(together.Warn(line))))

    async def _respond(self, question: together.Question) -> Any:
        """For another front end, whose client asks."""
        if isinstance(question, together.FindRequest):
            return await requests.standing(self._service, question.name, question.tenant)
        if isinstance(question, together.ListRequests):
            return requests.running(self._service, question.tenant)
        if isinstance(question, together.FindResponse):
            found = self._service.stored.find(question.tenant, question.name)
            return None if found is None else (found.items, found.response)
        if isinstance(question, together.DeleteResponse):
            return self._service.stored.delete(question.tenant, question.name) or None
        return None


def _end_orphaned() -> None:
    """Without its parent nobody can reach it, and nobody will end it."""
    os._exit(1)


def main() -> None:
    (launch,) = Unpacker(together.Launch).feed(sys.stdin.buffer.read())
    end_with_parent(launch.parent)
    logs.configure(launch.server.log_format, front=launch.number)
    logging.getLogger("headrace").setLevel(launch.log_level)
    sys.exit(run_loop(_run(launch)))


async def _run(launch: together.Launch) -> int:
    return await FrontEnd(launch).run()


if __name__ == "__main__":
    main()
