"""The conversation of a request, checked and put into the shape that chat templates expect: messages, tools, and what
the model may do with these: as it likes, none, some call, or one named call.

What lives here: messages and tools, what blocks and items become, tool_choice; custom tools as functions: what the
model hands these is a text, free or of a grammar. What may not: templates themselves (engine/template.py), schemas that
force a call (tools.py), answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headrace.engine.template import joined
from headrace.errors import InvalidRequest
from headrace.request import Given, Json
from headrace.server.parsing.texts import INPUT
from headrace.server.wire import decode_object

MAX_MESSAGES = 10_000
MAX_TOOLS = 128

Tool = Given
Name = Annotated[str, Meta(min_length=1)]


class Grammar(Struct, frozen=True):
    """What a text must be."""

    syntax: Literal["lark", "regex"]
    definition: str


Customs = Mapping[str, Grammar | None]


class Mode(Enum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``name``: with NAMED, the function. ``parallel``: more than one call is welcome. ``only``: no function but those
    offered may be called.

    ``places``: of each tool that is offered, what the client calls its schema. ``customs``: those that take a text.
    """

    mode: Mode = Mode.AUTO
    name: str = ""
    parallel: bool = True
    only: bool = False
    places: tuple[str, ...] = ()
    customs: Customs = field(default_factory=dict)

    @property
    def shown(self) -> bool:
        """The chat template gets the tools."""
        return self.mode is not Mode.NONE

    @property
    def forced(self) -> bool:
        return self.mode in (Mode.REQUIRED, Mode.NAMED)

    def place(self, index: int) -> str:
        """What the client calls the schema of the tool that is offered at ``index``."""
        return self.places[index] if self.places else f"tools[{index}]"


def offer(
    asked: ToolChoice,
    tools: Sequence[Json] | None,
    *,
    allowed: Collection[str] | None = None,
    place: str = "function.parameters",
    customs: Customs | None = None,
) -> tuple[list[Json] | None, ToolChoice]:
    """What the model is shown, and what is made of it. Raises InvalidRequest.

    ``place``: of a function's schema in a tool. Tools that are not ``allowed`` are not shown: what a model has not read
    of it does not call.
    """
    given = list(enumerate(tools or ()))
    if allowed is not None:
        for name in allowed:
            _check_offered(name, tools)
        given = [(index, tool) for index, tool in given if name_of(tool) in allowed]
    if asked.forced and not tools:
        raise InvalidRequest(
            "tool_choice asks for a call, but there are no tools; give tools or leave it out.", param="tool_choice"
        )
    if asked.mode is Mode.NAMED:
        _check_offered(asked.name, tools)
    of_custom = "custom.format" if "." in place else "format"
    places = tuple(
        f"tools[{index}].{of_custom if name_of(tool) in (customs or ()) else place}" for index, tool in given
    )
    shown = [tool for _, tool in given] if asked.shown else []
    twice = next((name for name in customs or () if names_of(tools).count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(
            f"tools holds more than one of the name {twice[:100]!r}; rename the others.", param="tools"
        )
    return shown or None, replace(asked, only=allowed is not None, places=places, customs=customs or {})


def _check_offered(name: str, tools: Sequence[Tool] | None) -> None:
    if name not in names_of(tools):
        raise InvalidRequest(
            f"tool_choice names the function {name[:100]!r}, which is not among the tools.", param="tool_choice"
        )


def name_of(tool: Tool) -> str:
    return str(tool["function"]["name"])


def names_of(tools: Sequence[Tool] | None) -> tuple[str, ...]:
    return tuple(tool["function"]["name"] for tool in tools or ())


class TextPart(Struct, tag="text"):
    text: str


class RefusalPart(Struct, tag="refusal"):
    refusal: str


class CalledFunction(Struct):
    name: str
    arguments: str | Json = {}


class CalledCustom(Struct):
    name: str
    input: str


class ChatCall(Struct):
    """Of a custom tool where its type says so, else of a function."""

    id: Any = None
    type: Any = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


Contents = str | list[TextPart | RefusalPart]


class SystemMessage(Struct, tag_field="role", tag="system", kw_only=True):
    content: Contents
    tool_calls: Annotated[list[ChatCall], Meta(max_length=MAX_TOOLS)] | None = None


class DeveloperMessage(SystemMessage, tag="developer"):
    pass


class UserMessage(SystemMessage, tag="user"):
    pass


class ToolMessage(SystemMessage, tag="tool"):
    pass


class AssistantMessage(SystemMessage, tag="assistant"):
    content: Contents | None = None  # type: ignore[assignment]


class Function(Struct):
    name: Name
    parameters: Json = {}


class ChatFunction(Struct, tag="function"):
    function: Function


class FreeText(Struct, tag="text"):
    pass


class ChatGrammar(Struct, tag="grammar"):
    grammar: Grammar


class NamedTool(Struct):
    name: Name
    description: str | None = None


class Custom(NamedTool):
    format: FreeText | ChatGrammar | None = None


class ChatCustom(Struct, tag="custom"):
    custom: Custom


Message = SystemMessage | DeveloperMessage | UserMessage | ToolMessage | AssistantMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
Tools = Annotated[list[ChatFunction | ChatCustom], Meta(max_length=MAX_TOOLS)]


def read_messages(given: list[Any], messages: list[Message]) -> list[Json]:
    """``given``: as they were written. Content becomes a text, a list of several text parts, or for the assistant None;
    tool arguments become an object, ``developer`` ``system``; what else a client wrote is the template's. Raises
    InvalidRequest.
    """
    return [
        _message(f"messages[{index}]", raw, message)
        for index, (raw, message) in enumerate(zip(given, messages, strict=True))
    ]


def read_tools(given: list[Any], tools: list[ChatFunction | ChatCustom]) -> tuple[list[Json], Customs]:
    """Custom tools as functions; and their grammars."""
    customs = {tool.custom.name: _grammar(tool.custom) for tool in tools if isinstance(tool, ChatCustom)}
    return [
        custom_function(tool.custom, _grammar(tool.custom)) if isinstance(tool, ChatCustom) else raw
        for raw, tool in zip(given, tools, strict=True)
    ], customs


def _grammar(custom: Custom) -> Grammar | None:
    return custom.format.grammar if isinstance(custom.format, ChatGrammar) else None


def _message(where: str, given: Json, message: Message) -> Json:
    shown = {name: value for name, value in given.items() if value is not None}
    content = message.content
    if isinstance(content, list):
        content = content_of([part.refusal if isinstance(part, RefusalPart) else part.text for part in content])  # type: ignore[assignment]
    shown |= {"role": "system" if isinstance(message, DeveloperMessage) else given["role"], "content": content}
    if message.tool_calls is not None:
        calls = enumerate(zip(given["tool_calls"], message.tool_calls, strict=True))
        shown["tool_calls"] = [_call(f"{where}.tool_calls[{index}]", raw, call) for index, (raw, call) in calls]
    return shown


def _call(where: str, given: Json, call: ChatCall) -> Json:
    if call.type == "custom" and call.custom is not None:
        return tool_call(call.id, call.custom.name, {INPUT: call.custom.input})
    if call.function is None:
        raise InvalidRequest(
            f"{where} must be an object with function.name and function.arguments.", param=where, code="invalid_type"
        )
    arguments = call.function.arguments
    if isinstance(arguments, str):
        arguments = read_arguments(f"{where}.function.arguments", arguments)
    return {**given, "function": {**given["function"], "arguments": arguments}}


def read_arguments(where: str, text: str) -> Json:
    """A call's arguments come as a string of JSON; templates want the object."""
    try:
        return decode_object(text.encode()) if text.strip() else {}
    except InvalidRequest:
        raise InvalidRequest(f"{where} is not a JSON object; send valid JSON.", param=where) from None


Content = str | list[dict[str, str]] | None


def content_of(texts: list[str]) -> Content:
    """A message's content from its pieces. How several are joined is the template's affair (engine/template.py)."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def text_of(content: Content) -> str:
    return content or "" if content is None or isinstance(content, str) else joined(content)


Chat = list[Json]


def tool_call(call_id: Any, name: str, arguments: Json) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str | None, schema: Json | None, strict: Any) -> Json:
    """A tool as chat completions have it."""
    given = {"name": name, "description": description, "parameters": schema, "strict": strict is True or None}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def custom_function(tool: NamedTool, grammar: Grammar | None) -> Json:
    """A custom tool as a function."""
    schema: Json = {"type": "string"}
    if grammar is not None:
        schema["description"] = f"A text of this {grammar.syntax} grammar:\n{grammar.definition}"
    if grammar is not None and grammar.syntax == "regex":
        schema["pattern"] = f"^(?:{grammar.definition})$"
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    told = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": told}
