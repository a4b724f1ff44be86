"""Answers made of parts, without an engine: a parser whose segments are written out by a test, and what an answer says.

What lives here: both. What may not: real parsing (headrace.server.parsing), assertions on one dialect.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.engine.output import RequestDelta
from headrace.server.dialects.parts import PartsAnswer
from headrace.server.parsing.segments import Segment
from headrace.server.wire import AnswerOptions

SHAPE = AnswerOptions(
    model="m", fingerprint="f", logprobs=False, prompt_logprobs=False, token_ids=False, include_usage=False
)


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


def answered(
    answer: PartsAnswer, *texts: str, streamed: bool, reason: str = "stop", stop_reason: Any = None, cached: int = 0
) -> Any:
    """The whole object, or the streamed events' data, of an answer whose texts come one after the other."""
    events = ""
    for number, text in enumerate(texts):
        delta = RequestDelta(0, text, (number,))
        if number == 0:
            delta.num_cached_tokens = cached
        if number == len(texts) - 1:
            delta.finish_reason, delta.stop_reason = reason, stop_reason
        answer.choice.count(delta)
        if streamed:
            events += answer.event(0, delta)
        else:
            answer.add(0, delta)
    return named_events(events + answer.closing()) if streamed else json.loads(b"".join(answer.pieces()))


def named_events(text: str) -> list[dict[str, Any]]:
    """Checks that each event is named twice alike, and is ASCII."""
    assert text.isascii()
    found = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        if not frame.startswith(":"):
            head, data = frame.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert head == f"event: {found[-1]['type']}" and data.startswith("data: ")
    return found
