"""How many connections a server holds, and who makes room when there are too many.

What lives here: counting and choosing. What may not: sockets and HTTP (connection.py).

A connection that waits (for a request, or for the rest of one) costs its client nothing, so it is the first to go, the longest
waiting before the others; one whose request is being answered stays. Thousands of idle or slow clients cannot lock anybody out.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Protocol

from headrace.server.ledger import Page

MAX_CONNECTIONS = 4096
_OTHER_FILES = 128  # descriptors for what is no client, for a turn's new connections, and for those that give way to them
_FEWEST = 16
_TURNED_AWAY = 16  # of those who found no room, that may stay until they have read it


class Member(Protocol):
    """A connection, as seen from here."""

    def evict(self) -> None:
        """Close at once."""


class Crowd:
    """The connections of one front end."""

    def __init__(self, limit: int, page: Page | None = None) -> None:
        """``page``: where the number is to be read by others."""
        self.limit = limit
        self._page = page or Page()
        self._members: set[Member] = set()
        self._waiting: dict[Member, None] = {}  # in the order in which they began to wait
        self._turned_away: set[Member] = set()

    def __len__(self) -> int:
        return len(self._members)

    def enter(self, member: Member) -> bool:
        """Takes a connection in, at the cost of another if need be; False when all are at work."""
        if len(self._members) >= self.limit and not self._make_room():
            return False
        self._members.add(member)
        self._waiting[member] = None
        self._page.connections = len(self._members)
        return True

    def _make_room(self) -> bool:
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        self.leave(longest)
        longest.evict()
        return True

    def wait(self, member: Member) -> None:
        """Its request has been answered; the next one may take its time."""
        if member in self._members:
            self._waiting.pop(member, None)
            self._waiting[member] = None

    def work(self, member: Member) -> None:
        """It has sent a whole request."""
        self._waiting.pop(member, None)

    def may_linger(self, member: Member) -> bool:
        """It has its answer and is still sending: it is the next to go, or one of few that never were in."""
        if member not in self._members and len(self._turned_away) < _TURNED_AWAY:
            self._turned_away.add(member)
        self.wait(member)
        return member in self._members or member in self._turned_away

    def leave(self, member: Member) -> None:
        self._members.discard(member)
        self._turned_away.discard(member)
        self._waiting.pop(member, None)
        self._page.connections = len(self._members)


def connection_limit(max_queue: int) -> int:
    """As many as the queue can use and then as many again, within what the system lets this process open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(MAX_CONNECTIONS, 2 * max_queue)
    if soft != resource.RLIM_INFINITY and soft < wanted + _OTHER_FILES:
        raised = wanted + _OTHER_FILES if hard == resource.RLIM_INFINITY else min(wanted + _OTHER_FILES, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        wanted = min(wanted, soft - _OTHER_FILES)
    return max(wanted, _FEWEST)
