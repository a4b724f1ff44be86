"""Conversations made of typed parts (Anthropic's blocks, the Responses API's items), read into the messages that chat templates expect.

What lives here: what both APIs share, with errors that name the place. What may not: which types a route takes, templates.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.messages import MAX_MESSAGES, MAX_TOOLS
from headrace.server.wire import decode_object

Chat = list[dict[str, Any]]


def read_object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object.", param=where, code="invalid_type")
    return value


def read_text(where: str, owner: dict[str, Any], name: str) -> str:
    """A string field that has to be there."""
    value = owner.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string.", param=f"{where}.{name}", code="invalid_type")
    return value


def read_type(where: str, value: Any) -> str:
    """The ``type`` of a part."""
    return read_text(where, read_object(where, value), "type")


def refuse_type(where: str, kind: str, taken: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is of type {kind[:40]!r}; this server takes {taken}.", param=where, code="unsupported_content")


def read_texts(where: str, value: Any, kinds: Collection[str] = ("text",)) -> list[str]:
    """A string, or a list of parts that hold one each."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts.", param=where, code="invalid_type")
    pieces = []
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        kind = read_type(place, part)
        if kind not in kinds:
            raise refuse_type(place, kind, "text only here")
        pieces.append(read_text(place, part, "refusal" if kind == "refusal" else "text"))
    return pieces


def read_arguments(where: str, text: str) -> dict[str, Any]:
    """A call's arguments come as a string of JSON; templates want the object."""
    try:
        return decode_object(text.encode()) if text.strip() else {}
    except InvalidRequest:
        raise InvalidRequest(f"{where} is not a JSON object; send valid JSON.", param=where) from None


def tool_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(where: str, tool: dict[str, Any], schema_name: str) -> dict[str, Any]:
    """A tool as chat completions have it, from one whose name, description and schema stand at its top."""
    function: dict[str, Any] = {"name": read_text(where, tool, "name")}
    if not function["name"]:
        raise InvalidRequest(f"{where}.name is empty; give the function's name.", param=f"{where}.name")
    if tool.get("description") is not None:
        function["description"] = read_text(where, tool, "description")
    if tool.get(schema_name) is not None:
        function["parameters"] = read_object(f"{where}.{schema_name}", tool[schema_name])
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{name} holds {count} entries; send at most {most}.", param=name)


def check_messages(name: str, messages: Chat) -> Chat:
    """Bounds what a template is given."""
    if not messages:
        raise InvalidRequest(f"{name} is empty; give at least one message.", param=name)
    check_count(name, len(messages), MAX_MESSAGES)
    return messages


def check_tools(tools: list[Any]) -> list[Any]:
    check_count("tools", len(tools), MAX_TOOLS)
    return tools
