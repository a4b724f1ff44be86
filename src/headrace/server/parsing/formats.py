"""How model families write tool calls and reasoning: one description each, and which of them a chat template speaks of.

What lives here: data and its choice. What may not: parsing (parser.py), requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.config import Decision

_WHOLE = r"(?P<name>\S+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The calls of one answer: ``section_begin call (separator call)* section_end``; white space is allowed between all parts.

    A call is ``begin``, then either an object with a name and arguments, or (``name_end``) a name up to there and the bare
    arguments, then ``end``. Ends may be missing.
    ``bare``: calls stand at the start of the answer, and its section need not begin; ``only``: and nowhere else.
    """

    name: str
    section_begin: tuple[str, ...] = ()
    section_end: tuple[str, ...] = ()
    begin: str = ""
    end: tuple[str, ...] = ()
    separator: str = ""
    bare: bool = False
    only: bool = False
    name_end: str = ""
    name_pattern: str = _WHOLE  # of what stands before name_end
    id_length: int = 0  # letters and digits of a call's id, where the model's template insists on so many; 0: call_ and more

    @property
    def marker(self) -> str:
        """What shows in running text that calls begin; empty where nothing does."""
        return self.section_begin[0] if self.section_begin else self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning comes first in an answer, between two markers. ``implied``: also where neither prompt nor answer begins it."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    implied: bool = False


_TOOL_FORMATS = (
    ToolFormat(name="hermes", begin="<tool_call>", end=("</tool_call>",)),
    ToolFormat(name="llama3_json", section_begin=("<|python_tag|>",), separator=";", bare=True),
    ToolFormat(name="mistral", section_begin=("[TOOL_CALLS]", "["), section_end=("]",), separator=",", id_length=9),
    ToolFormat(name="mistral_args", begin="[TOOL_CALLS]", name_end="[ARGS]", name_pattern=r"(?P<name>[^\s\[]+)(?:\[CALL_ID\]\w*)?", id_length=9),
    ToolFormat(
        name="deepseek_v3",
        section_begin=("<｜tool▁calls▁begin｜>",),
        section_end=("<｜tool▁calls▁end｜>",),
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="```json",
        end=("```", "<｜tool▁call▁end｜>"),
    ),
    ToolFormat(
        name="deepseek_v31",
        section_begin=("<｜tool▁calls▁begin｜>",),
        section_end=("<｜tool▁calls▁end｜>",),
        begin="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        end=("<｜tool▁call▁end｜>",),
    ),
    ToolFormat(
        name="kimi_k2",
        section_begin=("<|tool_calls_section_begin|>",),
        section_end=("<|tool_calls_section_end|>",),
        begin="<|tool_call_begin|>",
        name_end="<|tool_call_argument_begin|>",
        name_pattern=r"(?:functions\.)?(?P<name>[^\s:]+)(?::[0-9]+)?",
        end=("<|tool_call_end|>",),
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
        of_tools = (*tools.section_begin, *tools.section_end, tools.begin, *tools.end, tools.name_end) if tools is not None else ()
        of_thoughts = (thoughts.begin, thoughts.end) if thoughts is not None else ()
        return tuple(marker for marker in (*of_tools, *of_thoughts) if marker)


# Which format a chat template speaks of: the first whose texts are all there and of whose others none is.
_Sign = tuple[str, tuple[str, ...], tuple[str, ...]]
_TOOL_SIGNS: tuple[_Sign, ...] = (
    ("hermes", ("<tool_call>", "arguments"), ("<arg_key>", "<function=")),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json"), ()),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",), ()),
    ("kimi_k2", ("<|tool_call_begin|>",), ()),
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
