"""One of several models: what it is called, its service, what it holds.

What lives here: one model's state. What may not: whose turn it is (manager.py), HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import HeadraceError, Unavailable
from headrace.server.members.budget import Holding, held_asleep, held_awake, size
from headrace.server.service import Service, State

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM

Condition = Literal["loading", "awake", "falling asleep", "asleep", "waking", "failed"]


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
