"""The conversation of a chat request, checked and put into the shape that chat templates expect.

What lives here: messages, tools and template variables. What may not: templates themselves (engine/template.py), answers.
"""

from __future__ import annotations

from typing import Any, cast

from headrace.engine.contents import joined
from headrace.errors import InvalidRequest
from headrace.server.custom import Grammar, read_custom
from headrace.server.parsing.texts import INPUT
from headrace.server.wire import decode_object

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_TEMPLATE_KWARGS = 64
ROLES = ("system", "developer", "user", "assistant", "tool")

# What a template gets from us; a request cannot replace it.
_RESERVED = frozenset(
    ("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "bos_token", "eos_token")
)


def read_messages(value: list[Any]) -> list[dict[str, Any]]:
    """Content becomes a text, a list of several text parts, or for the assistant None; tool arguments become an object, ``developer``
    ``system``. Raises InvalidRequest.
    """
    if not value:
        raise InvalidRequest("messages is empty; give at least one message.", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"messages holds {len(value)} messages; send at most {MAX_MESSAGES}.", param="messages")
    return [_read_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _read_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object with role and content.", param=where, code="invalid_type")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role is {_excerpt(role)}; give one of {', '.join(ROLES)}.", param=f"{where}.role")
    read = {name: value for name, value in message.items() if value is not None}
    read["role"] = "system" if role == "developer" else role
    read["content"] = _read_content(f"{where}.content", message.get("content"), optional=role == "assistant")
    if "tool_calls" in read:
        read["tool_calls"] = _read_tool_calls(f"{where}.tool_calls", read["tool_calls"])
    return read


def _excerpt(value: Any) -> str:
    return repr(value[:40]) if isinstance(value, str) else "missing" if value is None else "not a string"


Content = str | list[dict[str, str]] | None


def content_of(texts: list[str]) -> Content:
    """A message's content from its pieces. How several are joined is the template's affair (engine/contents.py)."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def text_of(content: Content) -> str:
    return content or "" if content is None or isinstance(content, str) else joined(content)


def _read_content(where: str, content: Any, *, optional: bool) -> Content:
    if isinstance(content, str) or (content is None and optional):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts.", param=where, code="invalid_type")
    return content_of([_read_part(f"{where}[{index}]", part) for index, part in enumerate(content)])


def _read_part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type.", param=where, code="invalid_type")
    if part["type"] not in ("text", "refusal"):
        raise InvalidRequest(f"{where} is of type {part['type'][:40]!r}, but this server takes text only.", param=where, code="unsupported_content")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{part['type']} must be a string.", param=f"{where}.{part['type']}", code="invalid_type")
    return text


def _read_tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
        raise InvalidRequest(f"{where} must be a list of at most {MAX_TOOLS} calls.", param=where)
    return [_read_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _read_tool_call(where: str, call: Any) -> dict[str, Any]:
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if isinstance(custom, dict) and isinstance(custom.get("name"), str) and isinstance(custom.get(INPUT), str):
        return {"id": call.get("id"), "type": "function", "function": {"name": custom["name"], "arguments": {INPUT: custom[INPUT]}}}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with function.name and function.arguments.", param=where, code="invalid_type")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _decode_arguments(where, arguments)
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments must be a JSON object.", param=f"{where}.function.arguments", code="invalid_type")
    return {**call, "function": {**function, "arguments": arguments}}


def _decode_arguments(where: str, arguments: str) -> dict[str, Any]:
    """OpenAI sends a string of JSON; templates want the object."""
    try:
        return decode_object(arguments.encode()) if arguments.strip() else {}
    except InvalidRequest:
        raise InvalidRequest(f"{where}.function.arguments is not a JSON object; send valid JSON.", param=f"{where}.function.arguments") from None


def read_tools(value: list[Any] | None) -> list[dict[str, Any]] | None:
    """None where there are none: templates test for that."""
    if not value:
        return None
    if len(value) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(value)} tools; send at most {MAX_TOOLS}.", param="tools")
    return [_read_tool(f"tools[{index}]", tool) for index, tool in enumerate(value)]


def read_customs(value: list[Any] | None) -> dict[str, Grammar | None]:
    """The custom tools among those that ``read_tools`` has read, by name."""
    found = [read_custom(f"tools[{index}].custom", tool["custom"]) for index, tool in enumerate(value or ()) if tool["type"] == "custom"]
    return {function["function"]["name"]: grammar for function, grammar in found}


def _read_tool(where: str, tool: Any) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") == "custom":
        return read_custom(f"{where}.custom", tool.get("custom"))[0]
    _check_tool(where, tool)
    return cast(dict[str, Any], tool)


def _check_tool(where: str, tool: Any) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise InvalidRequest(f"{where} must be an object of type function or custom.", param=where, code="invalid_type")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"{where}.function must be an object with a name.", param=f"{where}.function", code="invalid_type")
    if not isinstance(function.get("parameters", {}), dict):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema object.", param=f"{where}.function.parameters", code="invalid_type")


def check_template_kwargs(value: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the template, none of which is ours."""
    given = value or {}
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequest(f"chat_template_kwargs holds {len(given)} entries; send at most {MAX_TEMPLATE_KWARGS}.", param="chat_template_kwargs")
    taken = next((name for name in given if name in _RESERVED or name.startswith("_")), None)
    if taken is not None:
        raise InvalidRequest(f"chat_template_kwargs may not set {taken[:40]!r}; leave it out.", param="chat_template_kwargs")
    return given
