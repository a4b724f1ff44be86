"""/v1/responses: a decoded body becomes a ResponsesRequest, or an error that names the field.

What lives here: this route's own fields, items to messages. What may not: what routes share (body.py), answers
(responses.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.errors import InvalidRequest
from headrace.request import Given, Json
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
    tool_call,
)
from headrace.server.parsing.texts import INPUT


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
Item = MessageItem | Call | FunctionCallOutput | CustomToolCallOutput | ReasoningItem


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


Items = Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ResponsesBody(GeneratingBody, kw_only=True):
    input: str | Items
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
        before = read(list[Item], earlier, "previous_response_id")
        check_count("input", len(before) + len(self.items), MAX_MESSAGES)
        own = read(list[Item], self.items, "input")
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


def _messages(instructions: str | None, *lists: tuple[str, list[Item]]) -> Chat:
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
