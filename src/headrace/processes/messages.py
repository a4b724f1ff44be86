"""Headrace's own messages between processes: frames whose body is msgpack of a fixed schema; nothing is pickled.

What lives here: packing, unpacking, the common fields of questions and answers; one end of a socket on an event loop,
with flow control so that neither end outruns the other. What may not: the schemas (engine/connection.py,
server/frontends/link.py), processes.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import socket
from array import array
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar, cast, get_type_hints

import msgspec

from headrace.processes.frames import HEADER, MAX_FRAME


def _column_bytes(column: Any) -> bytes:
    """A column of int32, such as token ids, is sent as raw bytes."""
    if not isinstance(column, array):
        raise TypeError(f"{type(column).__name__} is not in the schema")
    return column.tobytes()


Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder(enc_hook=_column_bytes)


class Frame(msgspec.Struct, array_like=True, tag=True):
    """A message on a socket: positional fields, tagged by its class name."""


def fields_frame(kind: type) -> Any:
    """A part of frames with the fields of a dataclass, in their order, without their names."""
    types = get_type_hints(kind)
    return msgspec.defstruct(kind.__name__, [(each.name, types[each.name]) for each in fields(kind)], array_like=True)


class Question(Frame):
    number: int


class Reply(Frame):
    """The answer to the question with this number."""

    number: int
    value: Any


def pack(frame: Any) -> bytes:
    """A Frame, or another tagged type of the schema, as bytes for the socket."""
    body = _encoder.encode(frame)
    return HEADER.pack(len(body)) + body


class BadFrame(Exception):
    """The peer sent something outside the schema."""


class Unpacker:
    """Bytes in, frames out. Raises BadFrame. ``opened``: what a body that came has in it."""

    def __init__(self, kinds: Any, max_frame: int = MAX_FRAME, opened: Callable[[bytes], bytes] = bytes) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds, dec_hook=lambda _, data: array("i", data))
        self._buffer = bytearray()
        self._opened = opened
        self.max_frame = max_frame

    def feed(self, data: bytes | memoryview) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER.size:
                (size,) = HEADER.unpack_from(buffer, start)
                if size > self.max_frame:
                    raise BadFrame(f"a frame of {size} bytes is over the limit of {self.max_frame}")
                if len(buffer) - start < HEADER.size + size:
                    break
                start += HEADER.size + size
                yield self._decoded(bytes(buffer[start - size : start]))
        finally:
            del buffer[:start]

    def _decoded(self, body: bytes) -> Any:
        try:
            return self._decoder.decode(self._opened(body))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadFrame(str(error)) from error


def says(sock: socket.socket, seconds: float) -> bool:
    """Whether something comes within this time, its end too."""
    poll = select.poll()  # select() takes no descriptor above 1,023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def receive(
    sock: socket.socket,
    kind: type[Message],
    opened: Callable[[bytes], bytes] = bytes,
    most: int = MAX_FRAME,
) -> Message:
    """The next message from a blocking socket, without reading beyond it. Raises BadFrame, also at the end of the
    stream."""
    head = _read(sock, HEADER.size)
    size = HEADER.unpack(head)[0] if len(head) == HEADER.size else 0
    body = _read(sock, size) if size <= most else b""  # a longer one is found out
    for message in Unpacker(kind, most, opened).feed(head + body):
        return cast(Message, message)
    raise BadFrame("the peer is gone")


def _read(sock: socket.socket, size: int) -> bytes:
    """All of it, or what there is before the stream ends. (MSG_WAITALL does not wait on a socket with a timeout.)"""
    found = b""
    while len(found) < size and (more := sock.recv(min(size - len(found), 2**20))):
        found += more
    return found


# --- on an event loop

MESSAGES_A_TURN = 16  # well below the deltas that a stream may have pending

Respond = Callable[[Any], Awaitable[Any]]


class Channel(asyncio.Protocol):
    """``respond`` answers questions, ``heard`` gets all other messages, ``lost`` is called when the other end
    closes."""

    def __init__(
        self, kinds: Any, heard: Callable[[Any], None], lost: Callable[[], None], respond: Respond | None = None
    ) -> None:
        self._unpacker = Unpacker(kinds)
        self._heard, self._lost, self._respond = heard, lost, respond
        self._transport: asyncio.Transport | None = None
        self._messages: Iterator[Any] = iter(())
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    # --- in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def data_received(self, data: bytes) -> None:
        self._messages = self._unpacker.feed(data)
        self._take(paused=False)

    def _take(self, paused: bool) -> None:
        """A few messages per turn of the event loop, so that others are served in between and a faster peer has to
        wait."""
        assert self._transport is not None
        taken = 0
        try:
            for message in islice(self._messages, MESSAGES_A_TURN):
                taken += 1
                self._hear(message)
        except BadFrame:
            self._transport.abort()
        self._go_on(more=taken == MESSAGES_A_TURN, paused=paused)

    def _go_on(self, *, more: bool, paused: bool) -> None:
        """Resumes reading once no messages of the last read are left."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if more:
            if not paused:
                self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._take, True)
        elif paused:
            self._transport.resume_reading()

    def _hear(self, message: Any) -> None:
        if isinstance(message, Reply):
            answer = self._open.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.value)
        elif isinstance(message, Question) and self._respond is not None:
            task = asyncio.get_running_loop().create_task(self._answer(self._respond, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._heard(message)

    async def _answer(self, respond: Respond, question: Question) -> None:
        self.send(Reply(question.number, await respond(question)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    # --- out

    def send(self, message: Any) -> None:
        self.write(pack(message))

    def write(self, data: bytes) -> None:
        """Never blocks; drops the message if the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def ask(self, kind: Callable[..., Question], *about: Any, seconds: float | None = None) -> Any:
        """The answer to such a question, or None if none comes in time. Raises what ``fail`` was given."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(kind(number, *about))
            await asyncio.wait((answer,), timeout=seconds)
            return answer.result() if answer.done() else None
        finally:
            del self._open[number]

    def fail(self, error: Exception | None) -> None:
        """No more answers will come."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_result(None) if error is None else answer.set_exception(error)

    def close(self, *, flush: bool = False) -> None:
        """``flush``: messages already written still arrive."""
        self.fail(None)
        if self._transport is not None:
            self._transport.close() if flush else self._transport.abort()
