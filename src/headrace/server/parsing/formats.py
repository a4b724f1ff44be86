"""How model families write tool calls and reasoning: what a row of formats.toml may say.

What lives here: that, and reading the rows. What may not: parsing (parser.py), which row is a model's (choice.py),
requests.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

_WHOLE = r"(?P<name>\S+)"


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Style(Enum):
    """How a call's name and arguments are written."""

    OBJECT = "object"  # an object with the name and the arguments
    KEYED = "keyed"  # an object of the arguments by the name
    JSON = "json"  # the name, then an object
    TAGS = "tags"  # the name, then values between tags
    KEYWORDS = "keywords"  # the name, then keys and literals


class Tags(_Row, frozen=True, kw_only=True):
    """One argument is ``key_begin KEY key_end value_begin VALUE value_end``. ``end`` shows that there are no more.

    ``lines``: a new line on either side of a value is not of it. ``kind_end``: after key_end comes ``true`` where the
    value is a text, ``false`` where it is JSON, then this.
    """

    key_begin: str
    key_end: str
    kind_end: str = ""
    value_begin: str = ""
    value_end: str
    end: str
    lines: bool = False


class Literals(_Row, frozen=True, kw_only=True):
    """``KEY assign VALUE, … close``. Values are Python's literals or JSON's; with ``quote``, texts stand between two of
    it, as they are."""

    assign: str = "="
    close: str = ")"
    quote: str = ""


class Channels(_Row, frozen=True, kw_only=True):
    """An answer is messages. Each is a header up to ``header_end`` and a text up to one of ``ends``, or to ``start``,
    which begins the next.

    The prompt has begun the first. What a header says it is: reasoning, a call (whose ``name`` it may hold), or what
    the user reads; what is none of these is no header. ``known``: nor is what calls no function that was offered.
    """

    start: str
    header_end: str
    ends: tuple[str, ...] = ()
    reasoning: str = r"(?!)"
    call: str
    content: str
    known: bool = False


class _Format(_Row, frozen=True, kw_only=True):
    """What a family writes. ``signs``, ``unlike``: texts that are in its chat templates, and that are not."""

    name: str
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()  # texts around what the user reads, which are not of it
    channels: Channels | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        channels = self.channels
        headers = (channels.start, channels.header_end, *channels.ends) if channels is not None else ()
        return (*self.wrappers, *headers)


class ToolFormat(_Format, frozen=True, kw_only=True):
    """The calls of one answer: ``section_begin call (separator call)* section_end``; white space is allowed between all
    parts.

    A call is ``begin``, then what ``style`` says, with ``name_end`` after a name that stands alone, then ``end``. Ends
    may be missing. ``bare``: calls stand at the start of the answer, and its section need not begin; ``only``: and
    nowhere else. ``loose``: a section may begin with its first call.
    """

    section_begin: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    section_each: bool = False  # the family writes a section for each call
    begin: str = ""
    end: tuple[str, ...] = ()
    separator: str = ""
    bare: bool = False
    only: bool = False
    loose: bool = False
    single: bool = False  # an answer ends with its first call
    style: Style = Style.OBJECT
    tags: Tags | None = None  # with Style.TAGS
    literals: Literals = Literals()  # with Style.KEYWORDS
    name_key: str = "name"  # in an object, where the family writes it; others' are read, too
    arguments_key: str = "arguments"
    number_key: str = ""  # of what numbers the calls of one answer
    lead: str = ""  # written before all of a call, {name} in it
    name_end: str = ""
    name_pattern: str = _WHOLE  # of what stands before name_end; its group id, if it has one, is the call's
    name_form: tuple[str, str] = ("", "")  # what the family writes around a name: a text before, a pattern after
    id_length: int = 0  # letters and digits of a call's id, where the model's template insists on so many
    id_form: str = ""  # an id as the template wants it, of name and index; neither: call_ and more

    @property
    def marker(self) -> str:
        """What shows in running text that calls begin; empty where nothing does."""
        return self.section_begin[0] if self.section_begin else self.begin

    @property
    def markers(self) -> tuple[str, ...]:
        tags = self.tags
        of_tags = (tags.key_begin, tags.key_end, tags.value_begin, tags.value_end, tags.end) if tags is not None else ()
        alone = (self.begin, self.separator, self.lead, self.name_end, self.literals.quote)
        return (*self.section_begin, *self.section_end, *self.end, *alone, *of_tags, *super().markers)


class ReasoningFormat(_Format, frozen=True, kw_only=True):
    """Reasoning comes first in an answer, between two markers. ``implied``: also where neither prompt nor answer begins
    it.

    ``answer``: written around what the user reads. ``next``: written between reasoning and what follows it.
    """

    begin: str = "<think>"
    end: str = "</think>"
    implied: bool = False
    next: str = ""
    answer: tuple[str, str] = ("", "")

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.next, *self.answer, *super().markers)


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question, and the call that answers it."""

    question: str
    ids: tuple[str, ...]
    arguments: dict[str, Any]
    function: dict[str, Any]


def _read() -> tuple[dict[str, ToolFormat], dict[str, ReasoningFormat], Trial]:
    rows = tomllib.loads(Path(__file__).with_name("formats.toml").read_text(encoding="utf-8"))
    for kind in ("tools", "reasoning"):
        for name, row in rows[kind].items():
            row["name"] = name
            if "channels" in row:
                row["channels"] = rows["channels"][row["channels"]]
    tools = msgspec.convert(rows["tools"], dict[str, ToolFormat])
    return tools, msgspec.convert(rows["reasoning"], dict[str, ReasoningFormat]), msgspec.convert(rows["trial"], Trial)


TOOL_FORMATS, REASONING_FORMATS, TRIAL = _read()

# What a grammar makes of an answer whose calls are forced: a list of calls, or the arguments of one function.
FORCED_CALLS = ToolFormat(name="forced", section_begin=("[",), section_end=("]",), separator=",", bare=True, only=True)
FORCED_ARGUMENTS = ToolFormat(name="forced", bare=True, only=True)


@dataclass(frozen=True, slots=True)
class Formats:
    """What one model's answers are made of. None: nothing of the kind is taken out of the text."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def names(self) -> frozenset[str]:
        """What in the markers may be tokens by itself: they must reach the parser, though a tokenizer may call them
        special."""
        markers = (*(self.tools.markers if self.tools else ()), *(self.reasoning.markers if self.reasoning else ()))
        return frozenset(name for marker in markers for name in _NAMES.findall(marker))


_NAMES = re.compile(r"<[^<>]+>|\[[A-Z/_]+\]|｜[^｜<>]+｜")
