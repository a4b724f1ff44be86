"""What an answer's text is made of, in order, whichever wire format it is shown in later.

What lives here: the four kinds of segment. What may not: parsing, JSON of any route.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


def argument_texts(segments: Iterable[Segment]) -> dict[int, str]:
    """By call."""
    texts: dict[int, str] = {}
    for each in segments:
        if isinstance(each, ToolCallArguments):
            texts[each.index] = texts.get(each.index, "") + each.text
    return texts
