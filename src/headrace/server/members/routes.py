"""The route table where there are several models: the same routes, each of one model, or of all.

A body that has a ``model`` says which one; other routes take it from the query (``?model=``), and reading ones take the
first where that is missing.

What lives here: choosing the model, and what all models answer together. What may not: what a route does for one model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import get_args
from urllib.parse import parse_qsl, urlencode

from headrace.errors import InvalidRequest, NotFound
from headrace.server import adapters
from headrace.server.app import ROUTES, model_card
from headrace.server.exchange import Exchange
from headrace.server.exposition import CONTENT_TYPE, Lines, add_process, model_label
from headrace.server.members.manager import ModelManager
from headrace.server.members.member import Condition, Member
from headrace.server.openapi import Handler, Route
from headrace.server.service import Service

Answer = Callable[["ModelRouter", Exchange], Awaitable[None]]


class ModelRouter:
    """Which model a request means. ``shared``: what is all models' own."""

    def __init__(self, manager: ModelManager, shared: Service) -> None:
        self.manager = manager
        self.shared = shared
        self.by_name = {name: member for member in manager.members for name in member.config.names}

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self.manager.members)

    async def by_body(self, exchange: Exchange) -> Member:
        name = await self.shared.limits.bodies.peek_model(exchange)
        if name is None and len(self.members) > 1:
            raise InvalidRequest(f"model is missing, and several are served: {self._known}.", param="model")
        return self.members[0] if name is None else await self.find(name)

    def by_query(self, exchange: Exchange) -> Member:
        """The query is left without it. Raises InvalidRequest, NotFound."""
        pairs = parse_qsl(exchange.query.decode("latin-1"), keep_blank_values=True)
        names = [value for key, value in pairs if key == "model"]
        exchange.query = urlencode([pair for pair in pairs if pair[0] != "model"]).encode()
        if len(names) > 1:
            raise InvalidRequest("model is given more than once; give it once.", param="model")
        if not names and exchange.method not in ("GET", "HEAD") and len(self.members) > 1:
            raise InvalidRequest(f"Say which model, as ?model=NAME: {self._known}.", param="model")
        if names and names[0] not in self.by_name:
            raise self._unknown(names[0])
        return self.by_name[names[0]] if names else self.members[0]

    async def find(self, name: str) -> Member:
        """The one that is called so, or has an adapter of that name. Raises NotFound."""
        if name in self.by_name:
            return self.by_name[name]
        for member in self.members:
            model = member.service.model
            if member.engine is not None and member.engine.alive:
                await model.learn(name)
                if model.adapter_of(name) is not None:
                    return member
        raise self._unknown(name)

    def _unknown(self, name: str) -> NotFound:
        return NotFound(
            f"The model {name[:100]!r} is not served here; use {self._known}.", param="model", code="model_not_found"
        )

    @property
    def _known(self) -> str:
        return ", ".join(list(self.by_name)[:20])


def routes_of(router: ModelRouter) -> tuple[Route, ...]:
    return tuple(replace(route, handler=_handler(router, route)) for route in ROUTES)


def _handler(router: ModelRouter, route: Route) -> Handler:
    common = COMMON.get((route.method, route.path))
    if common is not None:
        return lambda _, exchange: common(router, exchange)
    if route.path in SHARED:
        return route.handler
    by_body = route.body is not None and "model" in route.body.names()

    async def handle(_: Service, exchange: Exchange) -> None:
        member = await router.by_body(exchange) if by_body else router.by_query(exchange)
        member.check()
        await route.handler(member.service, exchange)

    return handle


# --- of all


async def load(router: ModelRouter, exchange: Exchange) -> None:
    await exchange.reply_json({"server_load": sum(each.service.limits.counters.live for each in router.members)})


async def list_models(router: ModelRouter, exchange: Exchange) -> None:
    cards = [model_card(each.service, name, each.condition) for each in router.members for name in each.config.names]
    for each in router.members:
        if each.engine is not None and each.engine.alive:
            cards += [model_card(each.service, name, each.condition) for name in await adapters.names(each.service)]
    await exchange.reply_json({"data": cards, "object": "list"})


async def show_model(router: ModelRouter, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    member = await router.find(name)
    await exchange.reply_json(model_card(member.service, name, member.condition))


async def metrics(router: ModelRouter, exchange: Exchange) -> None:
    page = Lines()
    for each in router.members:
        observed = each.service.observed
        engine = await observed.shared.engine_stats()
        observed.total().show(page, each.name, engine)
        page.add_steps(engine.get("steps"), model_label(each.name))
    router.shared.observed.total().show_answers(page)
    page.add("headrace_memory_budget_bytes", "gauge", "bytes that all models may hold together", router.manager.budget)
    for each in router.members:
        labels, now = model_label(each.name), each.condition
        states = [("", f'state="{state}"', int(state == now)) for state in get_args(Condition)]
        page.add("headrace_model_state", "gauge", "1 for the state that a model is in", states, labels)
        page.add("headrace_model_held_bytes", "gauge", "bytes of the budget that it holds", each.held, labels)
        page.add("headrace_model_need_bytes", "gauge", "bytes that it holds when it is awake", each.need, labels)
        page.add("headrace_model_wakes_total", "counter", "how often it was woken", each.wakes, labels)
    add_process(page)
    await exchange.reply(200, str(page).encode(), CONTENT_TYPE)


COMMON: Mapping[tuple[str, str], Answer] = {
    ("GET", "/load"): load,
    ("GET", "/metrics"): metrics,
    ("GET", "/v1/models"): list_models,
    ("GET", "/v1/models/{name}"): show_model,
}
SHARED = frozenset(  # routes that no model has a part in, or all models share what they show
    (
        "/", "/dashboard", "/web/{name}", "/version", "/openapi.json", "/health", "/ready", "/ping", "/v1/requests",
        "/v1/requests/{id}", "/v1/responses/{id}", "/v1/responses/{id}/input_items",
    )
)  # fmt: skip
