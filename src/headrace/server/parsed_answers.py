"""Chat completions whose text is taken apart: reasoning, content and tool calls in fields of their own.

What lives here: segments as messages and deltas. What may not: parsing, answers that are content throughout (answers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.output import RequestDelta
from headrace.server.answers import ChatAnswer, ChoiceState, PromptState, Shape
from headrace.server.parsing.segments import Content, OutputParser, Reasoning, Segment, ToolCallArguments, ToolCallStart
from headrace.server.wire import encode, quote


class ParsedChatAnswer(ChatAnswer):
    """``parsers``: one a choice."""

    def __init__(self, shape: Shape, prompt: PromptState, parsers: Sequence[OutputParser], tokenizer: Any, *, echo: str = "") -> None:
        super().__init__(shape, prompt, len(parsers), tokenizer, echo=echo)
        self._parsers = parsers
        self._heads = [f'{self._head}{{"index":{index},"delta":{{' for index in range(len(parsers))]

    def event(self, choice: int, delta: RequestDelta) -> str:
        parser = self._parsers[choice]
        segments = parser.push(delta.text)
        if delta.finish_reason is not None:
            segments += parser.finish(delta.finish_reason)
        shown = [_members(segment) for segment in segments]
        if not shown and not self.shape.plain and delta.token_ids:
            shown = [""]  # text is held back, but what is told of each token is not
        events = [self._chunk(choice, each, delta if index == 0 else None) for index, each in enumerate(shown)]
        if delta.finish_reason is not None:
            events.append(self.end(choice, parser.end_reason(delta.finish_reason), delta.stop_reason))
        return "".join(events)

    def _chunk(self, choice: int, members: str, told: RequestDelta | None) -> str:
        """``told``: whose tokens this chunk tells of, if it is asked to."""
        if self.shape.plain:
            return f"{self._heads[choice]}{members}{self._plain_tail}"
        logprobs = self.format.chat(told.logprobs) if told is not None and self.shape.logprobs else None
        ids = f',"token_ids":{list(told.token_ids) if told is not None else []}' if self.shape.token_ids else ""
        return f'{self._heads[choice]}{members}}},"logprobs":{encode(logprobs).decode()},"finish_reason":null{ids}}}{self._tail}'

    def choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        parser = self._parsers[index]
        segments = [*parser.push("".join(choice.texts)), *parser.finish(choice.finish_reason or "")]
        shown = super().choice(index, choice)
        shown["message"] = message_of(segments)
        if self._echo:
            shown["message"]["content"] = self._echo + (shown["message"]["content"] or "")
        shown["finish_reason"] = parser.end_reason(choice.finish_reason or "")
        return shown


def _members(segment: Segment) -> str:
    """What a delta holds, as JSON without its braces: one is made for every token."""
    if isinstance(segment, Content):
        return f'"content":{quote(segment.text)}'
    if isinstance(segment, Reasoning):
        text = quote(segment.text)
        return f'"reasoning_content":{text},"reasoning":{text}'
    if isinstance(segment, ToolCallArguments) and segment.custom:
        return f'"tool_calls":[{{"index":{segment.index},"custom":{{"input":{quote(segment.text)}}}}}]'
    if isinstance(segment, ToolCallStart) and segment.custom:
        custom = f'{{"name":{quote(segment.name)},"input":""}}'
        return f'"tool_calls":[{{"index":{segment.index},"id":{quote(segment.id)},"type":"custom","custom":{custom}}}]'
    if isinstance(segment, ToolCallArguments):
        return f'"tool_calls":[{{"index":{segment.index},"function":{{"arguments":{quote(segment.text)}}}}}]'
    function = f'{{"name":{quote(segment.name)},"arguments":""}}'
    return f'"tool_calls":[{{"index":{segment.index},"id":{quote(segment.id)},"type":"function","function":{function}}}]'


def message_of(segments: Sequence[Segment]) -> dict[str, Any]:
    """``content`` is null where the model only thought or called."""
    content = "".join(each.text for each in segments if isinstance(each, Content))
    reasoning = "".join(each.text for each in segments if isinstance(each, Reasoning))
    calls = _calls_of(segments)
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if reasoning or calls else ""), "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}  # under both names that clients look for
    if calls:
        message["tool_calls"] = calls
    return message


def _calls_of(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    texts: dict[int, list[str]] = {}
    for each in segments:
        if isinstance(each, ToolCallArguments):
            texts.setdefault(each.index, []).append(each.text)
    return [_call_of(each, "".join(texts.get(each.index, ()))) for each in segments if isinstance(each, ToolCallStart)]


def _call_of(start: ToolCallStart, text: str) -> dict[str, Any]:
    if start.custom:
        return {"id": start.id, "type": "custom", "custom": {"name": start.name, "input": text}}
    return {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": text}}
