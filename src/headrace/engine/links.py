"""The engine's end of its sockets: one to the process that started it, one to each further front end that process has named.

What lives here: bytes in and out, whom a step's outputs go to, readers that fall behind, stop or leave. What may not: the frames'
schema (frames.py), what a command does (loop.py).

Readers that are behind are waited for, so an engine faster than its readers keeps their pace. One that takes nothing for
STALLED_SECONDS is waited for only where there is no other: the others' streams go on, and what it misses is kept, up to MAX_OWED.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.engine import frames
from headrace.processes.messages import BadFrame, Unpacker
from headrace.request import Request, SequenceOutput

READ_BYTES = 1 << 18
STALLED_SECONDS = 0.5
MAX_OWED = 64 * 2**20  # bytes that one front end may leave unread
_LOOK_SECONDS = 0.05

log = logging.getLogger(__name__)


class ParentGone(Exception):
    """The parent's socket has closed: nobody wants anything any more."""


@dataclass(frozen=True, slots=True)
class Left:
    """Said by nobody: this front end is gone, and nothing of it is wanted any more."""


class Link:
    """One socket. Sending is for both threads and never blocks, receiving is for the loop alone."""

    __slots__ = ("_lock", "_moved", "_owed", "_received", "_socket", "_unpacker", "gone", "serial")

    def __init__(self, sock: socket.socket, kinds: Any, serial: int = 0) -> None:
        sock.setblocking(False)
        self.serial = serial
        self.gone = False  # nothing can be sent any more
        self._socket = sock
        self._lock = threading.Lock()
        self._owed = bytearray()
        self._moved = 0.0  # when the reader last took something
        self._unpacker = Unpacker(kinds)
        self._received = memoryview(bytearray(READ_BYTES))  # a fresh buffer a read would tear the heap: each is of another size

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        with self._lock:
            if self._owed:
                self._owed += data
                self._flush()
            elif not self.gone:
                sent = self._write(data)
                if sent < len(data):
                    self._owed += memoryview(data)[sent:]
                    self._moved = time.perf_counter()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        sent = self._write(self._owed)
        if sent:
            del self._owed[:sent]
            self._moved = time.perf_counter()
        elif len(self._owed) > MAX_OWED:
            self.gone = True
        if self.gone:
            self._owed.clear()

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.gone = True
            return 0

    @property
    def behind(self) -> bool:
        """Its reader has not taken everything."""
        return bool(self._owed)

    @property
    def stalled(self) -> bool:
        return time.perf_counter() - self._moved > STALLED_SECONDS

    def read(self) -> list[Any]:
        """The frames that have arrived. Raises BadFrame, and OSError at the end."""
        found: list[Any] = []
        while True:
            try:
                size = self._socket.recv_into(self._received)
            except BlockingIOError:
                return found
            if not size:
                raise ConnectionResetError
            found.extend(self._unpacker.feed(self._received[:size]))
            if size < READ_BYTES:
                return found

    def close(self) -> None:
        self.gone = True
        self._socket.close()


Said = list[tuple[Link, Any]]


class Links:
    """Everybody who is served. The parent's requests have serial 0."""

    def __init__(self, parent: Link, door: socket.socket) -> None:
        self.parent = parent
        self._door = door
        self._all: tuple[Link, ...] = (parent,)  # replaced, never changed: the pulse's thread goes through it, too

    # --- in

    def wait(self) -> Said:
        """What is said next; blocks until then."""
        while True:
            poll = select.poll()
            for link in self._all:
                poll.register(link, select.POLLIN | (select.POLLOUT if link.behind else 0))
            poll.poll()
            self._flush()
            said = self.poll()
            if said:
                return said

    def poll(self) -> Said:
        """What has been said. Raises ParentGone, and BadFrame where the parent makes no sense."""
        try:
            said = [(self.parent, frame) for frame in self.parent.read()]
        except OSError as error:
            raise ParentGone from error
        for link in self._all[1:]:
            said += self._hear(link)
        return said

    def _hear(self, link: Link) -> Said:
        """A front end that leaves or makes no sense costs nobody else anything."""
        try:
            if link.gone:
                raise ConnectionResetError
            said = link.read()
            for frame in said:
                if isinstance(frame, (Request, frames.Abort, frames.Finish)) and frame.request_id >> frames.SERIAL_SHIFT != link.serial:
                    raise BadFrame("a request of another's")
            return [(link, frame) for frame in said]
        except (OSError, BadFrame) as error:
            if isinstance(error, BadFrame):
                log.error("front end %d is cut off: %s", link.serial, error)
            self._all = tuple(each for each in self._all if each is not link)
            link.close()
            return [(link, Left())]

    # --- out

    def send(self, data: bytes) -> None:
        """To all."""
        for link in self._all:
            link.send(data)
        if self.parent.gone:
            raise ParentGone

    def send_step(self, outputs: Sequence[SequenceOutput]) -> Iterable[int]:
        """To each front end what it asked for, in one frame. Returns requests that nobody takes any more."""
        if len(self._all) == 1 and (not outputs or outputs[0].request_id < 1 << frames.SERIAL_SHIFT):
            self.parent.send(frames.pack_step(outputs))
            left: Iterable[int] = ()
        else:
            left = self._distribute(outputs)
        self._keep_pace()
        return left

    def _distribute(self, outputs: Sequence[SequenceOutput]) -> Iterable[int]:
        rows: dict[int, list[SequenceOutput]] = {}
        for out in outputs:
            serial = out.request_id >> frames.SERIAL_SHIFT
            if serial in rows:
                rows[serial].append(out)
            else:
                rows[serial] = [out]
        for link in self._all:
            if link.serial in rows:
                link.send(frames.pack_step(rows.pop(link.serial)))
        return {out.request_id for nobodys in rows.values() for out in nobodys}

    def _keep_pace(self) -> None:
        """Waits for the readers that are behind and still read."""
        while behind := [link for link in self._all if link.behind]:
            waited_for = [link for link in behind if len(self._all) == 1 or not link.stalled]
            if not waited_for:
                return
            poll = select.poll()
            for link in waited_for:
                poll.register(link, select.POLLOUT)
            poll.poll(_LOOK_SECONDS * 1000)
            self._flush()
        if self.parent.gone:
            raise ParentGone

    def _flush(self) -> None:
        for link in self._all:
            if link.behind:
                link.flush()

    def finish(self, seconds: float) -> None:
        """Before the process ends: what has been said is read, or so long is waited for that."""
        deadline = time.perf_counter() + seconds
        while any(link.behind for link in self._all) and time.perf_counter() < deadline:
            time.sleep(0.01)
            self._flush()

    # --- who

    def attach(self, serial: int, greeting: bytes) -> None:
        """One more front end, whose socket the parent has put at the door."""
        _, fds, _, _ = socket.recv_fds(self._door, 1, 1)
        if not fds:  # the kernel drops what this process has no descriptor for; the front end sees its end closed
            log.error("front end %d cannot be served: all file descriptors are in use", serial)
            return
        link = Link(socket.socket(fileno=fds[0]), frames.GuestCommand, serial)
        link.send(greeting)
        self._all = (*self._all, link)
