"""Grammars that make a model write what its parser reads back: reasoning first, where it reasons, then the form that was asked for.

What lives here: tool calls in a family's own way, as Lark for llguidance, and what may stand before a structure. What may not: what
counts as a call (parsing/), compiling (the engine).

A call that cannot be written so (a marker that no grammar can name, parameters that are more than a list of values) is plain JSON
from its first character: a list of calls, or one function's arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.errors import InvalidRequest
from headrace.sampling_params import StructuredOutputs
from headrace.server.parsing import Form
from headrace.server.parsing.formats import FORCED_ARGUMENTS, FORCED_CALLS, ReasoningFormat, Style, Tags, ToolFormat
from headrace.server.tools import (
    SPACING,
    Mode,
    Tool,
    ToolChoice,
    call_schema,
    check_arguments,
    check_references,
    forced_schema,
    parameters_of,
    types_of,
)

_NAMEABLE = re.compile(r"<[^<>\s]+>")  # what a grammar can call a special token
_NAME = re.compile(r"[\w.:/-]{1,200}")
_KEY = {Style.TAGS: re.compile(r"[^<>\"\n\s](?:[^<>\"\n]{0,198}[^<>\"\n\s])?"), Style.KEYWORDS: re.compile(r"\w{1,200}")}
_ROOT = frozenset(("type", "properties", "required", "additionalProperties", "description", "title", "$schema", "$defs", "definitions"))
_TEXT = frozenset(("type", "description", "title", "default", "examples"))  # of a schema that any text satisfies
_MOST_OPTIONAL = 48  # parameters, of Python's arguments: their rules grow with its square
_SPACE = "ws: /[ \\n]{0,2}/\n"


class _Unwritable(Exception):
    """The family's own way cannot be put into a grammar."""


def hold(
    form: Form, tools: Sequence[Tool] | None, choice: ToolChoice, wanted: StructuredOutputs | None, special: Collection[str]
) -> tuple[Form, StructuredOutputs | None]:
    """The form in which what is asked for will come, and the grammar for it. ``special``: markers that are tokens of their own.

    Raises InvalidRequest for tools that no list of calls can hold.
    """
    if choice.forced and tools:
        form, wanted = _hold_to_calls(form, tools, choice, special)
    if wanted is None or form.reasoning is None:
        return form, wanted
    try:
        return form, replace(wanted, preface=_preface(form.reasoning, special, must=form.opened or form.reasoning.implied))
    except _Unwritable:
        return replace(form, reasoning=None, opened=False), wanted


def _hold_to_calls(form: Form, tools: Sequence[Tool], choice: ToolChoice, special: Collection[str]) -> tuple[Form, StructuredOutputs]:
    check_arguments(tools, choice)
    offered = [tool for tool in tools if choice.mode is Mode.REQUIRED or tool["function"]["name"] == choice.name]
    if form.tools is not None:
        try:
            return form, StructuredOutputs(grammar=_calls(form.tools, offered, choice, special))
        except (_Unwritable, InvalidRequest):
            pass  # plain JSON then, or an error in its words
    format = FORCED_ARGUMENTS if choice.name else FORCED_CALLS
    return replace(form, tools=format, fixed_name=choice.name), StructuredOutputs(json=forced_schema(tools, choice))


# --- reasoning


def _preface(reasoning: ReasoningFormat, special: Collection[str], *, must: bool) -> str:
    """``must``: it has begun, or always comes."""
    end = _literal(reasoning.end, special)
    thought = f"thought: /(.|\\n)*/ {end}\n" if reasoning.end in special else f"thought[suffix={end}]: /(.|\\n)*/\n"
    first = "thought ws" if must else f"({_literal(reasoning.begin, special)} thought ws)?"
    return f"start: {first} @answer\n{thought}{_SPACE}"


# --- calls


def _literal(text: str, special: Collection[str]) -> str:
    """``text`` in Lark; special tokens in it by their names."""
    if not special:
        return json.dumps(text)
    pieces = [piece for piece in re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text) if piece]
    if any(piece in special and not _NAMEABLE.fullmatch(piece) for piece in pieces):
        raise _Unwritable
    return " ".join(piece if piece in special else json.dumps(piece) for piece in pieces)


def _calls(format: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, special: Collection[str]) -> str:
    """Raises _Unwritable, and InvalidRequest for definitions that do not go together."""

    def literals(texts: Sequence[str]) -> list[str]:
        """Bare calls do without their markers."""
        return [_literal(text, special) for text in texts if not (format.bare and text.startswith("<"))]

    begin, end = ([_literal(format.begin, special)] if format.begin else []), literals(format.end)
    if format.style is Style.OBJECT:
        rules, body = [f"body: {_json(call_schema(tools, choice, format.arguments_key))}"], "body"
    else:
        written = [_Function(format, tool, f"f{index}", special) for index, tool in enumerate(tools)]
        rules, body = [rule for each in written for rule in each.rules], f"({' | '.join(each.name for each in written)})"
    call = " ws ".join([*begin, body, *end]) if format.style is not Style.TAGS else " ".join([*begin, body, *end])
    separator = f"ws {_literal(format.separator, special)} ws" if format.separator else "ws"
    around = (literals(format.section_begin), literals(format.section_end))
    if format.section_each:
        call, around = " ws ".join([*around[0], call, *around[1]]), ([], [])
    more = f" ({separator} call)*" if choice.parallel else ""
    section = " ws ".join([*around[0], f"call{more}", *around[1]])
    return "\n".join([f"start: {section}", f"call: {call}", *rules, _SPACE])


def _json(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"


class _Function:
    """One function's call behind what begins every call: rules in Lark, the first of which is ``name``."""

    def __init__(self, format: ToolFormat, tool: Tool, name: str, special: Collection[str]) -> None:
        self.name = name
        self._special = special
        self._parameters = parameters_of(tool)
        self._inner: list[str] = []
        written: str = tool["function"]["name"]
        if not _NAME.fullmatch(written):
            raise _Unwritable
        if format.style is not Style.JSON:
            check_references("", tool)
        before, after = format.name_form
        head = [json.dumps(before + written), *([f"/{after}/"] if after else [])]
        head += [self._write(format.name_end)] if format.name_end else []
        arguments = self._arguments(format)
        self.rules = [f"{name}: {' '.join([*head, arguments])}", *self._inner]

    def _write(self, text: str) -> str:
        return _literal(text, self._special)

    def _rule(self, body: str) -> str:
        """A rule of its own, by its name."""
        name = f"{self.name}v{len(self._inner)}"
        self._inner.append(f"{name}: {body}")
        return name

    def _arguments(self, format: ToolFormat) -> str:
        if format.style is Style.JSON:
            return f"ws {self._rule(_json({**self._parameters, **SPACING}))}"
        properties, required = self._values(_KEY[format.style])
        if format.tags is not None:
            return self._tagged(format.tags, properties, required)
        return self._keywords(properties, required)

    def _values(self, pattern: re.Pattern[str]) -> tuple[dict[str, Any], frozenset[str]]:
        """Parameters that are values by name and no more. Raises _Unwritable."""
        given = self._parameters
        properties, required = given.get("properties", {}), given.get("required", [])
        fine = set(given) <= _ROOT and given.get("type", "object") == "object" and isinstance(properties, dict) and isinstance(required, list)
        if not fine or not all(isinstance(each, str) and each in properties for each in required):
            raise _Unwritable
        if not all(pattern.fullmatch(key) and isinstance(schema, dict) for key, schema in properties.items()):
            raise _Unwritable
        return properties, frozenset(required)

    def _value(self, schema: Mapping[str, Any]) -> str:
        places = {name: self._parameters[name] for name in ("$defs", "definitions") if name in self._parameters}
        return self._rule(_json({**places, **schema, **SPACING}))

    def _tagged(self, tags: Tags, properties: Mapping[str, Any], required: Collection[str]) -> str:
        parts = []
        for key, schema in properties.items():
            lead = " ".join(["ws", self._write(tags.key_begin), json.dumps(key), self._write(tags.key_end)])
            lead += f" ws {self._write(tags.value_begin)}" if tags.value_begin else ""
            part = f"{lead} {self._tagged_value(tags, schema)}"
            parts.append(part if key in required else f"({part})?")
        return " ".join([*parts, "ws", self._write(tags.end)])

    def _tagged_value(self, tags: Tags, schema: Mapping[str, Any]) -> str:
        end = self._write(tags.value_end)
        if types_of(schema) != {"string"}:
            return f"ws {self._value(schema)} ws {end}"
        texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if texts is not None:
            if not _are_writable(texts, tags.value_end):
                raise _Unwritable
            return f'"\\n"? ({" | ".join(map(json.dumps, texts))}) "\\n"? {end}'
        if not set(schema) <= _TEXT or tags.value_end in self._special:
            raise _Unwritable
        return f'"\\n"? {self._rule_of_text(end)}'

    def _rule_of_text(self, end: str) -> str:
        name = f"{self.name}v{len(self._inner)}"
        self._inner.append(f"{name}[suffix={end}]: /(.|\\n)*/")
        return name

    def _keywords(self, properties: Mapping[str, Any], required: Collection[str]) -> str:
        """Those that are required first: then all others may follow a comma."""
        first = [self._keyword(key, schema) for key, schema in properties.items() if key in required]
        others = [self._keyword(key, schema) for key, schema in properties.items() if key not in required]
        if len(others) > _MOST_OPTIONAL:
            raise _Unwritable
        if first:
            return " ".join([' ", " '.join(first), *_after_comma(others), '")"'])
        chains = [" ".join([each, *_after_comma(others[index + 1 :])]) for index, each in enumerate(others)]
        return f'({" | ".join(chains)})? ")"' if chains else '")"'

    def _keyword(self, key: str, schema: Mapping[str, Any]) -> str:
        truth = types_of(schema) == {"boolean"} and not {"enum", "const"} & set(schema)
        value = '("True" | "False")' if truth else self._value(schema)
        return self._rule(f"{json.dumps(key + '=')} {value}")


def _are_writable(texts: Any, end: str) -> bool:
    """Whether a list that a client gave is of texts which come back as they are."""
    return isinstance(texts, list) and bool(texts) and all(isinstance(each, str) and each == each.strip() != "" and end not in each for each in texts)


def _after_comma(parts: Sequence[str]) -> list[str]:
    return [f'(", " {part})?' for part in parts]
