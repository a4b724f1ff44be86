"""Our own messages between processes: frames whose body is msgpack of a fixed schema, nothing pickled.

What lives here: packing, unpacking, what every question and answer has. What may not: the schemas (engine/frames.py, server/frontends/link.py).
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import msgspec

from headrace.processes.frames import HEADER, MAX_FRAME, framed


def _column_bytes(column: Any) -> bytes:
    """A column of int32, such as token ids, goes as raw bytes."""
    if not isinstance(column, array):
        raise TypeError(f"{type(column).__name__} is not in the schema")
    return column.tobytes()


Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder(enc_hook=_column_bytes)


class Frame(msgspec.Struct, array_like=True, tag=True):
    """What goes over a socket: positional, tagged by its class name."""


class Question(Frame):
    number: int


class Answer(Frame):
    """To the question of this number."""

    number: int
    value: Any


def pack(frame: Any) -> bytes:
    """A Frame, or another tagged type of the schema, as it goes over the socket."""
    return framed(_encoder.encode(frame))


class BadFrame(Exception):
    """The peer sent something outside the schema."""


class Unpacker:
    """Bytes in, frames out. Raises BadFrame."""

    def __init__(self, kinds: Any, max_frame: int = MAX_FRAME) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds, dec_hook=lambda _, data: array("i", data))
        self._buffer = bytearray()
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
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadFrame(str(error)) from error


def receive(sock: socket.socket, kind: type[Message]) -> Message:
    """The next one from a blocking socket, and nothing of what follows it. Raises BadFrame, also at the end."""
    head = sock.recv(HEADER.size, socket.MSG_WAITALL)
    body = sock.recv(HEADER.unpack(head)[0], socket.MSG_WAITALL) if len(head) == HEADER.size else b""
    for message in Unpacker(kind).feed(head + body):
        return cast(Message, message)
    raise BadFrame("the peer is gone")
