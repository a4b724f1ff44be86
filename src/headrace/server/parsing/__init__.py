"""What a model's text means: reasoning, content and tool calls, taken apart as the text comes.

What lives here: the way in. What may not: wire formats (server/wire.py and its neighbours show segments).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.server.parsing.arguments import Types
from headrace.server.parsing.formats import Formats, ReasoningFormat, ToolFormat
from headrace.server.parsing.parser import OutputParser


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What the answers of one request are made of. ``opened``: the prompt has begun the reasoning.

    ``functions``: what may be called; ``only``: nothing else may. ``fixed_name``: only arguments of this one are
    written. ``single``: nothing follows the first call. ``customs``: functions that take a text. ``text_of``: what the
    user reads is this one's text.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    opened: bool = False
    functions: Mapping[str, Types] = field(default_factory=dict)
    fixed_name: str = ""
    single: bool = False
    only: bool = False
    id_length: int = 0
    id_form: str = ""
    customs: tuple[str, ...] = ()
    text_of: str = ""

    def create_parser(self) -> OutputParser | None:
        """For one answer; None where its text is content throughout."""
        parsed = self.tools is not None or self.reasoning is not None or self.text_of
        return OutputParser(self) if parsed else None


PLAIN = AnswerFormat()  # text, of which nothing is taken out


def answer_format(
    formats: Formats, prompt: str, functions: Mapping[str, Types], *, parallel: bool = True, only: bool = False
) -> AnswerFormat:
    """``prompt``: as rendered, or its end; ``functions``: what may be called."""
    tools, reasoning = formats.tools if functions else None, formats.reasoning
    if reasoning is not None and prompt.rstrip().endswith(reasoning.end):
        reasoning = None
    return AnswerFormat(
        tools=tools,
        reasoning=reasoning,
        opened=reasoning is not None and prompt.rstrip().endswith(reasoning.begin),
        functions=functions,
        single=not parallel,
        only=only,
        id_length=tools.id_length if tools is not None else 0,
        id_form=tools.id_form if tools is not None else "",
    )
