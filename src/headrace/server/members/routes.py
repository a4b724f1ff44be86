"""The route table where there are several models: the same routes, each of one model, or of all.

A body that has a ``model`` says which one; other routes take it from the query (``?model=``), and reading ones take the
first where that is missing.

What lives here: choosing the model, and what all models answer together. What may not: what a route does for one model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args
from urllib.parse import parse_qsl, urlencode

from headrace.errors import InvalidRequest, Unavailable
from headrace.server.app import ROUTES
from headrace.server.exchange import Exchange
from headrace.server.exposition import Lines, model_label
from headrace.server.members.manager import Condition, Member, ModelManager
from headrace.server.openapi import Handler, Route
from headrace.server.service import Service, unknown_model


class SharedService(Service):
    """Stands before several models, each with a service of its own, and knows which one a request means.
    ``manager``: once there are models."""

    manager: ModelManager

    @property
    def members(self) -> Sequence[Member]:
        return self.manager.members

    @property
    def services(self) -> Sequence[Service]:
        return [each.service for each in self.members]

    @property
    def by_name(self) -> Mapping[str, Member]:
        return {name: member for member in self.members for name in member.config.names}

    def check_alive(self) -> None:
        """A model that died is started again, and says so by itself."""

    def check_ready(self) -> None:
        self.model.check_open()
        if coming := [each.name for each in self.members if not each.settled]:
            raise Unavailable(f"{', '.join(coming[:20])} still to load; wait for /ready.", retry_after=2)

    async def others(self, what: str, *about: Any) -> list[Any]:
        """What the models know."""
        found = [await each.known(what, *about) for each in self.services]
        return [each for each in found if each is not None]

    def show_budget(self, page: Lines) -> None:
        budget = self.manager.budget
        page.add("headrace_memory_budget_bytes", "gauge", "bytes that all models may hold together", budget)
        for each in self.members:
            labels, now = model_label(each.name), each.condition
            states = [("", f'state="{state}"', int(state == now)) for state in get_args(Condition)]
            page.add("headrace_model_state", "gauge", "1 for the state that a model is in", states, labels)
            page.add("headrace_model_held_bytes", "gauge", "bytes of the budget that it holds", each.held, labels)
            page.add("headrace_model_need_bytes", "gauge", "bytes that it holds when it is awake", each.need, labels)
            page.add("headrace_model_wakes_total", "counter", "how often it was woken", each.wakes, labels)

    async def by_body(self, exchange: Exchange) -> Member:
        name = await self.limits.bodies.peek_model(exchange)
        if name is None and len(self.members) > 1:
            raise InvalidRequest(f"model is missing, and several are served: {self._known}.", param="model")
        return self.members[0] if name is None else await self.find_member(name)

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
            raise unknown_model(names[0], [*self.by_name])
        return self.by_name[names[0]] if names else self.members[0]

    async def find(self, name: str) -> Service:
        return (await self.find_member(name)).service

    async def find_member(self, name: str) -> Member:
        """The one that is called so, or has an adapter of that name. Raises NotFound."""
        if name in self.by_name:
            return self.by_name[name]
        for member in self.members:
            model = member.service.model
            if member.engine is not None and member.engine.alive:
                await model.learn(name)
                if model.adapter_of(name) is not None:
                    return member
        adapters = [each for one in self.members if one.engine is not None for each in one.engine.adapter_names]
        raise unknown_model(name, [*self.by_name, *adapters])

    @property
    def _known(self) -> str:
        return ", ".join(list(self.by_name)[:20])


def routes_of(shared: SharedService) -> tuple[Route, ...]:
    return tuple(replace(route, handler=_handler(shared, route)) for route in ROUTES)


def _handler(shared: SharedService, route: Route) -> Handler:
    if route.path in SHARED:
        return route.handler
    by_body = route.body is not None and "model" in route.body.names()

    async def handle(_: Service, exchange: Exchange) -> None:
        member = await shared.by_body(exchange) if by_body else shared.by_query(exchange)
        member.check()
        await route.handler(member.service, exchange)

    return handle


SHARED = frozenset(  # routes that no model has a part in, or that speak of all
    (
        "/", "/dashboard", "/web/{name}", "/version", "/openapi.json", "/health", "/ready", "/ping", "/load", "/metrics",
        "/v1/models", "/v1/models/{name}", "/v1/requests", "/v1/requests/{id}", "/v1/responses/{id}",
    )
)  # fmt: skip
