"""How model families write tool calls and reasoning: one description each, and which of them a chat template speaks of.

What lives here: data and its choice. What may not: parsing (parser.py), requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from headrace.config import Decision

_WHOLE = r"(?P<name>\S+)"


class Style(Enum):
    """How a call's arguments are written."""

    OBJECT = "an object with the name and the arguments"
    JSON = "the name, then an object"
    TAGS = "the name, then values between tags"
    KEYWORDS = "the name, then Python's keyword arguments"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """One argument is ``key_begin KEY key_end value_begin VALUE value_end``; a new line on either side of a value is not of it.

    ``end`` shows that there are no more.
    """

    key_begin: str
    key_end: str
    value_begin: str = ""
    value_end: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The calls of one answer: ``section_begin call (separator call)* section_end``; white space is allowed between all parts.

    A call is ``begin``, then either an object with a name and arguments, or a name, ``name_end`` and the arguments in ``style``, then
    ``end``. Ends may be missing.
    ``bare``: calls stand at the start of the answer, and its section need not begin; ``only``: and nowhere else.
    """

    name: str
    section_begin: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    section_each: bool = False  # the family writes a section for each call
    begin: str = ""
    end: tuple[str, ...] = ()
    separator: str = ""
    bare: bool = False
    only: bool = False
    style: Style = Style.OBJECT
    tags: Tags | None = None  # with Style.TAGS
    arguments_key: str = "arguments"  # in an object, where the family writes it; either of both is read
    name_end: str = ""
    name_pattern: str = _WHOLE  # of what stands before name_end
    name_form: tuple[str, str] = ("", "")  # what the family writes around a name: a text before, a pattern after
    id_length: int = 0  # letters and digits of a call's id, where the model's template insists on so many; 0: call_ and more

    @property
    def marker(self) -> str:
        """What shows in running text that calls begin; empty where nothing does."""
        return self.section_begin[0] if self.section_begin else self.begin

    @property
    def markers(self) -> tuple[str, ...]:
        tags = self.tags
        of_tags = (tags.key_begin, tags.key_end, tags.value_begin, tags.value_end, tags.end) if tags is not None else ()
        return (*self.section_begin, *self.section_end, self.begin, *self.end, self.name_end, *of_tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning comes first in an answer, between two markers. ``implied``: also where neither prompt nor answer begins it."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    implied: bool = False


_TOOL_FORMATS = (
    ToolFormat(name="hermes", begin="<tool_call>", end=("</tool_call>",)),
    ToolFormat(name="llama3_json", section_begin=("<|python_tag|>",), separator=";", bare=True, arguments_key="parameters"),
    ToolFormat(name="mistral", section_begin=("[TOOL_CALLS]", "["), section_end=("]",), separator=",", id_length=9),
    ToolFormat(
        name="mistral_args",
        begin="[TOOL_CALLS]",
        style=Style.JSON,
        name_end="[ARGS]",
        name_pattern=r"(?P<name>[^\s\[]+)(?:\[CALL_ID\]\w*)?",
        id_length=9,
    ),
    ToolFormat(
        name="deepseek_v3",
        section_begin=("<｜tool▁calls▁begin｜>",),
        section_end=("<｜tool▁calls▁end｜>",),
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        style=Style.JSON,
        name_end="```json",
        end=("```", "<｜tool▁call▁end｜>"),
    ),
    ToolFormat(
        name="deepseek_v31",
        section_begin=("<｜tool▁calls▁begin｜>",),
        section_end=("<｜tool▁calls▁end｜>",),
        begin="<｜tool▁call▁begin｜>",
        style=Style.JSON,
        name_end="<｜tool▁sep｜>",
        end=("<｜tool▁call▁end｜>",),
    ),
    ToolFormat(
        name="kimi_k2",
        section_begin=("<|tool_calls_section_begin|>",),
        section_end=("<|tool_calls_section_end|>",),
        begin="<|tool_call_begin|>",
        style=Style.JSON,
        name_end="<|tool_call_argument_begin|>",
        name_pattern=r"(?:functions\.)?(?P<name>[^\s:]+)(?::[0-9]+)?",
        name_form=("functions.", ":[0-9]{1,2}"),
        end=("<|tool_call_end|>",),
    ),
    ToolFormat(
        name="qwen3_coder",
        section_begin=("<tool_call>",),
        section_end=("</tool_call>",),
        section_each=True,
        begin="<function=",
        style=Style.TAGS,
        name_end=">",
        tags=Tags(key_begin="<parameter=", key_end=">", value_end="</parameter>", end="</function>"),
    ),
    ToolFormat(
        name="glm45",
        begin="<tool_call>",
        style=Style.TAGS,
        tags=Tags(key_begin="<arg_key>", key_end="</arg_key>", value_begin="<arg_value>", value_end="</arg_value>", end="</tool_call>"),
    ),
    ToolFormat(
        name="minimax_m2",
        section_begin=("<minimax:tool_call>",),
        section_end=("</minimax:tool_call>",),
        begin='<invoke name="',
        style=Style.TAGS,
        name_end='">',
        tags=Tags(key_begin='<parameter name="', key_end='">', value_end="</parameter>", end="</invoke>"),
    ),
    ToolFormat(
        name="pythonic",
        section_begin=("<|python_start|>", "["),
        section_end=("]", "<|python_end|>"),
        separator=",",
        bare=True,
        style=Style.KEYWORDS,
        name_end="(",
    ),
    ToolFormat(
        name="lfm2",
        section_begin=("<|tool_call_start|>", "["),
        section_end=("]", "<|tool_call_end|>"),
        separator=",",
        style=Style.KEYWORDS,
        name_end="(",
    ),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _TOOL_FORMATS}

# What a grammar makes of an answer whose calls are forced: a list of calls, or the arguments of one function.
FORCED_CALLS = ToolFormat(name="forced", section_begin=("[",), section_end=("]",), separator=",", bare=True, only=True)
FORCED_ARGUMENTS = ToolFormat(name="forced", bare=True, only=True)

_REASONING_FORMATS = (
    ReasoningFormat(name="qwen3"),
    ReasoningFormat(name="deepseek_r1", implied=True),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]"),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {each.name: each for each in _REASONING_FORMATS}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one model's answers are made of. None: nothing of the kind is taken out of the text."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the parser, though a tokenizer may call them special."""
        tools, thoughts = self.tools, self.reasoning
        of_tools = tools.markers if tools is not None else ()
        of_thoughts = (thoughts.begin, thoughts.end) if thoughts is not None else ()
        return tuple(marker for marker in (*of_tools, *of_thoughts) if marker)

    @property
    def names(self) -> frozenset[str]:
        """What in the markers may be tokens by itself."""
        return frozenset(name for marker in self.markers for name in _NAMES.findall(marker))


_NAMES = re.compile(r"<[^<>]+>|\[[A-Z/_]+\]")

# Which format a chat template speaks of: the first whose texts are all there and of whose others none is.
_Sign = tuple[str, tuple[str, ...], tuple[str, ...]]
_TOOL_SIGNS: tuple[_Sign, ...] = (
    ("hermes", ("<tool_call>", "arguments"), ("<arg_key>", "<function=")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",), ()),
    ("kimi_k2", ("<|tool_call_begin|>",), ()),
    ("qwen3_coder", ("<function=", "<parameter="), ()),
    ("glm45", ("<tool_call>", "<arg_key>"), ()),
    ("minimax_m2", ("minimax:tool_call", "<invoke name="), ()),
    ("lfm2", ("<|tool_call_start|>[",), ()),
    ("pythonic", ("[func_name1(",), ()),
    ("llama3_json", ("<|start_header_id|>", '"parameters": '), ()),
)
_REASONING_SIGNS: tuple[_Sign, ...] = (
    ("deepseek_r1", ("</think>", "<｜Assistant｜>"), ()),
    ("qwen3", ("<think>", "</think>"), ()),
    ("mistral", ("[THINK]",), ()),
)


def choose_dialect(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> tuple[Dialect, tuple[Decision, ...]]:
    """From the chat template's text, unless named; ``none`` takes nothing out of the text."""
    tools, of_tools = _choose("tool_call_parser", tool_parser, template, _TOOL_SIGNS)
    reasoning, of_reasoning = _choose("reasoning_parser", reasoning_parser, template, _REASONING_SIGNS)
    return Dialect(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning)), (*of_tools, *of_reasoning)


def _choose(flag: str, named: str, template: str, signs: Iterable[_Sign]) -> tuple[str, tuple[Decision, ...]]:
    if named != "auto":
        return named, ()
    for name, present, absent in signs:
        if all(text in template for text in present) and not any(text in template for text in absent):
            return name, (Decision(flag, name, f"the chat template writes {present[0]}"),)
    return "none", ()
