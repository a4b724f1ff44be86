"""Frames between the front end and a template renderer: a 4-byte big-endian length, then JSON in ASCII.

What lives here: writing and reading one frame. What may not: what is in it.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO


def encode_frame(value: Any) -> bytes:
    body = json.dumps(value).encode("ascii")
    return struct.pack(">I", len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's JSON, or None at the stream's end, also when it ends inside a frame."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    length = struct.unpack(">I", head)[0]
    body = stream.read(length)
    return body if len(body) == length else None
