"""Whose turn it is: models load, wake and sleep one after another, within the budget.

A request to a model that sleeps is submitted all the same; its engine holds it and says so. The model is woken in its
turn (first come, first served); if there is no room, others are put to sleep before: idle ones first, the one used
longest ago first of these. One that is not idle finishes what it has, and what comes meanwhile waits for its next turn.

What lives here: that order. What may not: who has to sleep (budget.py), HTTP, processes' lives (life.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.engine.resolve import estimated_bytes
from headrace.errors import EngineDead, HeadraceError, OutOfMemory, Unavailable
from headrace.server.members.budget import size, to_sleep
from headrace.server.members.member import Member

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM

log = logging.getLogger("headrace.server")


@dataclass
class ModelManager:
    """``budget``: bytes for all members. ``estimate``: what an engine will hold, before it is there."""

    members: Sequence[Member]
    budget: int
    estimate: Callable[[EngineConfig], int] = estimated_bytes
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # who asks first gets it first
    _waking: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    # --- a start

    async def load(self, member: Member, create: Callable[[], Awaitable[AsyncLLM]]) -> AsyncLLM:
        """Raises what the start does, and OutOfMemory for a model that does not fit even alone."""
        async with self._turn:
            member.estimate = await asyncio.to_thread(self.estimate, member.config.engine)
            await self._make_room(member, member.need)
            member.held = member.need
            try:
                engine = await create()
            except BaseException:
                member.held = 0
                raise
            try:
                if engine.tokenizer is not None:
                    await asyncio.to_thread(member.service.model.learn_formats, engine.tokenizer)
                member.attach(engine)
                engine.used = partial(self.use, member)
                member.service.sleep, member.service.wake = partial(self.sleep, member), partial(self.wake, member)
                member.service.wake_status = partial(self.account, member)
                await self._make_room(member, 0)  # it may have turned out larger
            except BaseException:
                member.lose()
                await engine.shutdown()
                raise
            member.used = time.monotonic()
            return engine

    async def _make_room(self, member: Member, needed: int) -> None:
        """``needed``: bytes beside what it holds."""
        others = [each.holding() for each in self.members if each is not member and each.held]
        victims = to_sleep(member.held + needed, self.budget, others)
        if victims is None:
            rest = self.budget - sum(each.asleep for each in others)
            beside = ", even if all others sleep" if others else ""
            raise OutOfMemory(
                f"{member.name} needs {size(member.held + needed)} ({member.purposes}), and of the budget of {size(self.budget)} it can have "
                f"{size(rest)}{beside}. Raise memory, or lower its kv-cache-memory."
            )
        for each in self.members:
            if each.name in victims:
                await self._put_to_sleep(each)

    async def _put_to_sleep(self, member: Member) -> None:
        began = time.monotonic()
        try:
            await member.sleep()
            self._look_after(member)
            log.info("%s sleeps after %.2f s", member.name, time.monotonic() - began)
        except EngineDead:  # then it holds nothing
            member.held = 0
        except HeadraceError as error:
            raise OutOfMemory(f"{member.name} could not be put to sleep: {error.message}") from error

    # --- use

    def use(self, member: Member) -> None:
        """With each request to it."""
        member.used = time.monotonic()
        waking = self._waking.get(member.name)
        if member.engine is not None and member.engine.asleep and (waking is None or waking.done()):
            self._waking[member.name] = asyncio.create_task(self._wake_for_requests(member))

    async def _wake_for_requests(self, member: Member) -> None:
        try:
            await self.wake(member)
        except EngineDead:
            pass  # who watches it says so
        except HeadraceError as error:
            log.error("%s could not be woken: %s", member.name, error.message)
            member.service.limits.end_all(
                Unavailable(f"The model {member.name!r} could not be woken: {error.message}", retry_after=10)
            )

    async def wake(self, member: Member) -> None:
        """Raises HeadraceError; it sleeps on."""
        async with self._turn:
            engine = member.engine
            if engine is None or not engine.asleep:
                return
            await self._make_room(member, member.need - member.held)
            began = time.monotonic()
            await member.wake()
            log.info("%s is awake after %.2f s", member.name, time.monotonic() - began)

    def account(self, member: Member) -> str:
        """What a request to a model that sleeps waits for."""
        busy = next((each for each in self.members if each.condition in ("loading", "waking", "falling asleep")), None)
        if busy is member:
            going = "being woken" if member.condition == "waking" else "about to sleep; it is woken in its turn"
            return f"{member.name} is {going}."
        if busy is not None:
            return f"{member.name} sleeps, and is woken in its turn: {busy.name} is {busy.condition}."
        return f"{member.name} sleeps, and is woken now."

    async def sleep(self, member: Member, level: int) -> None:
        async with self._turn:
            await member.sleep(level)
            self._look_after(member)

    def _look_after(self, member: Member) -> None:
        """Some may have come to it before it was known that it would sleep."""
        if member.engine is not None and member.engine.num_streams:
            used = member.used
            self.use(member)
            member.used = used
