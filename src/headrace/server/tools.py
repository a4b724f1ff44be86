"""What a request lets the model do with its tools: as it likes, none, some call, or one named call.

What lives here: tool_choice, and the JSON schema that forces a call. What may not: reading tools (messages.py), parsing answers (parsing/).

The schema is for calls that are written as plain JSON: a list of them, or one function's arguments (forced.py has the families' ways).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.custom import Customs, Grammar
from headrace.server.parsing.formats import FORCED_CALLS, Style, ToolFormat

Tool = Mapping[str, Any]

_PLACES = ("$defs", "definitions")  # of what a schema refers to
# At most a space between the parts of a call, as models write them: small ones lose themselves where more is allowed.
_SPACING = {"whitespace_pattern": " ?", "coerce_one_of": True}


class Mode(Enum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``name``: with NAMED, the function. ``parallel``: more than one call is welcome. ``only``: no function but those offered may be called.

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
    choice: Any,
    tools: Sequence[dict[str, Any]] | None,
    *,
    parallel: bool = True,
    place: str = "function.parameters",
    customs: Customs | None = None,
) -> tuple[list[dict[str, Any]] | None, ToolChoice]:
    """What the model is shown, and what is made of it. ``choice`` is as OpenAI's routes have it. Raises InvalidRequest.

    ``place``: of a function's schema in a tool. Tools that are not allowed are not shown: what a model has not read of it does not call.
    """
    allowed, mode = _allowed(choice)
    given = list(enumerate(tools or ()))
    if allowed is not None:
        for name in allowed:
            _check_offered(name, tools)
        given = [(index, tool) for index, tool in given if _name_of(tool) in allowed]
    read = _read_choice(mode, tools, parallel)
    of_custom = "custom.format" if "." in place else "format"
    places = tuple(f"tools[{index}].{of_custom if _name_of(tool) in (customs or ()) else place}" for index, tool in given)
    shown = [tool for _, tool in given] if read.shown else []
    twice = next((name for name in customs or () if names_of(tools).count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools holds more than one of the name {twice[:100]!r}; rename the others.", param="tools")
    return shown or None, replace(read, only=allowed is not None, places=places, customs=customs or {})


def _allowed(choice: Any) -> tuple[set[str] | None, Any]:
    """The names of ``allowed_tools`` (chat completions nest them, responses do not), and what else is said."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None, choice
    nested = choice.get("allowed_tools", choice)
    mode, entries = (nested.get("mode", "auto"), nested.get("tools")) if isinstance(nested, dict) else (None, None)
    names = [_entry_name(each) for each in entries] if isinstance(entries, list) else []
    if mode not in ("auto", "required") or not names or not all(isinstance(name, str) for name in names):
        wanted = "a mode (auto or required) and tools, a list of functions by name"
        raise InvalidRequest(f"tool_choice of type allowed_tools must hold {wanted}.", param="tool_choice")
    return set(names), mode


def _entry_name(entry: Any) -> Any:
    """Of ``{"type": …, "name": …}``, or of one whose name is inside of an object called as its type."""
    if not isinstance(entry, dict) or entry.get("type") not in ("function", "custom"):
        return None
    inner = entry.get(entry["type"], entry)
    return inner.get("name") if isinstance(inner, dict) else None


def _read_choice(choice: Any, tools: Sequence[Tool] | None, parallel: bool) -> ToolChoice:
    if choice in ("auto", "none"):
        return ToolChoice(Mode(choice), parallel=parallel)
    name = None if choice == "required" else _entry_name(choice)
    if choice != "required" and not isinstance(name, str):
        wanted = 'auto, none, required, {"type": "function", "function": {"name": …}} or allowed_tools'
        raise InvalidRequest(f"tool_choice must be {wanted}.", param="tool_choice", code="unsupported_parameter")
    if not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools; give tools or leave it out.", param="tool_choice")
    if name is None:
        return ToolChoice(Mode.REQUIRED, parallel=parallel)
    _check_offered(name, tools)
    return ToolChoice(Mode.NAMED, name, parallel=False)


def _check_offered(name: str, tools: Sequence[Tool] | None) -> None:
    if name not in names_of(tools):
        raise InvalidRequest(f"tool_choice names the function {name[:100]!r}, which is not among the tools.", param="tool_choice")


def _name_of(tool: Tool) -> str:
    return str(tool["function"]["name"])


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


def guidance(tools: Sequence[Tool]) -> dict[str, Any]:
    """How llguidance is to read schemas of calls: ``oneOf`` as ``anyOf``, and what it cannot hold a call to (``uniqueItems``, ``not``) as
    advice to the model, unless a function is ``strict``.
    """
    strict = any(tool["function"].get("strict") is True for tool in tools)
    return {"x-guidance": _SPACING if strict else {**_SPACING, "lenient": True}}


def forced_schema(tools: Sequence[Tool], choice: ToolChoice) -> str:
    """What the answer must be: the named function's arguments, or a list of calls."""
    if choice.mode is Mode.NAMED:
        tool = next(tool for tool in tools if tool["function"]["name"] == choice.name)
        return json.dumps({**parameters_of(tool), **guidance([tool])})
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(tool) for tool in tools]}}
    if not choice.parallel:
        calls["maxItems"] = 1
    return json.dumps({**calls, **_definitions(tools, choice), **guidance(tools)})


def call_schema(tools: Sequence[Tool], choice: ToolChoice, format: ToolFormat) -> dict[str, Any]:
    """One call of one of them, as an object."""
    return {"anyOf": [_call(tool, format) for tool in tools], **_definitions(tools, choice), **guidance(tools)}


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    given: Mapping[str, Any] | None = tool["function"].get("parameters")
    return {"type": "object", **given} if given else {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(tools: Sequence[Tool], choice: ToolChoice) -> tuple[str, Grammar] | None:
    """The one tool that must be called, and the grammar of its text, where JSON cannot hold it. Raises InvalidRequest where others may, too."""
    offered = [_name_of(tool) for tool in tools if not choice.name or _name_of(tool) == choice.name]
    held = [(name, grammar) for name in offered if (grammar := choice.customs.get(name)) is not None and grammar.syntax == "lark"]
    if held and len(offered) > 1:
        reason = f"no call can be held to the lark grammar of {held[0][0][:100]!r} where another tool may be called instead"
        raise InvalidRequest(f"{reason}; choose it by name.", param="tool_choice")
    return held[0] if held else None


def offered_schemas(tools: Sequence[Tool], choice: ToolChoice) -> tuple[tuple[str, str], ...]:
    """Where the client has each function's schema, and the schema."""
    return tuple((choice.place(index), json.dumps(parameters_of(tool))) for index, tool in enumerate(tools))


def check_arguments(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Arguments are an object: what is held to anything else is no call. Raises InvalidRequest."""
    for index, tool in enumerate(tools):
        if parameters_of(tool)["type"] != "object":
            where = choice.place(index)
            raise InvalidRequest(f"{where} must have the type object: a call's arguments are one.", param=where)


def _call(tool: Tool, format: ToolFormat = FORCED_CALLS) -> dict[str, Any]:
    name = tool["function"]["name"]
    parameters = {key: value for key, value in parameters_of(tool).items() if key not in _PLACES}
    properties = {format.name_key: {"const": name}, format.arguments_key: parameters}
    if format.style is Style.KEYED:
        properties = {name: parameters}
    if format.number_key:
        properties = {format.number_key: {"type": "string", "pattern": "^[0-9]{1,2}$"}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _definitions(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any]:
    """References in a function's schema are from its root, which is now the list's."""
    found: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = choice.place(index)
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
