"""What all front ends of one engine have in common and one alone cannot tell: the engine's newest numbers, the dashboard, requests.

What lives here: the questions, and their answers where there is one front end. What may not: asking others (together.py), HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import EngineDead
from headrace.server.dashboard import History
from headrace.server.exposition import ServerMetrics

STATS_SECONDS = 1.0  # that a reader of /metrics waits for an engine in a long step

Shown = Mapping[str, Any]  # a request, as its client is shown it


class Asked(Protocol):
    """An engine, as far as its numbers go."""

    @property
    def alive(self) -> bool: ...

    async def stats(self) -> Mapping[str, Any]: ...

    async def recent(self, step: int, decision: int) -> Mapping[str, Any]: ...


class Commons(Protocol):
    """Answered alike by every front end."""

    async def run(self) -> None:
        """For as long as the server runs."""

    async def engine_stats(self) -> Mapping[str, Any]:
        """The engine's numbers; the last known ones while it is loading, gone, or in a step that takes long."""

    async def dashboard(self, sample: int, step: int, decision: int) -> Mapping[str, Any]:
        """What is newer than these."""

    async def find_request(self, name: str, tenant: str) -> Shown | None:
        """Another front end's."""

    async def list_requests(self, tenant: str) -> Sequence[Shown]:
        """The other front ends'."""

    async def find_response(self, name: str, tenant: str) -> tuple[bytes, bytes] | None:
        """Another front end's: items and response."""

    async def delete_response(self, name: str, tenant: str) -> bool:
        """Another front end's, if there is one."""


class Newest:
    """Asks the engine for its numbers, and remembers them."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}

    async def ask(self, engine: Asked | None) -> Mapping[str, Any]:
        if engine is not None and engine.alive:
            with contextlib.suppress(TimeoutError, EngineDead):
                self._last = await asyncio.wait_for(engine.stats(), STATS_SECONDS)
        return self._last


class Alone:
    """There is one front end."""

    def __init__(self, find_engine: Callable[[], Asked | None], metrics: Callable[[], ServerMetrics]) -> None:
        self._find_engine = find_engine
        self._metrics = metrics
        self._newest = Newest()
        self._history = History()

    async def run(self) -> None:
        await self._history.run(self._find_engine, self._metrics)

    async def engine_stats(self) -> Mapping[str, Any]:
        return await self._newest.ask(self._find_engine())

    async def dashboard(self, sample: int, step: int, decision: int) -> Mapping[str, Any]:
        return self._history.after(sample, step, decision)

    async def find_request(self, name: str, tenant: str) -> Shown | None:
        return None

    async def list_requests(self, tenant: str) -> Sequence[Shown]:
        return ()

    async def find_response(self, name: str, tenant: str) -> tuple[bytes, bytes] | None:
        return None

    async def delete_response(self, name: str, tenant: str) -> bool:
        return False
