"""Sleep over HTTP: the routes, under the names that vLLM's users know, and what a request does to a model that sleeps.

What lives here: who may, and when. What may not: what sleeping is (the engine's), several models (models/).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from headrace.config import ServerConfig
from headrace.engine.info import check_sleep
from headrace.errors import HeadraceError, Unavailable
from headrace.server.dialects.body import read_query
from headrace.server.exchange import Exchange
from headrace.server.http_errors import Forbidden
from headrace.server.limits import sees_all

if TYPE_CHECKING:
    from headrace.engine.client import AsyncLLM
    from headrace.server.service import Service

log = logging.getLogger("headrace.server")


class SleepQuery(Struct, forbid_unknown_fields=True):
    """``mode``: running requests are waited for, or end with an error."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1
    mode: Literal["wait", "abort"] = "wait"


async def sleep(service: Service, exchange: Exchange) -> None:
    query, engine = read_query(exchange.query, SleepQuery), service.model.engine
    check_operator(service.config, exchange)
    check_sleep(engine.info, query.level)
    if query.mode == "abort":
        end_running(service)
    await engine.sleep(query.level)
    if engine.num_streams:  # some came before it was known that it would sleep
        engine.used()
    await exchange.reply_json({"status": "ok"})


def end_running(service: Service) -> None:
    told = "The model was put to sleep before this answer was complete; send the request again."
    service.limits.end_all(Unavailable(told))


async def wake_up(service: Service, exchange: Exchange) -> None:
    check_operator(service.config, exchange)
    check_sleep(service.model.engine.info)
    await service.model.engine.wake_up()
    await exchange.reply_json({"status": "ok"})


async def is_sleeping(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json({"is_sleeping": service.model.any_engine().asleep})


def check_operator(config: ServerConfig, exchange: Exchange) -> None:
    if not sees_all(config, exchange.key_name):
        raise Forbidden("This is for operators; ask with a key that --operator-key names.", code="operators_only")


class Rouser:
    """Called with each request that is submitted. One that comes to a model that sleeps waits in its engine, unless
    ``when_asleep`` says otherwise."""

    def __init__(self, engine: AsyncLLM, when_asleep: str) -> None:
        self._engine, self._when = engine, when_asleep
        self._waking: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        if not self._engine.asleep or self._when == "wait":
            return
        if self._when == "refuse":
            raise Unavailable("The model sleeps; wake it with POST /wake_up, or try again later.", retry_after=10)
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        try:
            await self._engine.wake_up()
        except HeadraceError as error:
            log.error("The model could not be woken: %s", error.message)
