"""The life of a server with several models: each has a start, a watch and starts again by itself; signals, draining and
the end are all models' own.

What lives here: that life. What may not: whose memory (manager.py), routes, sockets (lifecycle.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.config import EngineConfig
from headrace.engine.connection import watch_engine
from headrace.errors import ConfigError, HeadraceError, ModelError, OutOfMemory
from headrace.server.frontends.parent import FAILED_STARTS
from headrace.server.lifecycle import ENGINE_EXIT_SECONDS, Lifecycle, end_dead, until
from headrace.server.members.manager import Member, MemberConfig, ModelManager, size
from headrace.server.members.routes import SharedService
from headrace.server.service import Service

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM

log = logging.getLogger("headrace.server")
MOST_SECONDS = 30.0  # between two starts of a model that fails

StartEngine = Callable[[EngineConfig], Awaitable["AsyncLLM"]]


@dataclass(frozen=True, slots=True)
class MembersConfig:
    """``budget``: bytes that all members may hold together. ``level``: at which they sleep; None: by device."""

    members: tuple[MemberConfig, ...]
    budget: int
    level: int | None = None


def create_members(config: MembersConfig, shared: SharedService) -> list[Member]:
    """Bodies are held by all together, and so are stored responses."""
    members = []
    for each in config.members:
        service = Service(each.server, shared.version, shared.routes, engine_config=each.engine)
        service.limits.threads.close()
        service.limits.threads, service.limits.bodies = shared.limits.threads, shared.limits.bodies
        service.stored = shared.stored
        members.append(Member(each, service, config.level))
    shared.manager = ModelManager(members, config.budget)
    return members


@dataclass
class MembersLife(Lifecycle):
    """``ready`` is called once, when every model has loaded, or could not."""

    service: SharedService
    start: StartEngine
    ready: Callable[[], None]

    @property
    def services(self) -> Sequence[Service]:
        return (self.service, *self.service.services)

    async def _live(self) -> int:
        members = self.service.members
        lives = [asyncio.create_task(self._keep(member)) for member in members]
        try:
            stop = asyncio.create_task(self.signals.came.wait())
            settled = asyncio.create_task(until(lambda: all(member.settled for member in members), math.inf))
            await asyncio.wait([stop, settled], return_when=asyncio.FIRST_COMPLETED)
            settled.cancel()
            if not self.signals.count:
                if any(member.engine is not None for member in members):
                    self.ready()
                ended: asyncio.Future[Any] = asyncio.gather(*lives)
                await asyncio.wait([stop, ended], return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not self.signals.count:
                log.error("No model can be served, and the server ends.")
                return 1
            return await self._drain()
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
            engines = [each.engine for each in members if each.engine is not None]
            await asyncio.gather(*(engine.shutdown(kill_after=ENGINE_EXIT_SECONDS) for engine in engines))

    # --- one model

    async def _keep(self, member: Member) -> None:
        """Starts it, and again when it dies; until the server ends, or the next start would fail as the last did."""
        failed, ever = 0, False
        while not self.signals.count:
            try:
                engine = await self.service.manager.load(member, partial(self.start, member.config.engine))
            except HeadraceError as error:
                failed += 1
                hopeless = failed == FAILED_STARTS or (
                    isinstance(error, ConfigError | ModelError | OutOfMemory) and not ever
                )
                member.lose(error)
                log.error("%s cannot be served%s: %s", member.name, "" if hopeless else " now", error.message)
            else:
                failed, ever, hopeless = 0, True, False
                log.info("%s holds %s awake, %s asleep", member.name, size(member.need), size(member.asleep_bytes))
            member.settled = True
            if hopeless:
                return
            if member.engine is not None:
                if await watch_engine(engine, self.signals.came):
                    return
                await self._end_dead_engine(member, engine)
            await self.signals.within(min(MOST_SECONDS, 2.0**failed - 0.5))

    async def _end_dead_engine(self, member: Member, engine: AsyncLLM) -> None:
        """Its requests end; others' go on."""
        log.error("The engine of %s has died or hangs, and starts again: %s", member.name, engine.ailment)
        await end_dead(member.service)
        await engine.shutdown(kill_after=ENGINE_EXIT_SECONDS)
        member.lose()
