"""``--supervise``: a parent that starts the server again when it has died, and nothing else.

What lives here: one fork a life, signals passed on, the wait between lives, giving up. What may not: the server, the engine,
threads (a fork copies one only).

The listening socket is the parent's: between two lives the port stays ours, and clients that connect wait for the next life.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import ConfigError, ModelError
from headrace.process_tree import adopt_orphans, end_children, end_with_parent
from headrace.server.ledger import Ledger, Watch

FIRST_WAIT, LONGEST_WAIT = 0.25, 2.0  # seconds before a restart; it doubles while lives are short
SHORT_LIFE = 60.0  # seconds
FAILED_STARTS = 5  # in a row, none of which became ready: the next would not either
LOOK_SECONDS, HANG_LOOKS = 1.0, 20  # at a server's stamp; so many without a change are a hang
LEFTOVER_SECONDS = 5.0  # for the dead server's engine to be gone
USAGE = 2  # the exit status for settings that cannot be honoured: a restart changes none of them

_READY, _HOPELESS = b"1", b"0"  # what a life tells its parent
_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP}

log = logging.getLogger("headrace.supervisor")

Ready = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Life:
    """One server, from its fork to its end. ``status`` is negative for a signal."""

    status: int
    was_ready: bool
    was_hopeless: bool  # what it was to serve cannot be served
    seconds: float

    def __str__(self) -> str:
        how = f"exit status {self.status}" if self.status >= 0 else f"signal {-self.status} ({signal.Signals(-self.status).name})"
        return f"{how} after {self.seconds:.1f} s, {'having been ready' if self.was_ready else 'before it was ready'}"


class Supervisor:
    """``start(ready)`` is a whole server: it calls ``ready`` once and returns an exit status. ``page``: where its event loop leaves its stamp."""

    def __init__(self, start: Callable[[Ready], int]) -> None:
        if not hasattr(signal, "sigtimedwait"):
            raise ConfigError("--supervise needs Linux; leave it out and let the system's own service manager restart the server.")
        self._start = start
        self.page = Ledger.create(1).pages[0]
        self._stopping = False
        self._ever_ready = False
        self._short_lives = self._failed_starts = 0

    def run(self) -> int:
        """The exit status of the last life; in each child process, that of its own."""
        me = os.getpid()
        adopt_orphans()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            while True:
                began, (told, tell) = time.monotonic(), os.pipe()
                server = os.fork()
                if server == 0:
                    os.close(told)
                    return self._live(me, before, tell)
                os.close(tell)
                status = self._watch(server)
                word = os.read(told, 1)
                life = Life(status, word == _READY, word == _HOPELESS, time.monotonic() - began)
                os.close(told)
                if not end_children(LEFTOVER_SECONDS):
                    log.error("Processes of the dead server cannot be ended; their memory may be missing.")
                if self._is_last(life):
                    return _exit_status(life.status)
                if not self._wait(life):
                    return 0
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _live(self, parent: int, signals: set[int | signal.Signals], tell: int) -> int:
        """The child: a group of its own, so that a Ctrl-C in the terminal comes once, from the parent."""
        os.setpgid(0, 0)
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)

        def ready() -> None:
            os.write(tell, _READY)

        try:
            return self._start(ready)
        except (ConfigError, ModelError):
            os.write(tell, _HOPELESS)
            raise

    def _watch(self, server: int) -> int:
        """Until the server has ended; signals are passed on to it. One whose event loop does not turn has ended, too."""
        watch = Watch(self.page, HANG_LOOKS)
        while True:
            came = signal.sigtimedwait(_WATCHED, LOOK_SECONDS)
            if came is None:
                if not self._stopping and watch.hung():
                    log.error("The server hangs: its event loop has not turned for %g s. It is ended.", HANG_LOOKS * LOOK_SECONDS)
                    os.kill(server, signal.SIGKILL)
            elif came.si_signo != signal.SIGCHLD:
                self._stopping = True
                os.kill(server, came.si_signo)
            elif (status := _reaped(server)) is not None:
                return status

    def _is_last(self, life: Life) -> bool:
        """Ended as it was told to, or hopeless."""
        self._ever_ready = self._ever_ready or life.was_ready
        if self._stopping or life.status in (0, USAGE) or (life.was_hopeless and not self._ever_ready):
            return True
        self._failed_starts = 0 if life.was_ready else self._failed_starts + 1
        if self._failed_starts < FAILED_STARTS:
            return False
        log.error("Giving up: %d starts in a row failed, the last with %s; its own words are above.", FAILED_STARTS, life)
        return True

    def _wait(self, life: Life) -> bool:
        """False when a signal came instead of the next life."""
        self._short_lives = self._short_lives + 1 if life.seconds < SHORT_LIFE else 1
        seconds = min(FIRST_WAIT * 2 ** (self._short_lives - 1), LONGEST_WAIT)
        log.error("The server ended with %s; it starts again in %g s.", life, seconds)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            came = signal.sigtimedwait(_WATCHED, left)
            if came is not None and came.si_signo != signal.SIGCHLD:
                return False
        return True


def _reaped(server: int) -> int | None:
    """Collects whoever has ended; the server's exit code if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == server:
            found = os.waitstatus_to_exitcode(status)


def _exit_status(status: int) -> int:
    """As a shell says it; a server that a passed-on signal ended before it listened has ended well."""
    if status >= 0:
        return status
    return 0 if -status in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) else 128 - status
