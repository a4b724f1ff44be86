"""Grammars that make a model write what its parser reads back: reasoning first, where it reasons, then the form that
was asked for.

What lives here: tool calls in a family's own way, as Lark for llguidance, and what may stand before a structure. What
may not: what counts as a call (parsing/), compiling (the engine).

A call that cannot be written so (parameters that are more than a list of values) is plain JSON from its first
character: a list of calls, or one function's arguments. Beside an answer, where no call need come, its values are then
any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from headrace.engine.grammar import special_name
from headrace.errors import InvalidRequest
from headrace.request import Given, Json, StructuredOutputs
from headrace.server.dialects.conversation import Tool, ToolChoice
from headrace.server.parsing import AnswerFormat
from headrace.server.parsing.formats import FORCED_ARGUMENTS, FORCED_CALLS, Literals, Style, Tags, ToolFormat
from headrace.server.tools import (
    PLACES,
    call_schema,
    check_arguments,
    check_references,
    forced_schema,
    grammar_of,
    guidance,
    parameters_of,
    types_of,
)

_NAME = re.compile(r"[\w.:/-]{1,200}")
_KEY = {
    Style.TAGS: re.compile(r"[^<>\"\n\s](?:[^<>\"\n]{0,198}[^<>\"\n\s])?"),
    Style.KEYWORDS: re.compile(r"\w{1,200}"),
}
_SAID = ("description", "title")
_ROOT = frozenset(("type", "properties", "required", "additionalProperties", "$schema", *_SAID, *PLACES))
_TEXT = frozenset(("type", "default", "examples", *_SAID))  # of a schema that any text satisfies
_MOST_OPTIONAL = 48  # parameters, of Python's arguments: their rules grow with its square
_SPACE = "ws: /[ \\n]{0,2}/\n"


Special = Collection[str]  # markers that are tokens of their own


class _Unwritable(Exception):
    """The family's own way cannot be put into a grammar."""


def constrain(
    form: AnswerFormat,
    tools: Sequence[Tool] | None,
    choice: ToolChoice,
    wanted: StructuredOutputs | None,
    special: Special,
) -> tuple[AnswerFormat, StructuredOutputs | None]:
    """The form in which what is asked for will come, and the grammar for it.

    Where a call is asked for, no answer is, whatever form ``wanted`` gives it; else there may be calls instead of one.
    Raises InvalidRequest for tools that cannot be called so.
    """
    form = replace(form, customs=tuple(choice.customs)) if choice.customs else form
    if choice.forced and tools and (custom := grammar_of(tools, choice)) is not None:
        form = replace(form, tools=None, text_of=custom[0])
        tools = None
        wanted = StructuredOutputs(grammar=custom[1].definition)
    if choice.forced and tools:
        form, calls = _constrain_to_calls(form, tools, choice, special)
        return form, replace(calls, preface=_preface(form, special, "@answer")) if form.reasoning is not None else calls
    if wanted is None:
        return form, wanted
    calls_too = _beside(form.tools, tools, choice, special) if form.tools is not None and tools else None
    answer = form.reasoning.answer if form.reasoning is not None else ("", "")
    first = " ".join([*_marked(answer[0], special), "@answer", *(f"({each})?" for each in _marked(answer[1], special))])
    if calls_too is None and form.reasoning is None:
        return form, wanted
    return form, replace(wanted, preface=_preface(form, special, first, calls_too))


def _beside(format: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, special: Special) -> _Calls:
    """Calls that may come instead of an answer."""
    check_arguments(tools, choice)
    try:
        return _Calls(format, tools, choice, special, beside=True)
    except _Unwritable:
        reason = "tools cannot be called beside this form of the answer: no grammar of this model's calls can hold their names or parameters"
        raise InvalidRequest(f"{reason}; leave out one of both, or simplify the schemas.", param="tools") from None


def _constrain_to_calls(
    form: AnswerFormat, tools: Sequence[Tool], choice: ToolChoice, special: Special
) -> tuple[AnswerFormat, StructuredOutputs]:
    check_arguments(tools, choice)
    if form.tools is not None:
        try:
            calls = _Calls(form.tools, tools, choice, special)
        except (_Unwritable, InvalidRequest):
            pass  # plain JSON then, or an error in its words
        else:
            return form, StructuredOutputs(grammar="\n".join([f"start: {calls.start}", *calls.rules, _SPACE]))
    format = FORCED_ARGUMENTS if choice.name else FORCED_CALLS
    plain = replace(form, tools=format, fixed_name=choice.name)
    if form.reasoning is not None and form.reasoning.channels is not None:
        plain = replace(plain, reasoning=None, opened=False)
    return plain, StructuredOutputs(json=forced_schema(tools, choice))


# --- reasoning


def _preface(form: AnswerFormat, special: Special, answer: str, calls: _Calls | None = None) -> str:
    """What stands before an ``answer``, or instead of it."""
    rules = [] if calls is None else calls.rules
    last = answer if calls is None else f"({answer} | {calls.start})"
    if form.reasoning is None:
        return "\n".join([f"start: {last}", *rules, _SPACE])
    reasoning = form.reasoning
    ended = _text_until(reasoning.end, special)
    after = " ".join(_marked(reasoning.next, special)) or "ws"
    must = form.opened or reasoning.implied  # it has begun, or always comes
    first = f"thought {after}" if must else f"({_literal(reasoning.begin, special)} thought {after})?"
    return "\n".join([f"start: {first} {last}", f"thought{ended}", *rules, _SPACE])


def _text_until(end: str, special: Special) -> str:
    """What follows a rule's name in Lark: any text, then ``end``. A special token is in no text, so that only it ends
    one."""
    pieces = _pieces(end, special)
    if not any(piece in special for piece in pieces):
        return f"[suffix={json.dumps(end)}]: /(.|\\n)*/"
    plain = "" if pieces[0] in special else "".join(f"\\x{{{ord(letter):x}}}" for letter in pieces.pop(0))
    return f": /(.|\\n)*{plain}/ {' '.join(_named(pieces, special))}"


# --- calls


def _pieces(text: str, special: Special) -> list[str]:
    """``text`` with special tokens apart."""
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    return [piece for piece in re.split(f"({names})", text) if piece]


def _named(pieces: Sequence[str], special: Special) -> list[str]:
    return [special_name(piece) if piece in special else json.dumps(piece, ensure_ascii=False) for piece in pieces]


def _literal(text: str, special: Special) -> str:
    """``text`` in Lark; special tokens in it by their names."""
    return " ".join(_named(_pieces(text, special), special))


def _marked(text: str, special: Special) -> list[str]:
    """A marker that a family may not have."""
    return [_literal(text, special)] if text else []


class _Calls:
    """Calls in a family's own way: rules in Lark, and what ``start`` is. ``beside``: where they may come, but need not.

    Raises _Unwritable, and InvalidRequest for definitions that do not go together.
    """

    def __init__(
        self, format: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, special: Special, *, beside: bool = False
    ) -> None:
        offered = [tool for tool in tools if not choice.name or tool["function"]["name"] == choice.name]
        self._format, self._special = format, special
        self.rules: list[str] = []
        calls = self._calls(offered, choice, beside)
        around = (self._literals(format.section_begin), self._literals(format.section_end))
        if format.section_each:
            around = ([], [])
        gap = " " if format.channels is not None else " ws "  # nothing may stand before a header
        separator = gap.join(["", *_marked(format.separator, special), ""]).strip()
        more = f" ({separator} call)*" if choice.parallel and not format.single else ""
        self.start = " ws ".join([*around[0], f"call{more}", *around[1]])
        self.rules.append(f"call: {calls}")

    def _literals(self, texts: Sequence[str]) -> list[str]:
        """Bare calls do without their markers."""
        return [_literal(text, self._special) for text in texts if not (self._format.bare and text.startswith("<"))]

    def _calls(self, tools: Sequence[Tool], choice: ToolChoice, beside: bool) -> str:
        format = self._format
        if format.style in (Style.OBJECT, Style.KEYED):
            self.rules.append(f"body: {_json(call_schema(tools, choice, format))}")
            return self._call("ws body ws")
        written = [_Function(format, tool, f"f{index}", self._special, beside) for index, tool in enumerate(tools)]
        self.rules += [rule for each in written for rule in each.rules]
        if format.lead:
            return " | ".join(
                f"{_literal(format.lead.format(name=tool['function']['name']), self._special)} {self._call(each.name)}"
                for each, tool in zip(written, tools, strict=True)
            )
        return self._call(f"({' | '.join(each.name for each in written)})")

    def _call(self, body: str) -> str:
        format = self._format
        call = " ".join(
            [*_marked(format.begin, self._special), body, *(f"ws {each}" for each in self._literals(format.end))]
        )
        if not format.section_each:
            return call
        return " ws ".join([*self._literals(format.section_begin), call, *self._literals(format.section_end)])


def _json(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"


class _Function:
    """One function's call behind what begins every call: rules in Lark, the first of which is ``name``."""

    def __init__(self, format: ToolFormat, tool: Tool, name: str, special: Special, beside: bool) -> None:
        self.name = name
        self._special = special
        self._beside = beside
        self._parameters = parameters_of(tool)
        self._guidance = guidance([tool])
        self._inner: list[str] = []
        written: str = tool["function"]["name"]
        if not _NAME.fullmatch(written):
            raise _Unwritable
        if format.style is not Style.JSON:
            check_references("", tool)
        before, after = format.name_form
        head = [json.dumps(before + written), *([f"/{after}/"] if after else []), *_marked(format.name_end, special)]
        arguments = self._arguments(format)
        self.rules = [f"{name}: {' '.join([*head, arguments])}", *self._inner]

    def _write(self, text: str) -> str:
        return _literal(text, self._special)

    def _rule(self, body: str) -> str:
        """A rule of its own, by its name."""
        return self._rule_of(f": {body}")

    def _rule_of(self, body: str) -> str:
        name = f"{self.name}v{len(self._inner)}"
        self._inner.append(name + body)
        return name

    def _arguments(self, format: ToolFormat) -> str:
        if format.style is Style.JSON:
            return f"ws {self._rule(_json({**self._parameters, **self._guidance}))}"
        try:
            properties, required = self._values(_KEY[format.style])
            if format.tags is None:
                return self._keywords(format.literals, properties, required)
            return self._tagged(format.tags, properties, required)
        except _Unwritable:
            if not self._beside or format.tags is None:
                raise
        tags = format.tags
        kind = '("true" | "false") ' + self._write(tags.kind_end) if tags.kind_end else ""
        value = " ".join([*_marked(tags.value_begin, self._special), self._text(tags.value_end)])
        part = f'ws {self._write(tags.key_begin)} /[^<>"\\n]{{1,200}}/ {self._write(tags.key_end)} {kind} {value}'
        return f"({part})* ws {self._write(tags.end)}"

    def _values(self, pattern: re.Pattern[str]) -> tuple[Json, frozenset[str]]:
        """Parameters that are values by name and no more. Raises _Unwritable."""
        given = self._parameters
        properties, required = given.get("properties", {}), given.get("required", [])
        fine = (
            set(given) <= _ROOT
            and given.get("type", "object") == "object"
            and isinstance(properties, dict)
            and isinstance(required, list)
        )
        if not fine or not all(isinstance(each, str) and each in properties for each in required):
            raise _Unwritable
        if not all(pattern.fullmatch(key) and isinstance(schema, dict) for key, schema in properties.items()):
            raise _Unwritable
        return properties, frozenset(required)

    def _value(self, schema: Given) -> str:
        places = {name: self._parameters[name] for name in ("$defs", "definitions") if name in self._parameters}
        return self._rule(_json({**places, **schema, **self._guidance}))

    def _tagged(self, tags: Tags, properties: Given, required: Collection[str]) -> str:
        parts = []
        for key, schema in properties.items():
            lead = ["ws", self._write(tags.key_begin), json.dumps(key), self._write(tags.key_end)]
            if tags.kind_end:
                lead += [json.dumps("true" if types_of(schema) == {"string"} else "false"), self._write(tags.kind_end)]
            lead += ["ws", self._write(tags.value_begin)] if tags.value_begin else []
            part = f"{' '.join(lead)} {self._tagged_value(tags, schema)}"
            parts.append(part if key in required else f"({part})?")
        return " ".join([*parts, "ws", self._write(tags.end)])

    def _tagged_value(self, tags: Tags, schema: Given) -> str:
        line = '"\\n"? ' if tags.lines else ""
        end = self._write(tags.value_end)
        if types_of(schema) != {"string"}:
            around = "ws " if tags.lines else ""
            return f"{around}{self._value(schema)} {around}{end}"
        texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if texts is not None:
            if not _are_writable(texts, tags.value_end):
                raise _Unwritable
            return f"{line}({' | '.join(map(json.dumps, texts))}) {line}{end}"
        if not set(schema) <= _TEXT:
            raise _Unwritable
        return f"{line}{self._text(tags.value_end)}"

    def _text(self, end: str) -> str:
        """The name of a rule for any text and its end."""
        return self._rule_of(_text_until(end, self._special))

    def _keywords(self, literals: Literals, properties: Given, required: Collection[str]) -> str:
        """Those that are required first: then all others may follow a comma."""
        comma = '","' if literals.quote else '", "'
        first = [self._keyword(literals, key, schema) for key, schema in properties.items() if key in required]
        others = [self._keyword(literals, key, schema) for key, schema in properties.items() if key not in required]
        if len(others) > _MOST_OPTIONAL:
            raise _Unwritable
        close = json.dumps(literals.close)
        if first:
            return " ".join([f" {comma} ".join(first), *_after(comma, others), close])
        chains = [" ".join([each, *_after(comma, others[index + 1 :])]) for index, each in enumerate(others)]
        return f"({' | '.join(chains)})? {close}" if chains else close

    def _keyword(self, literals: Literals, key: str, schema: Given) -> str:
        kinds, plain = types_of(schema), not {"enum", "const"} & set(schema)
        if kinds == {"boolean"} and plain and not literals.quote:
            value = '("True" | "False")'
        elif kinds == {"string"} and set(schema) <= _TEXT and literals.quote:
            value = f"{self._write(literals.quote)} {self._text(literals.quote)}"
        else:
            value = self._value(schema)
        return self._rule(f"{json.dumps(key + literals.assign)} {value}")


def _are_writable(texts: Any, end: str) -> bool:
    """Whether a list that a client gave is of texts which come back as they are."""
    return (
        isinstance(texts, list)
        and bool(texts)
        and all(isinstance(each, str) and each == each.strip() != "" and end not in each for each in texts)
    )


def _after(comma: str, parts: Sequence[str]) -> list[str]:
    return [f"({comma} {part})?" for part in parts]
