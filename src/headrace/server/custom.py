"""Custom tools of OpenAI's: what the model hands them is a text, free or of a grammar, and no JSON.

What lives here: such a tool as a function with one parameter, for templates and grammars. What may not: other tools (tools.py), the way
back from calls to texts (parsing/texts.py), wire formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.parsing.texts import INPUT


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must be: ``syntax`` is lark or regex."""

    syntax: str
    definition: str


Customs = Mapping[str, Grammar | None]


def read_custom(where: str, given: Any) -> tuple[dict[str, Any], Grammar | None]:
    """A custom tool as a function, and its grammar. ``given``: what holds its name. Raises InvalidRequest."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str) or not given["name"]:
        raise InvalidRequest(f"{where} must be an object with a name.", param=where, code="invalid_type")
    description = given.get("description")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{where}.description must be a string.", param=f"{where}.description", code="invalid_type")
    grammar = _read_format(f"{where}.format", given.get("format"))
    schema: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        schema["description"] = f"A text of this {grammar.syntax} grammar:\n{grammar.definition}"
    if grammar is not None and grammar.syntax == "regex":
        schema["pattern"] = f"^(?:{grammar.definition})$"
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return {"type": "function", "function": {"name": given["name"], "description": description or "", "parameters": parameters}}, grammar


def _read_format(where: str, format: Any) -> Grammar | None:
    """Chat completions nest a grammar; responses do not."""
    kind = format.get("type") if isinstance(format, dict) else None
    if format is None or kind == "text":
        return None
    held = format.get("grammar", format) if kind == "grammar" else None
    syntax, definition = (held.get("syntax"), held.get("definition")) if isinstance(held, dict) else (None, None)
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        wanted = "text, or grammar with a syntax (lark or regex) and a definition"
        raise InvalidRequest(f"{where} must be of type {wanted}.", param=where, code="invalid_type")
    return Grammar(syntax, definition)
