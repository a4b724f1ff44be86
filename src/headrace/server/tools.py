"""JSON schemas of functions and of calls: what parameters may be, and what forces a call that is written as plain JSON
(a list of calls, or one function's arguments).

What lives here: schemas. What may not: tool_choice (dialects/), the families' own ways of calling (forced.py), parsing
answers (parsing/).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from headrace.errors import InvalidRequest
from headrace.request import Given, Json
from headrace.server.dialects.conversation import Grammar, Mode, Tool, ToolChoice, name_of
from headrace.server.parsing.formats import FORCED_CALLS, Style, ToolFormat

PLACES = ("$defs", "definitions")  # of what a schema refers to
# At most a space between the parts of a call, as models write them: small ones lose themselves where more is allowed.
_SPACING = {"whitespace_pattern": " ?", "coerce_one_of": True}


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
    values = (
        schema.get("enum") if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    if values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    branches: list[Any] = next((schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), [])
    found = [types_of(branch) for branch in branches if isinstance(branch, dict) and "$ref" not in branch]
    return frozenset().union(*found) if found and len(found) == len(branches) and all(found) else frozenset()


def guidance(tools: Sequence[Tool]) -> Json:
    """How llguidance is to read schemas of calls: ``oneOf`` as ``anyOf``, and what it cannot hold a call to
    (``uniqueItems``, ``not``) as advice to the model, unless a function is ``strict``.
    """
    strict = any(tool["function"].get("strict") is True for tool in tools)
    return {"x-guidance": _SPACING if strict else {**_SPACING, "lenient": True}}


def forced_schema(tools: Sequence[Tool], choice: ToolChoice) -> str:
    """What the answer must be: the named function's arguments, or a list of calls."""
    if choice.mode is Mode.NAMED:
        tool = next(tool for tool in tools if tool["function"]["name"] == choice.name)
        return json.dumps({**parameters_of(tool), **guidance([tool])})
    calls: Json = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(tool) for tool in tools]}}
    if not choice.parallel:
        calls["maxItems"] = 1
    return json.dumps({**calls, **_definitions(tools, choice), **guidance(tools)})


def call_schema(tools: Sequence[Tool], choice: ToolChoice, format: ToolFormat) -> Json:
    """One call of one of them, as an object."""
    return {"anyOf": [_call(tool, format) for tool in tools], **_definitions(tools, choice), **guidance(tools)}


def parameters_of(tool: Tool) -> Given:
    given: Given | None = tool["function"].get("parameters")
    return {"type": "object", **given} if given else {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(tools: Sequence[Tool], choice: ToolChoice) -> tuple[str, Grammar] | None:
    """The one tool that must be called, and the grammar of its text, where JSON cannot hold it. Raises InvalidRequest
    where others may, too."""
    offered = [name_of(tool) for tool in tools if not choice.name or name_of(tool) == choice.name]
    held = [
        (name, grammar)
        for name in offered
        if (grammar := choice.customs.get(name)) is not None and grammar.syntax == "lark"
    ]
    if held and len(offered) > 1:
        reason = (
            f"no call can be held to the lark grammar of {held[0][0][:100]!r} where another tool may be called instead"
        )
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


def _call(tool: Tool, format: ToolFormat = FORCED_CALLS) -> Json:
    name = tool["function"]["name"]
    parameters = {key: value for key, value in parameters_of(tool).items() if key not in PLACES}
    properties = {format.name_key: {"const": name}, format.arguments_key: parameters}
    if format.style is Style.KEYED:
        properties = {name: parameters}
    if format.number_key:
        properties = {format.number_key: {"type": "string", "pattern": "^[0-9]{1,2}$"}, **properties}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _definitions(tools: Sequence[Tool], choice: ToolChoice) -> Json:
    """References in a function's schema are from its root, which is now the list's."""
    found: dict[str, Json] = {}
    for index, tool in enumerate(tools):
        where = choice.place(index)
        check_references(where, tool)
        for place in PLACES:
            given = parameters_of(tool).get(place, {})
            if not isinstance(given, dict):
                raise InvalidRequest(f"{place} of {where} must be an object.", param=where, code="invalid_type")
            for name, value in given.items():
                if found.setdefault(place, {}).setdefault(name, value) != value:
                    raise InvalidRequest(
                        f"{place} of {where} defines {name[:100]!r} otherwise than another tool; rename one.",
                        param=where,
                    )
    return found


def check_references(where: str, tool: Tool) -> None:
    """Only what moves to the new root can be referred to from there."""
    nodes: list[Any] = [parameters_of(tool)]
    while nodes:
        node = nodes.pop()
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        target = node.get("$ref") if isinstance(node, dict) else None
        if isinstance(target, str) and not target.startswith(tuple(f"#/{place}/" for place in PLACES)):
            remedy = "refer to #/$defs, or choose the function by name"
            raise InvalidRequest(
                f"{where} refers to {target[:100]!r}, which a list of calls cannot hold; {remedy}.", param=where
            )
