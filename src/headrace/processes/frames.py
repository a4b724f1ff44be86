"""Frames between processes: a length of four bytes, then a body.

Our own messages are msgpack of a fixed schema (messages.py); input and output of other people's programs are lines of
JSON (sandbox.py).

What lives here: writing and reading one frame, where a child finds its parent. What may not: what is in it, third-party
modules.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import BinaryIO

HEADER = struct.Struct("<I")
MAX_FRAME = 256 * 2**20  # bytes; a peer that announces more is cut off


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body, or None at the stream's end, also when it ends inside a frame."""
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    (length,) = HEADER.unpack(head)
    body = stream.read(length) if length <= MAX_FRAME else b""
    return body if len(body) == length else None


def parent_socket() -> socket.socket:
    """The socket to the parent, which this process was given as standard input; from now on, standard input is
    empty."""
    sock = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return sock
