"""The ASGI application: every request passes the same gates in the same order, and ends in exactly one visible way.

What lives here: gates and the outermost error handling. What may not: what a route does, what is logged of it (access_log.py).

Gates: Host and Origin (a browser's preflight ends here), the matched route, the key, the method. No layers of
middleware: one coroutine, one exchange.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from headrace.errors import HeadraceError, NotFound, Unavailable
from headrace.server.access_log import AccessLog, Rate
from headrace.server.api import RouteTable
from headrace.server.auth import Guard
from headrace.server.exchange import Exchange, Receive, Send
from headrace.server.http_errors import ClientLeft, ClientTooSlow, HttpError, MethodNotAllowed
from headrace.server.route import Handler
from headrace.server.service import Service
from headrace.server.stream import fail_stream

log = logging.getLogger("headrace.server")


class App:
    """What uvicorn calls once a request."""

    def __init__(self, service: Service, guard: Guard, table: RouteTable) -> None:
        self._service = service
        self._guard = guard
        self._table = table
        self._access_log = AccessLog()
        self._failures = Rate("failures")

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self._dispatch(exchange)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if exchange.cause is None or task is None:
                raise
            task.uncancel()
            await self._end(exchange, exchange.cause)
        except HeadraceError as error:
            await self._end(exchange, error)
        except MemoryError:  # this request's alone: what it held is free again once it has ended
            log.error("%s %s: out of memory", exchange.method, exchange.route)
            await self._end(exchange, Unavailable("There is no memory for this request now; send less at once or try again.", retry_after=5))
        except Exception:
            if self._failures.allows():
                log.exception("%s %s failed", exchange.method, exchange.route)
            await self._end(exchange, HeadraceError("The server failed at this request; it is a defect of ours, please report it."))
        finally:
            exchange.close()
            self._service.bodies.release(exchange)
            self._record(exchange)

    async def _dispatch(self, exchange: Exchange) -> None:
        if exchange.scope["http_version"] == "1.1" and exchange.header(b"host") is None:
            raise HttpError("The request has no Host header; HTTP/1.1 needs one.", code="invalid_http")
        exchange.cors = self._guard.check_browser(exchange.headers)
        preflight = self._guard.preflight(exchange.method, exchange.headers)
        if preflight is not None:  # it carries no key
            await exchange.reply(200, b"", b"text/plain", preflight)
            return
        handler = self._gate(exchange)
        await handler(self._service, exchange)

    def _gate(self, exchange: Exchange) -> Handler:
        by_method = self._table.match(exchange.path)
        if by_method:
            exchange.errors = next(iter(by_method.values())).errors
        if not by_method or not all(route.open for route in by_method.values()):
            exchange.tenant = self._guard.check_key(exchange.headers)
            exchange.key_name = self._guard.key_names.get(exchange.tenant, "")
        if not by_method:
            raise NotFound(f"There is no route {exchange.path[:100]!r}; {self._table.hint(exchange.path)}", code="route_not_found")
        exchange.route = next(iter(by_method.values())).path
        method = "GET" if exchange.method == "HEAD" else exchange.method
        if method not in by_method:
            raise MethodNotAllowed(exchange.method, ", ".join([*by_method, *(["HEAD"] if "GET" in by_method else [])]))
        exchange.fields = by_method[method].body
        return by_method[method].handler

    async def _end(self, exchange: Exchange, error: HeadraceError) -> None:
        """The last thing a client sees of a request that failed."""
        exchange.error = error
        if isinstance(error, ClientLeft):
            exchange.status = exchange.status or error.status
            if isinstance(error, ClientTooSlow):
                exchange.cut()
        elif exchange.status is None:
            await exchange.reply_error(error)
        elif not exchange.finished:
            await fail_stream(exchange, error)
        if error.status == 500 and self._failures.allows():  # 503 is a state that was told when it began
            log.warning("%s %s: %s", exchange.method, exchange.route, error.message)

    def _record(self, exchange: Exchange) -> None:
        status = exchange.status or 500
        self._service.metrics.count_answer(exchange.route, status)
        self._service.metrics.count_seconds(exchange.route, time.perf_counter() - exchange.arrival)
        self._access_log.record(exchange, status)
