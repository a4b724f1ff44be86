"""/v1/chat/completions: a decoded body becomes a ChatRequest, or an error that names the field; and the answer to it.

What lives here: this route's own fields, and what answers are taken apart into (reasoning, content, calls) as messages
and deltas. What may not: what routes share (body.py), messages (conversation.py), parsing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from headrace.engine.output import RequestDelta
from headrace.errors import InvalidRequest
from headrace.request import Given, Json
from headrace.server import generate
from headrace.server.answer_types import Call, Called, ChatMessage
from headrace.server.dialects.body import (
    ChatRequest,
    Choice,
    Conversation,
    Count,
    Effort,
    OlderBody,
    Variables,
    asked,
    choose,
    older_options,
    template_variables,
)
from headrace.server.dialects.conversation import Messages, Tools, read_messages, read_tools
from headrace.server.exchange import Exchange
from headrace.server.generate import ChatContext
from headrace.server.parsing.segments import (
    Content,
    Reasoning,
    Segment,
    ToolCallArguments,
    ToolCallStart,
    argument_texts,
)
from headrace.server.service import Service
from headrace.server.wire import HOLE, ChoicesAnswer, ChoiceState, encode_list, quote


class ChatBody(OlderBody, kw_only=True):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: Tools = []
    tool_choice: Choice = "auto"
    chat_template_kwargs: Variables = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    thinking_token_budget: Count | None = None
    echo: bool = False
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None

    wire_names = {"logprobs": "top_logprobs"}


def parse_chat(raw: Given, defaults: Given) -> ChatRequest[ChatBody]:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    body = ChatBody.read(raw)
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; give one of them.", param="max_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs is given without logprobs; set logprobs to true.", param="top_logprobs")
    if body.echo and not body.continue_final_message:
        raise InvalidRequest(
            "echo shows the message that is continued, and none is; set continue_final_message or leave echo out.",
            param="echo",
        )
    conversation, scores = read_conversation(raw, body), body.top_logprobs if body.logprobs else None
    common = asked(body, defaults, max_tokens=old if new is None else new, logprobs=scores)
    common |= {"options": older_options(body, logprobs=body.logprobs), "thinking_budget": body.thinking_token_budget}
    return ChatRequest(conversation=conversation, echo=body.echo, **common)


def read_conversation(raw: Given, body: ChatBody) -> Conversation:
    """``raw``: the body as it was written, of which a template may see what is not checked here."""
    tools, customs = read_tools(raw.get("tools") or [], body.tools)
    shown, offered = choose(body.tool_choice, tools, parallel=body.parallel_tool_calls, customs=customs)
    continues, opens = body.continue_final_message, body.add_generation_prompt
    return Conversation(
        messages=read_messages(raw["messages"], body.messages),
        tools=shown,
        choice=offered,
        add_generation_prompt=not continues if opens is None else opens,
        continue_final_message=continues,
        variables=template_variables(body.reasoning_effort, body.chat_template_kwargs),
    )


async def chat_completions(service: Service, exchange: Exchange) -> None:
    await generate.converse(service, exchange, parse_chat, ChatAnswer)


class ChatAnswer(ChoicesAnswer):
    """chat.completion and chat.completion.chunk. What has no parser nothing looks at."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, context: ChatContext[ChatRequest[ChatBody]]) -> None:
        super().__init__(context.options, [context.prompt], len(context.parsers), context.tokenizer)
        self._echo, self._parsers, self._plain = context.echo, context.parsers, context.options.plain
        choices = range(len(context.parsers))
        self._contents, self._thoughts = (
            [self._plain_around(index, segment) for index in choices] for segment in (Content(HOLE), Reasoning(HOLE))
        )

    def _plain_around(self, index: int, segment: Segment) -> list[str]:
        return self._around(_choice(index, _delta(segment)))

    def opening(self) -> Iterator[str]:
        extra = {"prompt_token_ids": list(self.prompts[0].token_ids)} if self.options.token_ids else {}
        for index in range(len(self.choices)):
            yield self.event_of(_choice(index, {"role": "assistant", "content": self._echo}), **extra)
            extra = {}

    def event(self, choice: int, delta: RequestDelta) -> str:
        parser, reason, plain = self._parsers[choice], delta.finish_reason, self._plain
        if parser is None and plain and reason is None:
            return quote(delta.text).join(self._contents[choice])
        if parser is not None:
            segments = [*parser.push(delta.text), *(parser.finish(reason) if reason is not None else ())]
        else:
            segments = (
                [Content(delta.text)] if delta.text or (not plain and (reason is None or delta.token_ids)) else []
            )
        if plain:
            events = [self._plain_event(choice, segment) for segment in segments]
        else:
            # Text may be held back, but what is told of each token is not.
            shown = [_delta(segment) for segment in segments] or ([{}] if delta.token_ids else [])
            events = [self._rich(choice, each, delta if index == 0 else None) for index, each in enumerate(shown)]
        if reason is not None:
            ended = {
                "finish_reason": reason if parser is None else parser.end_reason(reason),
                "stop_reason": delta.stop_reason,
            }
            events.append(self.event_of({"index": choice, "delta": {}, "logprobs": None, **ended}))
        return "".join(events)

    def _plain_event(self, choice: int, segment: Segment) -> str:
        if isinstance(segment, Content | Reasoning):
            return quote(segment.text).join(
                (self._contents if isinstance(segment, Content) else self._thoughts)[choice]
            )
        return "".join(self._plain_around(choice, segment))

    def _rich(self, choice: int, shown: Json, told: RequestDelta | None) -> str:
        """``told``: whose tokens this chunk tells of, if it is asked to."""
        logprobs = self.format.chat(told.logprobs) if told is not None and self.options.logprobs else None
        event = _choice(choice, shown, logprobs)
        if self.options.token_ids:
            event["token_ids"] = list(told.token_ids) if told is not None else []
        return self.event_of(event)

    def _prompt_members(self) -> Json:
        prompt, members = self.prompts[0], Json()
        if self.options.token_ids:
            members["prompt_token_ids"] = self._prompt_ids(prompt)
        if self.options.prompt_logprobs:
            members["prompt_logprobs"] = self._prompt_scores(prompt)
        return members

    def choice(self, index: int, choice: ChoiceState) -> Json:
        parser, reason = self._parsers[index], choice.finish_reason or ""
        text = "".join(choice.texts)
        segments = [Content(text)] if parser is None else [*parser.push(text), *parser.finish(reason)]
        shown: Json = {
            "index": index,
            "message": message_of(segments, self._echo),
            "logprobs": self.format.chat_pieces(choice.logprobs) if self.options.logprobs else None,
            "finish_reason": reason if parser is None else parser.end_reason(reason),
            "stop_reason": choice.stop_reason,
        }
        if self.options.token_ids:
            shown["token_ids"] = encode_list(choice.token_ids)
        return shown


def _choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _delta(segment: Segment) -> Json:
    if isinstance(segment, Content):
        return {"content": segment.text}
    if isinstance(segment, Reasoning):
        return {"reasoning_content": segment.text, "reasoning": segment.text}
    kind, name = ("custom", "input") if segment.custom else ("function", "arguments")
    if isinstance(segment, ToolCallArguments):
        return {"tool_calls": [{"index": segment.index, kind: {name: segment.text}}]}
    return {
        "tool_calls": [{"index": segment.index, "id": segment.id, "type": kind, kind: {"name": segment.name, name: ""}}]
    }


def message_of(segments: Sequence[Segment], echo: str = "") -> ChatMessage:
    content = echo + "".join(each.text for each in segments if isinstance(each, Content))
    reasoning = "".join(each.text for each in segments if isinstance(each, Reasoning)) or UNSET
    calls = _calls_of(segments) or UNSET
    return ChatMessage(content or (None if reasoning or calls else ""), reasoning, reasoning, calls)


def _calls_of(segments: Sequence[Segment]) -> list[Call]:
    texts = argument_texts(segments)
    return [_call(each, texts.get(each.index, "")) for each in segments if isinstance(each, ToolCallStart)]


def _call(start: ToolCallStart, text: str) -> Call:
    if start.custom:
        return Call(start.id, "custom", custom=Called(start.name, input=text))
    return Call(start.id, "function", function=Called(start.name, arguments=text))
