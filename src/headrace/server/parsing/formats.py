"""How model families write tool calls and reasoning: a row each, by the names that vLLM has for them, too.

What lives here: data. What may not: parsing (parser.py), which row is a model's (choice.py), requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

_WHOLE = r"(?P<name>\S+)"


class Style(Enum):
    """How a call's name and arguments are written."""

    OBJECT = "an object with the name and the arguments"
    KEYED = "an object of the arguments by the name"
    JSON = "the name, then an object"
    TAGS = "the name, then values between tags"
    KEYWORDS = "the name, then keys and literals"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """One argument is ``key_begin KEY key_end value_begin VALUE value_end``. ``end`` shows that there are no more.

    ``lines``: a new line on either side of a value is not of it. ``kind_end``: after key_end comes ``true`` where the value is a text,
    ``false`` where it is JSON, then this.
    """

    key_begin: str
    key_end: str
    kind_end: str = ""
    value_begin: str = ""
    value_end: str
    end: str
    lines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """``KEY assign VALUE, … close``. Values are Python's literals or JSON's; with ``quote``, texts stand between two of it, as they are."""

    assign: str = "="
    close: str = ")"
    quote: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """An answer is messages. Each is a header up to ``header_end`` and a text up to one of ``ends``, or to ``start``, which begins the next.

    The prompt has begun the first. What a header says it is: reasoning, a call (whose ``name`` it may hold), or what the user reads;
    what is none of these is no header. ``known``: nor is what calls no function that was offered.
    """

    start: str
    header_end: str
    ends: tuple[str, ...] = ()
    reasoning: str = r"(?!)"
    call: str
    content: str
    known: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The calls of one answer: ``section_begin call (separator call)* section_end``; white space is allowed between all parts.

    A call is ``begin``, then what ``style`` says, with ``name_end`` after a name that stands alone, then ``end``. Ends may be missing.
    ``bare``: calls stand at the start of the answer, and its section need not begin; ``only``: and nowhere else. ``loose``: a section
    may begin with its first call. ``signs``, ``unlike``: texts that are in the chat templates of the family, and that are not.
    """

    name: str
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
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
    wrappers: tuple[str, ...] = ()  # texts around what the user reads, which are not of it
    channels: Channels | None = None

    @property
    def marker(self) -> str:
        """What shows in running text that calls begin; empty where nothing does."""
        return self.section_begin[0] if self.section_begin else self.begin

    @property
    def markers(self) -> tuple[str, ...]:
        tags, quote = self.tags, self.literals.quote
        of_tags = (tags.key_begin, tags.key_end, tags.value_begin, tags.value_end, tags.end) if tags is not None else ()
        own = (*self.section_begin, *self.section_end, self.begin, *self.end, self.separator, self.lead, self.name_end, quote)
        return (*own, *of_tags, *self.wrappers, *_markers(self.channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Reasoning comes first in an answer, between two markers. ``implied``: also where neither prompt nor answer begins it.

    ``answer``: written around what the user reads. ``next``: written between reasoning and what follows it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    begin: str = "<think>"
    end: str = "</think>"
    implied: bool = False
    next: str = ""
    answer: tuple[str, str] = ("", "")
    wrappers: tuple[str, ...] = ()
    channels: Channels | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.next, *self.answer, *self.wrappers, *_markers(self.channels))


def _markers(channels: Channels | None) -> tuple[str, ...]:
    return (channels.start, channels.header_end, *channels.ends) if channels is not None else ()


_HARMONY = Channels(
    start="<|start|>assistant",
    header_end="<|message|>",
    ends=("<|end|>", "<|call|>", "<|return|>"),
    reasoning=r"<\|channel\|>analysis",
    call=r".*\bto=(?:functions\.)?(?P<name>[\w.-]+).*",
    content=r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>.*)?",
)
_MUSE = Channels(
    start="<|start|>assistant",
    header_end="<|message|>",
    ends=("<|eom|>", "<|eot|>"),
    reasoning="to=self",
    call=r"to=(?!user$)\S+",
    content="(?:to=user)?",
)
_FUNCTIONARY = Channels(start=">>>", header_end="\n", call=r"(?P<name>[\w.:-]+)", content="all", known=True)
_COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


def _dsml(tag: str, name: str, *aliases: str) -> ToolFormat:
    """DeepSeek's two are told apart by what their section is called."""
    return ToolFormat(
        name=name,
        aliases=aliases,
        signs=("｜DSML｜", tag),
        section_begin=(f"<｜DSML｜{tag}>",),
        section_end=(f"</｜DSML｜{tag}>",),
        begin='<｜DSML｜invoke name="',
        style=Style.TAGS,
        name_end='">',
        tags=Tags(
            key_begin='<｜DSML｜parameter name="',
            key_end='" string="',
            kind_end='">',
            value_end="</｜DSML｜parameter>",
            end="</｜DSML｜invoke>",
        ),
    )


def _invoked(prefix: str) -> Tags:
    """``<parameter name="…">…`` in ``<invoke name="…">``, whose tags some families give a prefix."""
    return Tags(key_begin=f'<{prefix}parameter name="', key_end='">', value_end=f"</{prefix}parameter>", end=f"</{prefix}invoke>")


def _functions(section: str, name: str, *aliases: str, signs: tuple[str, ...], lines: bool) -> ToolFormat:
    """``<function=…><parameter=…>…``, each in a section of its own."""
    tags = Tags(key_begin="<parameter=", key_end=">", value_end="</parameter>", end="</function>", lines=lines)
    return ToolFormat(
        name=name,
        aliases=aliases,
        signs=signs,
        section_begin=(f"<{section}>",),
        section_end=(f"</{section}>",),
        section_each=True,
        loose=True,
        begin="<function=",
        style=Style.TAGS,
        name_end=">",
        tags=tags,
    )


def _list(name: str, begin: str, end: str = "", *aliases: str, signs: tuple[str, ...] = (), **further: object) -> ToolFormat:
    """A list of objects behind a marker, and before one."""
    ends = ("]", end) if end else ("]",)
    fields: dict[str, object] = {"section_begin": (begin, "["), "section_end": ends, "signs": signs or (begin,), **further}
    return ToolFormat(name=name, aliases=aliases, separator=",", **fields)  # type: ignore[arg-type]


# Where the signs of two are in a template, the first is meant.
_TOOL_FORMATS = (
    ToolFormat(
        name="hermes",
        aliases=("granite4", "ernie45", "qwen25"),
        signs=("<tool_call>", "arguments"),
        unlike=("<arg_key>", "<function="),
        begin="<tool_call>",
        end=("</tool_call>",),
    ),
    ToolFormat(
        name="mistral_args",
        aliases=("mistral",),
        signs=("[TOOL_CALLS]", "[ARGS]"),
        begin="[TOOL_CALLS]",
        style=Style.JSON,
        name_end="[ARGS]",
        name_pattern=r"(?P<name>[^\s\[]+)(?:\[CALL_ID\](?P<id>\w+))?",
        id_length=9,
    ),
    _list("mistral", "[TOOL_CALLS]", id_length=9),
    ToolFormat(
        name="deepseek_v3",
        signs=("<｜tool▁call▁begin｜>", "```json"),
        section_begin=("<｜tool▁calls▁begin｜>",),
        section_end=("<｜tool▁calls▁end｜>",),
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        style=Style.JSON,
        name_end="```json",
        end=("```", "<｜tool▁call▁end｜>"),
    ),
    ToolFormat(
        name="deepseek_v31",
        signs=("<｜tool▁call▁begin｜>",),
        section_begin=("<｜tool▁calls▁begin｜>",),
        section_end=("<｜tool▁calls▁end｜>",),
        begin="<｜tool▁call▁begin｜>",
        style=Style.JSON,
        name_end="<｜tool▁sep｜>",
        end=("<｜tool▁call▁end｜>",),
    ),
    _dsml("function_calls", "deepseek_v32"),
    _dsml("tool_calls", "deepseek_v4"),
    ToolFormat(
        name="kimi_k2",
        signs=("<|tool_call_begin|>",),
        section_begin=("<|tool_calls_section_begin|>",),
        section_end=("<|tool_calls_section_end|>",),
        begin="<|tool_call_begin|>",
        style=Style.JSON,
        name_end="<|tool_call_argument_begin|>",
        name_pattern=r"(?=(?P<id>functions\.[^\s:]+:[0-9]+)?)(?:functions\.)?(?P<name>[^\s:]+)(?::[0-9]+)?",
        name_form=("functions.", ":[0-9]{1,2}"),
        id_form="functions.{name}:{index}",
        end=("<|tool_call_end|>",),
    ),
    _functions("tool_call", "qwen3_coder", "qwen3_xml", "step3p5", "mimo", signs=("<function=", "<parameter=", "<tool_call>"), lines=True),
    _functions("seed:tool_call", "seed_oss", signs=("seed:tool_call", "<parameter="), lines=False),
    ToolFormat(
        name="glm45",
        aliases=("glm47", "poolside_v1", "ling3"),
        signs=("<tool_call>", "<arg_key>"),
        begin="<tool_call>",
        style=Style.TAGS,
        tags=Tags(key_begin="<arg_key>", key_end="</arg_key>", value_begin="<arg_value>", value_end="</arg_value>", end="</tool_call>"),
    ),
    ToolFormat(
        name="minimax_m2",
        signs=("minimax:tool_call", "<invoke name="),
        section_begin=("<minimax:tool_call>",),
        section_end=("</minimax:tool_call>",),
        begin='<invoke name="',
        style=Style.TAGS,
        name_end='">',
        tags=_invoked(""),
    ),
    ToolFormat(
        name="muse_glimmer",
        signs=("<atem:invoke name=",),
        section_begin=("<atem:function_calls>",),
        section_end=("</atem:function_calls>",),
        section_each=True,
        lead=" to={name}<|message|>",
        begin='<atem:invoke name="',
        style=Style.TAGS,
        name_end='">',
        tags=_invoked("atem:"),
        separator="<|eom|><|start|>assistant",
        channels=_MUSE,
    ),
    ToolFormat(
        name="step3",
        signs=("<｜tool_calls_begin｜>",),
        section_begin=("<｜tool_calls_begin｜>",),
        section_end=("<｜tool_calls_end｜>",),
        begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        style=Style.TAGS,
        name_end='">',
        tags=_invoked("steptml:"),
        end=("<｜tool_call_end｜>",),
    ),
    ToolFormat(
        name="openai",
        aliases=("gpt_oss",),
        signs=("<|start|>assistant", "<|channel|>", "functions."),
        begin="<|channel|>commentary to=functions.",
        style=Style.JSON,
        name_end=" <|constrain|>json<|message|>",
        single=True,
        channels=_HARMONY,
    ),
    ToolFormat(
        name="functionary",
        signs=(">>>", "recipient"),
        style=Style.JSON,
        name_end="\n",
        separator=">>>",
        channels=_FUNCTIONARY,
    ),
    ToolFormat(
        name="functionary_v31",
        signs=("<function=", "</function>"),
        unlike=("<parameter=",),
        begin="<function=",
        style=Style.JSON,
        name_end=">",
        name_pattern=r"(?P<name>[\w.:/-]+)",
        end=("</function>",),
    ),
    _list(
        "cohere_command3",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "cohere_command4",
        "cohere",
        name_key="tool_name",
        arguments_key="parameters",
        number_key="tool_call_id",
        wrappers=_COHERE,
    ),
    ToolFormat(
        name="command_r",
        signs=("Action:", "```json", "tool_name"),
        section_begin=("Action:", "```json", "["),
        section_end=("]", "```"),
        separator=",",
        name_key="tool_name",
        arguments_key="parameters",
    ),
    _list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>", "nemotron"),
    _list("jamba", "<tool_calls>", "</tool_calls>", "hunyuan_a13b", "apriel", signs=("<tool_calls>[",)),
    ToolFormat(name="minimax", signs=("<tool_calls>",), section_begin=("<tool_calls>",), section_end=("</tool_calls>",)),
    _list("phi4_mini", "<|tool_call|>", "<|/tool_call|>", signs=("<|/tool_call|>",)),
    _list("granite", "<|tool_call|>"),
    _list("phi4_mini_json", "functools", "", "firefunction", signs=("functools",)),
    ToolFormat(name="granite-20b-fc", signs=("<function_call>",), begin="<function_call>"),
    ToolFormat(
        name="internlm",
        signs=("<|action_start|>",),
        begin="<|action_start|><|plugin|>",
        end=("<|action_end|>",),
        arguments_key="parameters",
    ),
    ToolFormat(name="longcat", signs=("<longcat_tool_call>",), begin="<longcat_tool_call>", end=("</longcat_tool_call>",)),
    ToolFormat(name="gigachat31", aliases=("gigachat3",), signs=("<|function_call|>",), begin="<|function_call|>"),
    ToolFormat(name="gigachat3", signs=("function call<|role_sep|>",), begin="function call<|role_sep|>"),
    _list("apertus", "<|tools_prefix|>", "<|tools_suffix|>", style=Style.KEYED),
    ToolFormat(
        name="gemma4",
        signs=("<|tool_call>call:",),
        begin="<|tool_call>call:",
        style=Style.KEYWORDS,
        name_end="{",
        literals=Literals(assign=":", close="}", quote='<|"|>'),
        end=("<tool_call|>",),
    ),
    ToolFormat(
        name="functiongemma",
        signs=("<start_function_call>",),
        begin="<start_function_call>call:",
        style=Style.KEYWORDS,
        name_end="{",
        literals=Literals(assign=":", close="}", quote="<escape>"),
        end=("<end_function_call>",),
    ),
    ToolFormat(
        name="lfm2",
        signs=("<|im_start|>", "List of tools: "),
        section_begin=("<|tool_call_start|>", "["),
        section_end=("]", "<|tool_call_end|>"),
        separator=",",
        style=Style.KEYWORDS,
        name_end="(",
    ),
    ToolFormat(
        name="olmo3",
        signs=("<function_calls>",),
        unlike=("<invoke",),
        section_begin=("<function_calls>",),
        section_end=("</function_calls>",),
        style=Style.KEYWORDS,
        name_end="(",
    ),
    ToolFormat(
        name="pythonic",
        aliases=("llama4_pythonic",),
        signs=("[func_name1(",),
        section_begin=("<|python_start|>", "["),
        section_end=("]", "<|python_end|>"),
        separator=",",
        bare=True,
        style=Style.KEYWORDS,
        name_end="(",
    ),
    ToolFormat(
        name="llama3_json",
        aliases=("llama4_json",),
        signs=("<|start_header_id|>", '"parameters": '),
        section_begin=("<|python_tag|>",),
        separator=";",
        bare=True,
        arguments_key="parameters",
    ),
    ToolFormat(name="xlam", section_begin=("[",), section_end=("]",), separator=",", bare=True, only=True),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _TOOL_FORMATS}

# What a grammar makes of an answer whose calls are forced: a list of calls, or the arguments of one function.
FORCED_CALLS = ToolFormat(name="forced", section_begin=("[",), section_end=("]",), separator=",", bare=True, only=True)
FORCED_ARGUMENTS = ToolFormat(name="forced", bare=True, only=True)

_THINK = ("<think>", "</think>")
_REASONING_FORMATS = (
    ReasoningFormat(
        name="openai_gptoss",
        aliases=("gpt_oss",),
        signs=("<|channel|>analysis",),
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        next="<|start|>assistant",
        answer=("<|channel|>final<|message|>", ""),
        channels=_HARMONY,
    ),
    ReasoningFormat(
        name="muse_glimmer",
        signs=("<|start|>assistant", "to=self"),
        begin=" to=self<|message|>",
        end="<|eom|>",
        next="<|start|>assistant",
        answer=(" to=user<|message|>", ""),
        channels=_MUSE,
    ),
    ReasoningFormat(name="deepseek_r1", aliases=("step3",), signs=("</think>", "<｜Assistant｜>"), unlike=("｜DSML｜",), implied=True),
    ReasoningFormat(
        name="ernie45",
        signs=(*_THINK, "<response></response>"),
        answer=("<response>", "</response>"),
        wrappers=("<response>", "</response>"),
    ),
    ReasoningFormat(
        name="hunyuan_a13b",
        signs=(*_THINK, "<answer>"),
        answer=("<answer>", "</answer>"),
        wrappers=("<answer>", "</answer>"),
    ),
    ReasoningFormat(
        name="qwen3",
        aliases=(
            "deepseek_v3",
            "deepseek_v4",
            "glm45",
            "glm47",
            "holo2",
            "kimi_k2",
            "mimo",
            "minimax_m2",
            "nemotron_v3",
            "olmo3",
            "poolside_v1",
            "step3p5",
        ),
        signs=_THINK,
    ),
    ReasoningFormat(name="mistral", signs=("[THINK]",), begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(name="seed_oss", signs=("seed:think",), begin="<seed:think>", end="</seed:think>"),
    ReasoningFormat(
        name="cohere_command3",
        aliases=("cohere", "cohere_command4"),
        signs=("<|START_THINKING|>",),
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        wrappers=_COHERE,
    ),
    ReasoningFormat(name="gemma4", signs=("<|channel>thought",), begin="<|channel>thought", end="<channel|>"),
    ReasoningFormat(name="granite", signs=("Here is my thought process:",), begin="Here is my thought process:", end="Here is my response:"),
    ReasoningFormat(name="apertus", signs=("<|inner_prefix|>",), begin="<|inner_prefix|>", end="<|inner_suffix|>"),
    ReasoningFormat(name="apriel", signs=("[BEGIN FINAL RESPONSE]",), begin="Here are my reasoning steps:", end="[BEGIN FINAL RESPONSE]"),
)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {each.name: each for each in _REASONING_FORMATS}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one model's answers are made of. None: nothing of the kind is taken out of the text."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def names(self) -> frozenset[str]:
        """What in the markers may be tokens by itself: they must reach the parser, though a tokenizer may call them special."""
        markers = (*(self.tools.markers if self.tools else ()), *(self.reasoning.markers if self.reasoning else ()))
        return frozenset(name for marker in markers for name in _NAMES.findall(marker))


_NAMES = re.compile(r"<[^<>]+>|\[[A-Z/_]+\]|｜[^｜<>]+｜")
