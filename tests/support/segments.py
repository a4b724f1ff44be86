"""A parser of answers whose segments are written out by a test.

What lives here: the one class. What may not: real parsing (headrace.server.parsing).
"""

from __future__ import annotations

from headrace.server.parsing.segments import Segment


class Scripted:
    """One list of segments for each text that is pushed. ``end``: the end that it reports, whatever the engine says."""

    def __init__(self, *pushed: list[Segment], end: str | None = None) -> None:
        self._pushed = list(pushed)
        self._end = end

    def push(self, text: str) -> list[Segment]:
        return self._pushed.pop(0)

    def finish(self, reason: str = "stop") -> list[Segment]:
        return []

    def end_reason(self, reason: str) -> str:
        return self._end or reason
