"""What a request lets the model do with its tools: as it likes, none, some call, or one named call.

What lives here: tool_choice, and the JSON schema that forces a call. What may not: reading tools (messages.py), parsing answers (parsing/).

The schema is for calls that are written as plain JSON: a list of them, or one function's arguments (forced.py has the families' ways).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headrace.errors import InvalidRequest

Tool = Mapping[str, Any]

_PLACES = ("$defs", "definitions")  # of what a schema refers to
# At most a space between the parts of a call, as models write them: small ones lose themselves where more is allowed.
SPACING = {"x-guidance": {"whitespace_pattern": " ?"}}


class Mode(Enum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``name``: with NAMED, the function. ``parallel``: more than one call is welcome."""

    mode: Mode = Mode.AUTO
    name: str = ""
    parallel: bool = True

    @property
    def shown(self) -> bool:
        """The chat template gets the tools."""
        return self.mode is not Mode.NONE

    @property
    def forced(self) -> bool:
        return self.mode in (Mode.REQUIRED, Mode.NAMED)


def read_tool_choice(choice: Any, tools: Sequence[Tool] | None, *, parallel: bool = True) -> ToolChoice:
    """``choice`` as chat completions have it. Raises InvalidRequest."""
    if choice in ("auto", "none"):
        return ToolChoice(Mode(choice), parallel=parallel)
    name = _named(choice)
    if not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools; give tools or leave it out.", param="tool_choice")
    if name is None:
        return ToolChoice(Mode.REQUIRED, parallel=parallel)
    if name not in names_of(tools):
        raise InvalidRequest(f"tool_choice names the function {name[:100]!r}, which is not among the tools.", param="tool_choice")
    return ToolChoice(Mode.NAMED, name, parallel=False)


def _named(choice: Any) -> str | None:
    """The function's name; None for ``required``."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        wanted = 'auto, none, required or {"type": "function", "function": {"name": …}}'
        raise InvalidRequest(f"tool_choice must be {wanted}.", param="tool_choice", code="unsupported_parameter")
    return name


def names_of(tools: Sequence[Tool] | None) -> tuple[str, ...]:
    return tuple(tool["function"]["name"] for tool in tools or ())


def functions_of(tools: Sequence[Tool] | None) -> dict[str, dict[str, frozenset[str]]]:
    """Each function's name, with the JSON types that its parameters may have."""
    return {tool["function"]["name"]: _types_of(tool) for tool in tools or ()}


def _types_of(tool: Tool) -> dict[str, frozenset[str]]:
    properties = parameters_of(tool).get("properties")
    if not isinstance(properties, dict):
        return {}
    found = {name: types_of(schema) for name, schema in properties.items()}
    return {name: types for name, types in found.items() if types}


def types_of(schema: Any) -> frozenset[str]:
    """JSON types that a schema names; empty where it does not say, or says it elsewhere."""
    if not isinstance(schema, dict):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str | list):
        return frozenset(each for each in ([kind] if isinstance(kind, str) else kind) if isinstance(each, str))
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    if values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    branches: list[Any] = next((schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), [])
    found = [types_of(branch) for branch in branches if isinstance(branch, dict) and "$ref" not in branch]
    return frozenset().union(*found) if found and len(found) == len(branches) and all(found) else frozenset()


def forced_schema(tools: Sequence[Tool], choice: ToolChoice) -> str:
    """What the answer must be: the named function's arguments, or a list of calls."""
    if choice.mode is Mode.NAMED:
        parameters = next(parameters_of(tool) for tool in tools if tool["function"]["name"] == choice.name)
        return json.dumps({**parameters, **SPACING})
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(tool) for tool in tools]}}
    if not choice.parallel:
        calls["maxItems"] = 1
    return json.dumps({**calls, **_definitions(tools), **SPACING})


def call_schema(tools: Sequence[Tool], arguments_key: str) -> dict[str, Any]:
    """One call of one of them, as an object."""
    return {"anyOf": [_call(tool, arguments_key) for tool in tools], **_definitions(tools), **SPACING}


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    given: Mapping[str, Any] | None = tool["function"].get("parameters")
    return {"type": "object", **given} if given else {"type": "object", "properties": {}, "additionalProperties": False}


def check_arguments(tools: Sequence[Tool]) -> None:
    """Arguments are an object: what is held to anything else is no call. Raises InvalidRequest."""
    for index, tool in enumerate(tools):
        if parameters_of(tool)["type"] != "object":
            raise InvalidRequest(f"The parameters of tools[{index}] must have the type object: a call's arguments are one.", param=f"tools[{index}]")


def _call(tool: Tool, arguments_key: str = "arguments") -> dict[str, Any]:
    parameters = {name: value for name, value in parameters_of(tool).items() if name not in _PLACES}
    return {
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, arguments_key: parameters},
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def _definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    """References in a function's schema are from its root, which is now the list's."""
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"  # what is in it is called otherwise on every route
        check_references(where, tool)
        for place in _PLACES:
            given = parameters_of(tool).get(place, {})
            if not isinstance(given, dict):
                raise InvalidRequest(f"{place} of {where} must be an object.", param=where, code="invalid_type")
            for name, value in given.items():
                if found.setdefault(place, {}).setdefault(name, value) != value:
                    raise InvalidRequest(f"{place} of {where} defines {name[:100]!r} otherwise than another tool; rename one.", param=where)
    return found


def check_references(where: str, tool: Tool) -> None:
    """Only what moves to the new root can be referred to from there."""
    nodes: list[Any] = [parameters_of(tool)]
    while nodes:
        node = nodes.pop()
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        target = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(target, str) and not target.startswith(tuple(f"#/{place}/" for place in _PLACES)):
            remedy = "refer to #/$defs, or choose the function by name"
            raise InvalidRequest(f"{where} refers to {target[:100]!r}, which a list of calls cannot hold; {remedy}.", param=where)
