"""One row of the route table.

What lives here: the type. What may not: the table (app.py), handlers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from msgspec import Struct

from headrace.server.dialects.body import Body
from headrace.server.exchange import Exchange
from headrace.server.service import Service
from headrace.server.wire import ErrorShape

Handler = Callable[[Service, Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One route. ``path`` may end in ``{name}``, which takes the rest.

    ``open``: needs no key. ``body``: what a request holds. ``answer``: what a success says, in one of
    ``content_types``; None: it never succeeds. ``errors``: how they read. ``query``: what a query may hold.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    open: bool = False
    body: type[Body] | None = None
    answer: type | None = dict
    content_types: tuple[str, ...] = ("application/json",)
    errors: ErrorShape = field(default_factory=ErrorShape)
    query: type[Struct] | None = None
