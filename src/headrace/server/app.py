"""The application: every request passes the same gates in the same order, ends in exactly one visible way, and leaves one line in the log:
figures, never anything of its body; a flood of requests that cost their sender nothing becomes a count.

What lives here: gates, the outermost error handling, the access log. What may not: what a route does, forms of lines (observe/logs.py).

Gates: Host and Origin (a browser's preflight ends here), the matched route, the key, the method. No layers of
middleware: one coroutine, one exchange.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError, NotFound, Unavailable
from headrace.request import RequestTimes
from headrace.server.api import ROUTES
from headrace.server.auth import Guard
from headrace.server.exchange import Exchange, fail_stream
from headrace.server.exposition import PROBES
from headrace.server.http_errors import ClientLeft, ClientTooSlow, HttpError, MethodNotAllowed
from headrace.server.route import Handler, Route
from headrace.server.service import Service

_FIELDS = frozenset(name for route in ROUTES if route.body for name in route.body.names())
_VERSION = "/v1"
LINES_A_SECOND = 20  # of one kind, that clients can cause at will

access_log = logging.getLogger("headrace.access")
log = logging.getLogger("headrace.server")


class Rate:
    """How many lines of one kind are written. ``clock`` gives seconds."""

    def __init__(self, kind: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._kind = kind
        self._clock = clock
        self._second = clock()
        self._seen = 0  # since then

    def allows(self) -> bool:
        """Tells how many it has held back, once that second is over."""
        now = self._clock()
        if now - self._second >= 1.0:
            if self._seen > LINES_A_SECOND:
                access_log.info("… and %d more %s", self._seen - LINES_A_SECOND, self._kind)
            self._second, self._seen = now, 0
        self._seen += 1
        return self._seen <= LINES_A_SECOND


class AccessLog:
    """What was generated has a line of its own, always: a place in the queue was needed for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._others = Rate("requests without a generation", clock)

    def record(self, exchange: Exchange, status: int) -> None:
        """Probes, whatever their answer, are for debugging only: they come by the second and their reason is told elsewhere."""
        if exchange.route in PROBES:
            self._write(logging.DEBUG, exchange, status)
        elif exchange.prompt_tokens or self._others.allows():
            self._write(logging.INFO, exchange, status)

    def _write(self, level: int, exchange: Exchange, status: int) -> None:
        if access_log.isEnabledFor(level):
            access_log.log(level, "request", extra={"facts": _facts(exchange, status)})


def _facts(exchange: Exchange, status: int) -> dict[str, Any]:
    """Figures, and names of ours. ``id`` is the client's own only where that is harmless to repeat."""
    facts: dict[str, Any] = {"method": exchange.method if exchange.route != "-" else "-", "route": exchange.route, "status": status}
    facts |= {"seconds": round(time.perf_counter() - exchange.arrival, 6), "id": exchange.request_id}
    facts |= _reason(exchange.error)
    if exchange.prompt_tokens:
        facts |= {"tokens_in": exchange.prompt_tokens, "tokens_out": exchange.completion_tokens, "cached": exchange.cached_tokens}
        facts |= {"finish_reason": exchange.finish_reason or "none", **_phases(exchange.times)}
    return facts


def _reason(error: HeadraceError | None) -> dict[str, str]:
    """Why a request was refused: a code of ours, and the field. Of what a client called a field only names that we know are repeated."""
    if error is None:
        return {}
    field = re.split(r"[.\[]", error.param or "")[0]
    return {"error": error.code or error.type, **({"param": field} if field in _FIELDS else {})}


def _phases(times: RequestTimes | None) -> dict[str, float]:
    """Seconds in the queue, in the prompt's computing, and in the answer's."""
    if times is None or times.first_scheduled is None:
        return {}
    phases = {"queue": times.first_scheduled - times.arrival}
    if times.first_token is not None:
        phases["prefill"] = times.first_token - times.first_scheduled
        if times.finished is not None:
            phases["decode"] = times.finished - times.first_token
    return {name: round(seconds, 6) for name, seconds in phases.items()}




class RouteTable:
    """Exact paths first, then those with a ``{name}`` and something behind it, then those that end in one."""

    def __init__(self, routes: tuple[Route, ...] = ROUTES) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._named: dict[tuple[str, str], dict[str, Route]] = {}
        for route in sorted(routes, key=lambda route: -len(route.path.partition("}")[2])):
            prefix, brace, rest = route.path.partition("{")
            by_method = self._named.setdefault((prefix, rest.partition("}")[2]), {}) if brace else self._exact.setdefault(prefix, {})
            by_method[route.method] = route

    def match(self, path: str) -> dict[str, Route]:
        """Routes by method; empty where there is no such path."""
        found = self._exact.get(path)
        if found is not None:
            return found
        for (prefix, suffix), by_method in self._named.items():
            if path.startswith(prefix) and path.endswith(suffix) and len(path) > len(prefix) + len(suffix):
                return by_method
        return {}

    def hint(self, path: str) -> str:
        """What a client's base URL should be, where that is all that is wrong with a path; else where the routes are listed."""
        if path.startswith(_VERSION * 2) and self.match(path.removeprefix(_VERSION)):
            return f"the client adds {_VERSION} itself, so set its base URL without it."
        if self.match(_VERSION + path):
            return f"it is {_VERSION}{path} here, so let the client's base URL end in {_VERSION} (http://HOST:PORT{_VERSION})."
        return "see the list in the documentation."


class App:
    """``answer`` is called once a request."""

    def __init__(self, service: Service, guard: Guard) -> None:
        self._service = service
        self._guard = guard
        self._table = RouteTable()
        self._access_log = AccessLog()
        self._failures = Rate("failures")

    async def answer(self, exchange: Exchange) -> None:
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
            self._service.limits.bodies.release(exchange)
            self._record(exchange)

    async def _dispatch(self, exchange: Exchange) -> None:
        if exchange.http_version == "1.1" and exchange.header(b"host") is None:
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
        exchange.body = by_method[method].body
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
        self._service.observed.metrics.count_answer(exchange.route, status)
        self._service.observed.metrics.count_seconds(exchange.route, time.perf_counter() - exchange.arrival)
        self._access_log.record(exchange, status)
