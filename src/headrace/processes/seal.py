"""Messages that cross a network, each with a tag (keyed BLAKE2b, RFC 7693) that only who has the connection's key can
make. A message that is changed, repeated, left out or sent back does not open. Nothing is encrypted.

What lives here: that. What may not: keys, sockets.
"""

from __future__ import annotations

from hashlib import blake2b
from hmac import compare_digest

from headrace.processes.frames import HEADER, framed
from headrace.processes.messages import BadFrame

_TAG = 16  # bytes


class Seal:
    """One end of a connection. ``first``: which. ``count``: of messages that went each way before."""

    def __init__(self, key: bytes, *, first: bool, count: int = 0) -> None:
        self._key, self._sent, self._opened = key, count, count
        self._ours, self._theirs = (b"first", b"other") if first else (b"other", b"first")

    def sealed(self, message: bytes) -> bytes:
        """A packed message, to be sent next."""
        body = message[HEADER.size :]
        tag = self._tag(body, self._sent, self._ours)
        self._sent += 1
        return framed(body + tag)

    def opened(self, body: bytes) -> bytes:
        """What a body that came next had in it. Raises BadFrame."""
        inner, tag = body[:-_TAG], body[-_TAG:]
        if not compare_digest(tag, self._tag(inner, self._opened, self._theirs)):
            raise BadFrame("its tag is not one that our key makes")
        self._opened += 1
        return inner

    def _tag(self, body: bytes, count: int, side: bytes) -> bytes:
        made = blake2b(count.to_bytes(8, "little"), key=self._key, digest_size=_TAG, person=side)
        made.update(body)
        return made.digest()
