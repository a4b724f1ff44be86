"""Taking connections off the listening socket, which all front ends share; TLS, where it is spoken.

One that holds more connections than another leaves it the next for a moment; who is slow, stopped or gone is not waited for.

What lives here: accepting, and whose turn it is. What may not: HTTP (connection.py), how many there may be.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

from headrace.server.frontends.counters import Page

AT_ONCE = 64  # that one front end alone takes in one turn of its loop
LEAVE_SECONDS = 0.001  # then it takes one;
PATIENCE = 16  # after so many in a row it takes twice as many each time: another that waits for a core still gets its share
HANDSHAKE_SECONDS = 10.0  # that a client has for TLS
MAX_HANDSHAKES = 256  # under way; the oldest gives way to the next, so that clients who never finish keep nobody out
SHUTDOWN_SECONDS = 2.0  # for its last word in TLS
FULL_SECONDS = 0.1  # without descriptors or memory: until some are free again
_FULL = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

log = logging.getLogger("headrace.server")


class Acceptor:
    """``create`` makes a protocol for each connection; ``page`` is ours, ``pages`` are everybody's; ``tls``: None is plain."""

    def __init__(
        self,
        sock: socket.socket,
        create: Callable[[], asyncio.Protocol],
        page: Page,
        pages: Sequence[Page],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sock = sock
        self._create = create
        self._tls = tls
        self._page = page
        self._others = [each for each in pages if each is not page]
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._left = 0  # times in a row that it has left the others the chance
        self._tasks: dict[asyncio.Task[None], None] = {}  # connections that are not made yet, oldest first

    def start(self) -> None:
        self._page.up = True
        self._loop.add_reader(self._sock.fileno(), self._ready)

    def close(self) -> None:
        self._page.up = False
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())

    def _ready(self) -> None:
        if not self._others:
            self._take(AT_ONCE)
        elif self._has_more():
            self._left += 1
            self._rest(LEAVE_SECONDS, 1 << min(max(self._left - PATIENCE, 0), AT_ONCE.bit_length()))
        else:
            self._left = 0
            self._take(1)

    def _has_more(self) -> bool:
        """By more than an eighth: few connections are dealt out evenly, among many a few do not matter."""
        fewest = min((each.connections for each in self._others if each.up), default=self._page.connections)
        return self._page.connections > fewest + fewest // 8

    def _rest(self, seconds: float, then: int) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._pause = self._loop.call_later(seconds, self._resume, then)

    def _resume(self, count: int) -> None:
        self._pause = None
        if self._take(count):
            self._loop.add_reader(self._sock.fileno(), self._ready)

    def _take(self, count: int) -> bool:
        """False where there is no room for a connection: it waits in the kernel."""
        under_way = 0 if self._tls else len(self._tasks)  # those hold descriptors, too, and nobody has given way to them yet
        for _ in range(min(count, AT_ONCE - under_way)):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return True
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                log.error("No connection can be accepted: %s; trying again in %g s.", error.strerror, FULL_SECONDS)
                self._rest(FULL_SECONDS, 1)
                return False
            task = self._loop.create_task(self._serve(sock))
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))
            if self._tls is not None and len(self._tasks) > MAX_HANDSHAKES:
                oldest = next(iter(self._tasks))
                del self._tasks[oldest]
                oldest.cancel()
        return True

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._create, sock)
            else:
                await self._loop.connect_accepted_socket(
                    self._create, sock, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS, ssl_shutdown_timeout=SHUTDOWN_SECONDS
                )
        except OSError:  # it is gone again, speaks no TLS, shows no certificate, or takes too long
            sock.close()
