"""An answer as a list of parts (reasoning, text, tool calls), for the wire formats that have such a list.

What lives here: how segments of text open, grow and close parts, and what the two formats share. What may not: either format,
how text is parsed (parsing/).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headrace.engine.output import RequestDelta
from headrace.server.answers import ChoiceState, PromptState, Shape
from headrace.server.parsing.segments import Content, OutputParser, Reasoning, Segment, ToolCallStart
from headrace.server.wire import encode


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


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


class _PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[Segment]:
        return [Content(text)]

    def finish(self, reason: str = "stop") -> list[Segment]:
        return []

    def end_reason(self, reason: str) -> str:
        return reason


class PartsAnswer(ABC):
    """One answer that is made of parts; a format says how each change of them reads.

    Whole answers come from the same changes as streams do. An answer always has a part: an empty text where the model said nothing.
    ``end_reason``: how it ended, once it has. ``reasoning_tokens``: to within those at its edges, whose text comes with the next ones.
    """

    explained: Mapping[str, Any] | None = None

    def __init__(self, shape: Shape, prompt: PromptState, parser: OutputParser | None) -> None:
        self.shape = shape
        self.prompts: Sequence[PromptState] = [prompt]
        self.choices: list[ChoiceState] = [_Choice(prompt, self)]
        self.parts: list[Part] = []
        self.end_reason = ""
        self.reasoning_tokens = 0
        self._parser: OutputParser = parser or _PlainParser()
        self._begun = False

    @property
    def choice(self) -> ChoiceState:
        return self.choices[0]

    def extras(self) -> dict[str, Any]:
        """What the API does not know, for those who asked for it."""
        return {} if self.explained is None else {"explain": self.explained}

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
    def closing(self) -> str:
        """Events after the last part."""

    @abstractmethod
    def whole(self) -> dict[str, Any]: ...

    @abstractmethod
    def usage(self) -> dict[str, Any]: ...

    def pieces(self) -> Iterator[bytes]:
        yield encode(self.whole())

    # --- what the engine says

    def opening(self) -> Iterable[str]:
        return ()  # the first event tells how much of the prompt was cached, which is known with the first token

    def event(self, choice: int, delta: RequestDelta) -> str:
        events = "" if self._begun else self.begin()
        self._begun = True
        events += self._changes(self._parser.push(delta.text))
        if self.parts and self.parts[-1].kind is Kind.REASONING:
            self.reasoning_tokens += len(delta.token_ids)
        return events if delta.finish_reason is None else events + self._last_changes()

    def _last_changes(self) -> str:
        events = self._changes(self._parser.finish(self.choice.finish_reason or ""))
        self.end_reason = self._parser.end_reason(self.choice.finish_reason or "")
        return events + (self._close_last() if self.parts else self._enter(Part(Kind.TEXT)) + self._close_last())

    def _changes(self, segments: Sequence[Segment]) -> str:
        return "".join([self._change(segment) for segment in segments])

    def _change(self, segment: Segment) -> str:
        if isinstance(segment, ToolCallStart):
            return self._enter(Part(Kind.CALL, segment.id, segment.name, custom=segment.custom))
        events, kind = "", self._kind_of(segment)
        if not segment.text:
            return ""
        if not self.parts or self.parts[-1].kind is not kind:
            events = self._enter(Part(kind))
        part = self.parts[-1]
        part.pieces.append(segment.text)
        return events + self.grow(len(self.parts) - 1, part, segment.text)

    @staticmethod
    def _kind_of(segment: Segment) -> Kind:
        return Kind.TEXT if isinstance(segment, Content) else Kind.REASONING if isinstance(segment, Reasoning) else Kind.CALL

    def _enter(self, part: Part) -> str:
        events = self._close_last() if self.parts else ""
        self.parts.append(part)
        return events + self.open(len(self.parts) - 1, part)

    def _close_last(self) -> str:
        part = self.parts[-1]
        part.closed = True
        return self.close(len(self.parts) - 1, part)


class _Choice(ChoiceState):
    """The one choice. Of an answer that is not streamed nothing is kept but its parts."""

    __slots__ = ("_answer",)

    def __init__(self, prompt: PromptState, answer: PartsAnswer) -> None:
        super().__init__(prompt)
        self._answer = answer

    def add(self, delta: RequestDelta) -> None:
        self._answer.event(0, delta)
