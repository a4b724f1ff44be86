"""Whose turn it is: models load, wake and sleep one after another, within the budget.

A request to a model that sleeps is submitted all the same; its engine holds it and says so. The model is woken in its
turn (first come, first served); if there is no room, others are put to sleep before: idle ones first, the one used
longest ago first of these. One that is not idle finishes what it has, and what comes meanwhile waits for its next turn.

What lives here: who has to sleep so that another fits, as arithmetic; one model's state (what it is called, its service,
what it holds); that order. What may not: HTTP, processes' lives (life.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.resolve import estimated_bytes
from headrace.errors import EngineDead, HeadraceError, OutOfMemory, Unavailable
from headrace.server.service import Service, State

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM

log = logging.getLogger("headrace.server")

GIB = 2**30
Condition = Literal["loading", "awake", "falling asleep", "asleep", "waking", "failed"]


@dataclass(frozen=True, slots=True)
class Holding:
    """What a model holds of the budget in bytes, now and were it asleep; ``used``: when last, on any clock."""

    name: str
    held: int
    asleep: int
    idle: bool
    used: float

    @property
    def gain(self) -> int:
        return self.held - self.asleep


def to_sleep(needed: int, budget: int, others: Sequence[Holding]) -> list[str] | None:
    """Models that have to sleep so that ``needed`` bytes are free: the idle ones first, of these the one that was used
    longest ago; none whose memory is not needed. None where all of them together do not give so much."""
    free, chosen = budget - sum(each.held for each in others), list[Holding]()
    for each in sorted(others, key=lambda each: (not each.idle, each.used)):
        if free < needed and each.gain > 0:
            chosen.append(each)
            free += each.gain
    if free < needed:
        return None
    for each in sorted(chosen, key=lambda each: (each.idle, -each.used)):
        if free - each.gain >= needed:
            chosen.remove(each)
            free -= each.gain
    return [each.name for each in chosen]


def held_asleep(memory: Mapping[str, int], level: int, *, on_cpu: bool) -> int:
    """Of an engine's memory by purpose (ExecutorInfo.memory), what it holds while it sleeps."""
    if level > 1:
        return sum(memory.get(name, 0) for name in ("process", "kernels", "context"))
    given_up = ("kv_cache",) if on_cpu else ("kv_cache", "weights", "wide_copy")
    return held_awake(memory) - sum(memory.get(name, 0) for name in given_up)


def held_awake(memory: Mapping[str, int]) -> int:
    return sum(size for name, size in memory.items() if name != "in use before")


def size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"


# --- one model


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """``server``: the server's, with what is this model's own."""

    name: str
    engine: EngineConfig
    server: ServerConfig

    @property
    def names(self) -> tuple[str, ...]:
        return self.engine.model.served_model_name


class Member:
    """``level``: at which it sleeps, and None picks it by device."""

    def __init__(self, config: MemberConfig, service: Service, level: int | None = None) -> None:
        self.config = config
        self.service = service
        self.held = 0  # bytes of the budget
        self.estimate = 0  # bytes that it will hold, before it has loaded
        self.used = 0.0
        self.wakes = 0
        self.settled = False  # its first start has ended, well or not
        self.failure: HeadraceError | None = None
        self._level = level
        self._going: Condition | None = None
        service.condition = lambda: self.condition

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def engine(self) -> AsyncLLM | None:
        return self.service.model.found

    @property
    def on_cpu(self) -> bool:
        return self.engine is None or not self.engine.info.device or self.engine.info.device.startswith(("cpu", "none"))

    @property
    def level(self) -> int:
        """On a CPU weights are in host memory anyway: only level 2 gives them up."""
        return self._level or (2 if self.on_cpu else 1)

    @property
    def need(self) -> int:
        """Bytes when it is awake."""
        return self.estimate if self.engine is None else held_awake(self.engine.info.memory)

    @property
    def purposes(self) -> str:
        """What most of it is for."""
        memory = {} if self.engine is None else self.engine.info.memory
        largest = sorted(memory.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{name} {size(count)}" for name, count in largest) or "before it has loaded, an estimate"

    @property
    def asleep_bytes(self) -> int:
        return 0 if self.engine is None else held_asleep(self.engine.info.memory, self.level, on_cpu=self.on_cpu)

    def holding(self) -> Holding:
        idle = self.engine is None or not self.engine.num_streams
        stays = self.held if self.engine is None else min(self.held, self.asleep_bytes)  # what loads cannot sleep yet
        return Holding(self.name, self.held, stays, idle, self.used)

    @property
    def condition(self) -> Condition:
        if self.engine is None:
            return "failed" if self.failure is not None else "loading"
        return self._going or ("asleep" if self.engine.asleep else "awake")

    @property
    def summary(self) -> str:
        if self.engine is None:
            return f"not served: {self.failure.message}" if self.failure is not None else "loading"
        info = self.engine.info
        kind = f"{info.dtype} on {info.device}, up to {info.max_sequence_tokens:,} tokens a sequence"
        return f"{kind}; holds {size(self.need)} awake, {size(self.asleep_bytes)} asleep; {self.condition}"

    def check(self) -> None:
        """Raises Unavailable, with the reason, for one that could not start."""
        if self.failure is not None and self.engine is None:
            raise Unavailable(f"The model {self.name!r} is not there: {self.failure.message}", retry_after=30)

    # --- changes: one at a time, of all members

    async def wake(self) -> None:
        """Raises Unavailable where the memory is not there; it sleeps on."""
        assert self.engine is not None
        self._going, self.held = "waking", self.need
        try:
            await self.engine.wake_up()
            self.wakes += 1
        except HeadraceError:
            self.held = self.asleep_bytes
            raise
        finally:
            self._going = None

    async def sleep(self, level: int | None = None) -> None:
        """Once those that run have ended."""
        assert self.engine is not None
        self._going = "falling asleep"
        try:
            await self.engine.sleep(level or self.level)
            self.held = self.asleep_bytes
        finally:
            self._going = None

    def attach(self, engine: AsyncLLM) -> None:
        """It has loaded."""
        self.service.attach(engine)
        self.failure, self.held = None, self.need

    def lose(self, failure: HeadraceError | None = None) -> None:
        """Its engine is gone, or never came."""
        self.service.model.found, self.service.model.state = None, State.LOADING
        self.failure, self.held = failure, 0


# --- all of them


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
