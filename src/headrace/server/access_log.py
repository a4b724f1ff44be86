"""One line a request, without anything a client wrote; a flood of refused requests becomes a count.

What lives here: what is logged, how loud and how often. What may not: handlers and formats (run.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace.server.exchange import Exchange

REFUSALS_A_SECOND = 20  # that get a line of their own

log = logging.getLogger("headrace.access")

_PROBES = frozenset(("/health", "/ready", "/metrics"))


class AccessLog:
    """``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = clock()
        self._refused = 0  # since then

    def record(self, exchange: Exchange, status: int) -> None:
        """Probes, whatever their answer, are for debugging only: they come by the second and their reason is told elsewhere."""
        if exchange.route in _PROBES:
            self._write(logging.DEBUG, exchange, status)
        elif status < 400 or self._may_tell():
            self._write(logging.INFO, exchange, status)

    def _may_tell(self) -> bool:
        now = self._clock()
        if now - self._second >= 1.0:
            if self._refused > REFUSALS_A_SECOND:
                log.info("… and %d more requests that were refused", self._refused - REFUSALS_A_SECOND)
            self._second, self._refused = now, 0
        self._refused += 1
        return self._refused <= REFUSALS_A_SECOND

    def _write(self, level: int, exchange: Exchange, status: int) -> None:
        milliseconds = (time.perf_counter() - exchange.arrival) * 1000
        tokens = f"  {exchange.prompt_tokens}+{exchange.completion_tokens} tokens" if exchange.prompt_tokens else ""
        method = exchange.method if exchange.route != "-" else "-"
        log.log(level, "%s %s %d %.0f ms%s", method, exchange.route, status, milliseconds, tokens)
