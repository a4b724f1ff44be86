"""What an answer's text is made of, in order, whichever wire format it is shown in later.

What lives here: the four kinds of segment and what a parser can be asked. What may not: parsing, JSON of any route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought and did not say."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text that the model said."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: sent once for each ``index``, which counts from 0, before any of its arguments."""

    index: int
    id: str
    name: str
    custom: bool = False  # what follows is a text and no JSON


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments: all of them joined are one JSON object exactly if the call is complete."""

    index: int
    text: str
    custom: bool = False


Segment = Reasoning | Content | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """One answer's text in pieces, in; segments out. How the text is cut into pieces changes nothing but how segments are cut."""

    def push(self, text: str) -> list[Segment]:
        """What can be said after more text. Never raises."""

    def finish(self, reason: str = "stop") -> list[Segment]:
        """What was held back, once the text has ended; ``reason`` is the engine's. Where it is length, half a marker is no text."""

    def end_reason(self, reason: str) -> str:
        """The finish_reason to report, after ``finish()``, where the engine reports ``reason``.

        ``tool_calls`` where the model stopped and its calls are complete; ``length`` where the text ends inside of a call.
        """
