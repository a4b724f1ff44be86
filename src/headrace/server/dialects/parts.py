"""An answer as a list of parts (reasoning, text, tool calls), for the wire formats that have such a list.

What lives here: how segments of text open, grow and close parts, and what the two formats share. What may not: either
format, how text is parsed (parsing/).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from msgspec import Struct

from headrace.engine.output import RequestDelta
from headrace.server.parsing.parser import OutputParser
from headrace.server.parsing.segments import Content, Reasoning, Segment, ToolCallArguments, ToolCallStart
from headrace.server.wire import Answer, AnswerOptions, ChoiceState, PromptState, encode


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


_KINDS = {Content: Kind.TEXT, Reasoning: Kind.REASONING, ToolCallArguments: Kind.CALL}


@dataclass(slots=True)
class Part:
    """``pieces`` joined are its text, or a call's arguments. ``id`` and ``name`` are a call's."""

    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    closed: bool = False
    custom: bool = False  # a call whose text is no JSON

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartsAnswer(Answer):
    """One answer that is made of parts; a format says how each change of them reads.

    Whole answers come from the same changes as streams do. An answer always has a part: an empty text where the model
    said nothing. ``end_reason``: how it ended, once it has. ``reasoning_tokens``: to within those at its edges, whose
    text comes with the next ones.
    """

    def __init__(self, options: AnswerOptions, prompt: PromptState, parser: OutputParser | None) -> None:
        super().__init__(options, [prompt], [ChoiceState(prompt)])
        self.parts: list[Part] = []
        self.end_reason = ""
        self.reasoning_tokens = 0
        self._parser = parser
        self._begun = False

    @property
    def choice(self) -> ChoiceState:
        return self.choices[0]

    # --- what a format says

    @abstractmethod
    def begin(self) -> str:
        """Events before the first part."""

    @abstractmethod
    def open(self, index: int, part: Part) -> str: ...

    @abstractmethod
    def grow(self, index: int, part: Part, text: str) -> str: ...

    @abstractmethod
    def close(self, index: int, part: Part) -> str: ...

    @abstractmethod
    def whole(self) -> Struct: ...

    def pieces(self) -> Iterator[bytes]:
        yield encode(self.whole())

    # --- what the engine says

    def add(self, choice: int, delta: RequestDelta) -> None:
        """Of an answer that is not streamed nothing is kept but its parts."""
        self.event(choice, delta)

    def event(self, choice: int, delta: RequestDelta) -> str:
        """The first one tells how much of the prompt was cached, which is known with the first token."""
        parser, reason = self._parser, delta.finish_reason
        events = "" if self._begun else self.begin()
        self._begun = True
        events += self._changes([Content(delta.text)] if parser is None else parser.push(delta.text))
        if self.parts and self.parts[-1].kind is Kind.REASONING:
            self.reasoning_tokens += len(delta.token_ids)
        if reason is None:
            return events
        if parser is not None:
            events += self._changes(parser.finish(reason))
        self.end_reason = reason if parser is None else parser.end_reason(reason)
        return events + ("" if self.parts else self._enter(Part(Kind.TEXT))) + self._close_last()

    def _changes(self, segments: Sequence[Segment]) -> str:
        return "".join([self._change(segment) for segment in segments])

    def _change(self, segment: Segment) -> str:
        if isinstance(segment, ToolCallStart):
            return self._enter(Part(Kind.CALL, segment.id, segment.name, custom=segment.custom))
        events, kind = "", _KINDS[type(segment)]
        if not segment.text:
            return ""
        if not self.parts or self.parts[-1].kind is not kind:
            events = self._enter(Part(kind))
        part = self.parts[-1]
        part.pieces.append(segment.text)
        return events + self.grow(len(self.parts) - 1, part, segment.text)

    def _enter(self, part: Part) -> str:
        events = self._close_last() if self.parts else ""
        self.parts.append(part)
        return events + self.open(len(self.parts) - 1, part)

    def _close_last(self) -> str:
        part = self.parts[-1]
        part.closed = True
        return self.close(len(self.parts) - 1, part)


def event_of(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {encode({'type': kind, **fields}).decode()}\n\n"
