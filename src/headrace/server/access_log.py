"""One line a request: figures, never anything of its body; a flood of requests that cost their sender nothing becomes a count.

What lives here: what is logged, how loud and how often. What may not: forms (logs.py).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.request import RequestTimes
from headrace.server.exchange import Exchange
from headrace.server.exposition import PROBES
from headrace.server.fields import NAMES

LINES_A_SECOND = 20  # of one kind, that clients can cause at will

log = logging.getLogger("headrace.access")


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
                log.info("… and %d more %s", self._seen - LINES_A_SECOND, self._kind)
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
        if log.isEnabledFor(level):
            log.log(level, "request", extra={"facts": _facts(exchange, status)})


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
    return {"error": error.code or error.type, **({"param": field} if field in NAMES else {})}


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
