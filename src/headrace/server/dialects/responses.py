"""/v1/responses, as OpenAI's Responses API has them: a decoded body becomes a ResponsesRequest, or an error that names
the field; the response object, its items, its events, the handlers.

What lives here: this route's own fields, items to messages and back. What may not: what routes share (body.py),
generation, where responses are kept (stored.py).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from headrace.errors import HeadraceError, InvalidRequest, NotFound
from headrace.request import Given, Json
from headrace.server import generate
from headrace.server.answer_types import Deleted, Incomplete, Item, ReadTokens, Response, ResponseUsage, WrittenTokens
from headrace.server.dialects.body import (
    ChatRequest,
    Choice,
    Conversation,
    Count,
    Effort,
    Format,
    GeneratingBody,
    Stops,
    Variables,
    Word,
    asked,
    check_count,
    choose,
    read,
    read_query,
    template_variables,
)
from headrace.server.dialects.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Chat,
    FreeText,
    Grammar,
    NamedTool,
    content_of,
    custom_function,
    function_tool,
    read_arguments,
    text_of,
    tool_call,
)
from headrace.server.dialects.parts import Kind, Part, PartsAnswer, event_of
from headrace.server.exchange import Exchange
from headrace.server.generate import ChatContext
from headrace.server.parsing.parser import OutputParser
from headrace.server.parsing.texts import INPUT
from headrace.server.service import Service
from headrace.server.stored import Stored
from headrace.server.wire import HOLE, AnswerOptions, ErrorFormat, PromptState, around, encode, error_object, quote


class InputText(Struct, tag="input_text"):
    text: str


class OutputText(InputText, tag="output_text"):
    pass


class PlainText(InputText, tag="text"):
    pass


class Refusal(Struct, tag="refusal"):
    refusal: str


Texts = str | list[InputText | OutputText | PlainText | Refusal]


class ReasoningText(Struct, tag="reasoning_text"):
    text: str


class MessageItem(Struct, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts


class FunctionCall(Struct, tag="function_call"):
    call_id: str
    name: str
    arguments: str


class CustomToolCall(Struct, tag="custom_tool_call"):
    call_id: str
    name: str
    input: str


class FunctionCallOutput(Struct, tag="function_call_output"):
    call_id: str
    output: Texts


class CustomToolCallOutput(FunctionCallOutput, tag="custom_tool_call_output"):
    pass


class ReasoningItem(Struct, tag="reasoning"):
    content: str | list[ReasoningText] | None = None


Call = FunctionCall | CustomToolCall
InputItem = MessageItem | Call | FunctionCallOutput | CustomToolCallOutput | ReasoningItem


class FunctionTool(NamedTool, tag="function"):
    parameters: Json | None = None
    strict: Any = None


class TextGrammar(Grammar, tag="grammar", frozen=True):
    pass


class TextTool(NamedTool, tag="custom"):
    """What it is given is a text."""

    format: FreeText | TextGrammar | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning is given whole, never as a summary."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


InputItems = Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ResponsesBody(GeneratingBody, kw_only=True):
    input: str | InputItems
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[FunctionTool | TextTool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: Choice = "auto"
    thinking_token_budget: Count | None = None
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    chat_template_kwargs: Variables = {}
    parallel_tool_calls: bool = True
    stop: Word | Stops | None = None
    store: bool = True
    previous_response_id: str | None = None

    format_name = "text.format"
    also = ("parts",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest[ResponsesBody]):
    """``shown``: fields that the answer repeats. ``items``: the input."""

    shown: Given
    items: Sequence[Any]

    def after(self, earlier: Sequence[Any]) -> ResponsesRequest:
        """With the items of a conversation before its own. Raises InvalidRequest."""
        before = read(list[InputItem], earlier, "previous_response_id")
        check_count("input", len(before) + len(self.items), MAX_MESSAGES)
        own = read(list[InputItem], self.items, "input")
        messages = _messages(self.body.instructions, ("previous_response_id", before), ("input", own))
        return replace(self, conversation=replace(self.conversation, messages=messages), items=[*earlier, *self.items])


_SHOWN = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "store", "parallel_tool_calls")


def parse_responses(raw: Given, defaults: Given) -> ResponsesRequest:
    """``defaults`` are the model's own sampling defaults. Raises InvalidRequest naming the field."""
    given = raw.get("input")
    items = _typed(
        [{"role": "user", "content": [{"type": "input_text", "text": given}]}] if isinstance(given, str) else given
    )
    body = ResponsesBody.read({**raw, "input": items})
    common = asked(body, defaults, max_tokens=body.max_output_tokens)
    return ResponsesRequest(
        conversation=_conversation(body),
        **common,
        thinking_budget=body.thinking_token_budget,
        items=items,
        shown={
            **{name: getattr(body, name) for name in _SHOWN},
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "temperature": common["params"].temperature,
            "text": {"format": (raw.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": raw.get("tool_choice") or "auto",
            "tools": raw.get("tools") or [],
            "top_p": common["params"].top_p,
            "user": body.user or None,
        },
    )


def _typed(items: Any) -> Any:
    """An item without a type is a message."""
    if not isinstance(items, list):
        return items
    return [
        {**item, "type": "message"} if isinstance(item, dict) and item.get("type") is None else item for item in items
    ]


def _conversation(body: ResponsesBody) -> Conversation:
    tools: list[Json] = []
    customs: dict[str, Grammar | None] = {}
    for tool in body.tools:
        if isinstance(tool, TextTool):
            customs[tool.name] = tool.format if isinstance(tool.format, TextGrammar) else None
            function = custom_function(tool, customs[tool.name])
        else:
            function = function_tool(tool.name, tool.description, tool.parameters, tool.strict)
        tools.append(function)
    shown, offered = choose(
        body.tool_choice, tools, parallel=body.parallel_tool_calls, place="parameters", customs=customs
    )
    messages = _messages(body.instructions, ("input", [] if isinstance(body.input, str) else body.input))
    variables = template_variables(body.reasoning.effort, body.chat_template_kwargs)
    return Conversation(messages=messages, tools=shown, choice=offered, variables=variables)


def _messages(instructions: str | None, *lists: tuple[str, list[InputItem]]) -> Chat:
    """Lists of items, by what errors call them, as one conversation: reasoning and calls belong to the assistant's
    message beside them."""
    messages: Chat = []
    thoughts: list[str] = []

    def assistant() -> Json:
        """A new message, with what was thought before it."""
        message: Json = {"role": "assistant", "content": None}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
            thoughts.clear()
        messages.append(message)
        return message

    for where, item in ((f"{name}[{index}]", item) for name, items in lists for index, item in enumerate(items)):
        if isinstance(item, ReasoningItem):
            thoughts += _pieces(item.content or [])
        elif isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content_of(_pieces(item.output))})
        elif isinstance(item, MessageItem):
            content = content_of(_pieces(item.content))
            if item.role == "assistant":
                assistant()["content"] = content
            else:
                messages.append({"role": "system" if item.role == "developer" else item.role, "content": content})
        else:
            last = messages[-1] if messages else {}
            message = last if last.get("role") == "assistant" and not thoughts else assistant()
            message.setdefault("tool_calls", []).append(_call(where, item))
    if thoughts:
        assistant()
    if not messages:
        raise InvalidRequest("input holds nothing to answer; give at least one message.", param="input")
    return messages if instructions is None else [{"role": "system", "content": instructions}, *messages]


def _call(where: str, item: Call) -> Json:
    arguments = (
        {INPUT: item.input}
        if isinstance(item, CustomToolCall)
        else read_arguments(f"{where}.arguments", item.arguments)
    )
    return tool_call(item.call_id, item.name, arguments)


def _pieces(texts: str | Sequence[InputText | Refusal | ReasoningText]) -> list[str]:
    return (
        [texts]
        if isinstance(texts, str)
        else [part.refusal if isinstance(part, Refusal) else part.text for part in texts]
    )


# --- answers

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_STEMS = {Kind.REASONING: "reasoning_text", Kind.TEXT: "output_text", Kind.CALL: "function_call_arguments"}
_ID_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


class Shown(Struct, forbid_unknown_fields=True):
    stream: Literal["false"] = "false"  # it has ended, and is shown whole


async def responses(service: Service, exchange: Exchange) -> None:
    asked = _ResponseRoute(service, exchange)
    await generate.converse(service, exchange, parse_responses, asked.create_answer, "input", asked.complete)


class _ResponseRoute:
    """One request and what is kept of it."""

    def __init__(self, service: Service, exchange: Exchange) -> None:
        self._service, self._exchange = service, exchange
        self._items: bytes | None = None

    async def complete(self, request: ResponsesRequest) -> ResponsesRequest:
        """With the conversation before it."""
        previous = request.body.previous_response_id
        if previous is not None:
            found = await _find(self._service, previous, self._exchange.tenant)
            if found is None:
                raise InvalidRequest(
                    f"There is no response {previous[:100]!r} of yours, or it is not kept any more; send the whole conversation as input.",
                    param="previous_response_id", code="previous_response_not_found",
                )  # fmt: skip
            request = await self._service.limits.threads.run(
                found.size, lambda: request.after(_with_answer(found)), self._exchange.tenant
            )
        if request.body.store:
            items = request.items
            size = sum(len(text_of(message["content"])) for message in request.conversation.messages)
            self._items = await self._service.limits.threads.run(size, lambda: encode(items), self._exchange.tenant)
        return request

    def create_answer(self, context: ChatContext[ResponsesRequest]) -> ResponseAnswer:
        answer = ResponseAnswer(context.options, context.prompt, context.parsers[0], context.request.shown, self._keep)
        self._exchange.errors = ResponseErrors(answer)
        return answer

    def _keep(self, response: Response) -> None:
        if self._items is not None:
            self._service.stored.put(self._exchange.tenant, response.id, Stored(self._items, encode(response)))


def _with_answer(stored: Stored) -> list[Any]:
    items: list[Any] = msgspec.json.decode(stored.items)
    return [*items, *msgspec.json.decode(stored.response)["output"]]


async def _find(service: Service, name: str, tenant: str) -> Stored | None:
    """This front end's or another's."""
    found = await service.first("find_response", name, tenant)
    return None if found is None else Stored(*found)


async def _require(service: Service, exchange: Exchange) -> Stored:
    found = await _find(service, exchange.named, exchange.tenant)
    if found is None:
        raise _unknown(exchange.named)
    return found


def _unknown(name: str) -> NotFound:
    if "/" in name:
        return NotFound(f"There is no route below /v1/responses/{{id}}: {name[:100]!r}.", code="route_not_found")
    told = f"There is no response {name[:99]!r} of yours, or it is not kept any more; store is for a day, in bounds."
    return NotFound(told, param="response_id", code="response_not_found")


async def show(service: Service, exchange: Exchange) -> None:
    found = await _require(service, exchange)
    read_query(exchange.query, Shown)
    await exchange.reply(200, found.response)


async def delete(service: Service, exchange: Exchange) -> None:
    if not await service.first("delete_response", exchange.named, exchange.tenant):
        raise _unknown(exchange.named)
    await exchange.reply_json(Deleted(exchange.named))


class ResponseAnswer(PartsAnswer):
    """One response, whole or as numbered events. ``shown``: request fields that it repeats. ``keep`` gets it once it
    has ended."""

    prefix = "resp_"

    def __init__(
        self,
        options: AnswerOptions,
        prompt: PromptState,
        parser: OutputParser | None,
        shown: Given,
        keep: Callable[[Response], None] = lambda _: None,
    ) -> None:
        super().__init__(options, prompt, parser)
        self._keep = keep
        self._shown = shown
        self._number = 0
        self._failed = False
        self._growth: list[list[str]] = []  # each part's deltas, but for their numbers and texts
        self._places: list[Json] = []  # of each part, in the events about it

    # --- the object

    def whole(self) -> Response:
        """It has ended."""
        reason = _INCOMPLETE.get(self.end_reason)
        response = self._response("completed" if reason is None else "incomplete", reason)
        self._keep(response)
        return response

    def _response(self, status: Any, incomplete: Any = None, error: Json | None = None) -> Response:
        ended = status != "in_progress"
        return Response(
            id=self.id,
            created_at=self.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=None if incomplete is None else Incomplete(incomplete),
            model=self.options.model,
            output=[self._item(index) for index in range(len(self.parts))] if ended else [],
            stop_reason=self.choice.stop_reason,
            system_fingerprint=self.options.fingerprint,
            usage=self.usage() if ended else None,
            **self._shown,
            **self.extras(),
        )

    def _item(self, index: int) -> Item:
        part = self.parts[index]
        last = index == len(self.parts) - 1
        status: Any = "in_progress" if not part.closed else "incomplete" if last and self._cut else "completed"
        make = partial(Item, self._places[index]["item_id"], status)
        if part.custom:
            return make("custom_tool_call", call_id=part.id, name=part.name, input=part.text)
        if part.kind is Kind.CALL:
            return make("function_call", call_id=part.id, name=part.name, arguments=part.text)
        content = [_content(part, part.text)] if part.closed else []
        if part.kind is Kind.REASONING:
            return make("reasoning", summary=[], content=content)
        return make("message", role="assistant", content=content)

    @property
    def _cut(self) -> bool:
        """The last item is not as the model would have ended it."""
        return self._failed or self.end_reason in _INCOMPLETE

    def usage(self) -> ResponseUsage:
        prompt, written = self.prompts[0], self.choice.num_tokens
        read, reasoned = len(prompt.token_ids), WrittenTokens(self.reasoning_tokens)
        return ResponseUsage(read, ReadTokens(prompt.cached_tokens), written, reasoned, read + written)

    # --- the events

    def begin(self) -> str:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def open(self, index: int, part: Part) -> str:
        item_id = f"{'ctc' if part.custom else _ID_PREFIXES[part.kind]}_{uuid.uuid4().hex}"
        place: Json = {"item_id": item_id, "output_index": index}
        self._places.append(place if part.kind is Kind.CALL else {**place, "content_index": 0})
        kind = f"{_stem(part)}.delta"
        self._growth.append(around({"type": kind, "sequence_number": HOLE, **self._about(index, kind, delta=HOLE)}))
        events = self._event("response.output_item.added", output_index=index, item=self._item(index))
        return events if part.kind is Kind.CALL else events + self._content_part("added", index, "")

    def grow(self, index: int, part: Part, text: str) -> str:
        number, self._number = self._number, self._number + 1
        head, middle, tail = self._growth[index]
        return f"event: {_stem(part)}.delta\ndata: {head}{number}{middle}{quote(text)}{tail}\n\n"

    def close(self, index: int, part: Part) -> str:
        name = "input" if part.custom else "arguments" if part.kind is Kind.CALL else "text"
        named = {"name": part.name} if part.kind is Kind.CALL and not part.custom else {}
        kind = f"{_stem(part)}.done"
        events = self._event(kind, **self._about(index, kind, **{name: part.text}, **named))
        if part.kind is not Kind.CALL:
            events += self._content_part("done", index, part.text)
        return events + self._event("response.output_item.done", output_index=index, item=self._item(index))

    def _content_part(self, change: str, index: int, text: str) -> str:
        kind = f"response.content_part.{change}"
        return self._event(kind, **self._about(index, kind, part=_content(self.parts[index], text)))

    def closing(self) -> str:
        response = self.whole()
        return self._event(f"response.{response.status}", response=response)

    def failure(self, error: HeadraceError) -> str:
        """What a client sees last of a response that failed."""
        shown = error_object(error).error
        self._failed = True
        for part in self.parts:
            part.closed = True
        response = self._response("failed", error={"code": "server_error", "message": error.message})
        flat = {"code": shown.code, "message": shown.message, "param": shown.param}
        return self._event("response.failed", response=response) + self._event("error", **flat, error=shown)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return event_of(kind, sequence_number=self._number - 1, **fields)

    def _about(self, index: int, kind: str, **fields: Any) -> Json:
        """What an event about one part says."""
        logprobs: Json = {"logprobs": []} if kind.startswith("response.output_text") else {}
        return {**self._places[index], **fields, **logprobs}


class ResponseErrors(ErrorFormat):
    """Errors of a response that has begun."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer

    def event(self, error: HeadraceError) -> bytes:
        return self._answer.failure(error).encode("ascii")


def _content(part: Part, text: str) -> Json:
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _stem(part: Part) -> str:
    """Of the events about a part's text."""
    return f"response.{'custom_tool_call_input' if part.custom else _STEMS[part.kind]}"
