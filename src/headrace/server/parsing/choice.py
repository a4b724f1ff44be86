"""Which description a model's answers follow: named by the user, or read off its chat template and tried.

What lives here: signs in a template's text, and a trial: a call is rendered and read back. What may not: formats
themselves.

The signs are a guess. Where the template renders calls, the first description that reads them back as they were meant
is the one; and where none does, the user is told.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.config import Decision
from headrace.errors import HeadraceError
from headrace.server.parsing import answer_format
from headrace.server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, TRIAL, Formats, ReasoningFormat, ToolFormat
from headrace.server.parsing.segments import Segment, ToolCallStart, argument_texts

if TYPE_CHECKING:
    from headrace.engine.tokenizer import Tokenizer

Format = TypeVar("Format", bound=ToolFormat | ReasoningFormat)
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None, bool], str]

_NAME = TRIAL.function["name"]
_TYPES = {name: (each["type"],) for name, each in TRIAL.function["parameters"]["properties"].items()}


def formats_of(
    tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto"
) -> tuple[Formats, tuple[Decision, ...]]:
    """A model's, with the choices that were made. Renders some times: not for an event loop."""
    return choose_formats(
        "\n".join(tokenizer.chat_templates.values()), tool_parser, reasoning_parser, tokenizer.apply_chat_template
    )


def choose_formats(
    template: str, tool_parser: str = "auto", reasoning_parser: str = "auto", render: Render | None = None
) -> tuple[Formats, tuple[Decision, ...]]:
    """``none`` takes nothing out of the text. ``render``: by the model's own template; None: it is not tried. Raises
    nothing."""
    guessed = _choose(tool_parser, template, TOOL_FORMATS)
    reasoning = _choose(reasoning_parser, template, REASONING_FORMATS)
    tools, decisions = guessed, []
    if guessed is not None and tool_parser == "auto":
        decisions.append(Decision("tool_call_parser", guessed.name, f"the chat template writes {guessed.signs[0]}"))
    rendered = None if render is None or tool_parser == "none" else rendered_call(render)
    if rendered is not None:
        tools, told = _tried(guessed, rendered, named=tool_parser != "auto")
        decisions = told or decisions
    if reasoning is not None and reasoning_parser == "auto":
        decisions.append(Decision("reasoning_parser", reasoning.name, f"the chat template writes {reasoning.signs[0]}"))
    return Formats(tools, reasoning), tuple(decisions)


def _choose(named: str, template: str, formats: Mapping[str, Format]) -> Format | None:
    """By name; of several that go by it, and without one, by the signs in the template."""
    if named == "none":
        return None
    rows = (
        list(formats.values())
        if named == "auto"
        else [row for row in formats.values() if named in (row.name, *row.aliases)]
    )
    shown = [row for row in rows if row.signs and _shows(template, row.signs, row.unlike)]
    if shown or named == "auto":
        return shown[0] if shown else None
    return formats.get(named, rows[0])


def _shows(template: str, signs: Collection[str], unlike: Collection[str]) -> bool:
    return all(text in template for text in signs) and not any(text in template for text in unlike)


# --- the trial


def rendered_call(render: Render) -> tuple[str, str] | None:
    """What the template makes of an answer with a call, and the beginning that every answer has; None where it shows no
    calls."""
    asked, tools = {"role": "user", "content": TRIAL.question}, [{"type": "function", "function": TRIAL.function}]
    try:
        begun = render([asked], tools, True).rpartition(TRIAL.question)[2]
    except HeadraceError:
        return None
    for content, id in itertools.product(("", None), TRIAL.ids):
        call = {"id": id, "type": "function", "function": {"name": _NAME, "arguments": TRIAL.arguments}}
        with contextlib.suppress(HeadraceError):
            text = render(
                [asked, {"role": "assistant", "content": content, "tool_calls": [call]}], tools, False
            ).rpartition(TRIAL.question)[2]
            return (text, begun) if _NAME in text else None
    return None


def _tried(
    guessed: ToolFormat | None, rendered: tuple[str, str], *, named: bool
) -> tuple[ToolFormat | None, list[Decision]]:
    if guessed is not None and reads_back(guessed, *rendered):
        return guessed, [] if named else [
            Decision("tool_call_parser", guessed.name, "a call of the chat template's reads back")
        ]
    if named and guessed is not None:
        why = "as named, though a call that the chat template renders does not read back; auto tries all formats"
        return guessed, [Decision("tool_call_parser", guessed.name, why)]
    found = next((each for each in TOOL_FORMATS.values() if reads_back(each, *rendered)), None)
    if found is not None:
        return found, [Decision("tool_call_parser", found.name, "a call of the chat template's reads back")]
    if guessed is not None:
        why = f"the chat template writes {guessed.signs[0]}, though a call that it renders does not read back"
        return guessed, [Decision("tool_call_parser", guessed.name, why)]
    why = "calls stay in the text: no known format reads the chat template's back; name one with --tool-call-parser"
    return None, [Decision("tool_call_parser", "none", why)]


def reads_back(format: ToolFormat, text: str, begun: str) -> bool:
    """Whether a call that was rendered comes out as it went in. Where an answer begins is known only about."""
    prefix = next(
        (index for index, pair in enumerate(zip(text, begun, strict=False)) if pair[0] != pair[1]),
        min(len(text), len(begun)),
    )
    wanted = [(_NAME, TRIAL.arguments)]
    return any(
        _calls_in(format, text[start:]) == wanted
        for start in dict.fromkeys((prefix, text.rfind("<", 0, prefix + 1), 0))
        if start >= 0
    )


def _calls_in(format: ToolFormat, text: str) -> list[tuple[str, Any]]:
    parser = answer_format(Formats(format, None), "", {_NAME: _TYPES}).create_parser()
    assert parser is not None
    segments: list[Segment] = [*parser.push(text), *parser.finish()]
    texts = argument_texts(segments)
    try:
        return [(each.name, json.loads(texts[each.index])) for each in segments if isinstance(each, ToolCallStart)]
    except ValueError:
        return []
