"""Calls whose argument is a text: custom tools', which clients get without the JSON around it.

What lives here: parsers around the parser of answers (parser.py). What may not: tools as clients give them (server/custom.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.server.parsing.segments import Content, OutputParser, Segment, ToolCallArguments, ToolCallStart

INPUT = "input"  # the one parameter
_BEGIN = re.compile(r'\{\s*"input"\s*:\s*"')
_MOST_BEGIN = 64  # characters
# Characters of a JSON string whose meaning is certain: no escape that is not there in full, no half of a pair.
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_CERTAIN = re.compile(rf'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_PAIR})*')
_MAY_PAIR = re.compile(r"\\u[0-9a-fA-F]{0,4}|\\u[0-9a-fA-F]{4}\\(?:u[0-9a-fA-F]{0,3})?")  # more may come of it
_ESCAPE = 6  # characters of one that has a number


class CustomCalls:
    """A parser whose calls of custom tools come with the text that is in their arguments."""

    def __init__(self, parser: OutputParser, names: Sequence[str]) -> None:
        self._parser, self._names = parser, frozenset(names)
        self._texts: dict[int, _Text] = {}

    def push(self, text: str) -> list[Segment]:
        return self._told(self._parser.push(text))

    def finish(self, reason: str = "stop") -> list[Segment]:
        return self._told(self._parser.finish(reason))

    def end_reason(self, reason: str) -> str:
        return self._parser.end_reason(reason)

    def _told(self, segments: Sequence[Segment]) -> list[Segment]:
        return [told for segment in segments if (told := self._one(segment)) is not None]

    def _one(self, segment: Segment) -> Segment | None:
        if isinstance(segment, ToolCallStart) and segment.name in self._names:
            self._texts[segment.index] = _Text()
            return replace(segment, custom=True)
        if isinstance(segment, ToolCallArguments) and segment.index in self._texts:
            text = self._texts[segment.index].push(segment.text)
            return ToolCallArguments(segment.index, text, custom=True) if text else None
        return segment


class _Text:
    """The text in arguments that come in pieces. Arguments of another form are given as they are."""

    __slots__ = ("_held", "_state")

    def __init__(self) -> None:
        self._held = ""
        self._state = "before"

    def push(self, piece: str) -> str:
        self._held += piece
        if self._state == "before":
            self._begin()
        if self._state == "text":
            return self._take()
        given = self._held if self._state == "other" else ""
        if self._state != "before":
            self._held = ""
        return given

    def _begin(self) -> None:
        if begun := _BEGIN.match(self._held):
            self._state, self._held = "text", self._held[begun.end() :]
        elif len(self._held) > _MOST_BEGIN or self._held.endswith("}"):
            self._state = "other"

    def _take(self) -> str:
        out = ""
        while True:
            certain = _CERTAIN.match(self._held)
            assert certain is not None, "it matches nothing, too"
            out += str(json.loads(f'"{certain[0]}"', strict=False))
            self._held = self._held[certain.end() :]
            if self._held.startswith('"'):
                self._state, self._held = "after", ""
            elif self._held.startswith("\\u") and not _MAY_PAIR.fullmatch(self._held):
                self._held = "\\ufffd" + self._held[_ESCAPE:]  # half a pair, alone
                continue
            return out.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class WholeText:
    """A parser of answers that are one call's text from end to end, once reasoning is over."""

    def __init__(self, parser: OutputParser | None, name: str, create_id: Callable[[], str]) -> None:
        self._parser, self._start = parser, ToolCallStart(0, create_id(), name, custom=True)
        self._begun = False

    def push(self, text: str) -> list[Segment]:
        return self._told([Content(text)] if self._parser is None else self._parser.push(text))

    def finish(self, reason: str = "stop") -> list[Segment]:
        found = self._told([] if self._parser is None else self._parser.finish(reason))
        return found if self._begun else [*found, self._begin()]

    def end_reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" else reason

    def _begin(self) -> Segment:
        self._begun = True
        return self._start

    def _told(self, segments: Sequence[Segment]) -> list[Segment]:
        told: list[Segment] = []
        for segment in segments:
            if not isinstance(segment, Content):
                told.append(segment)
                continue
            told += [] if self._begun else [self._begin()]
            told.append(ToolCallArguments(0, segment.text, custom=True))
        return told
