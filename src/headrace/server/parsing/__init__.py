"""What a model's text means: reasoning, content and tool calls, taken apart as the text comes.

What lives here: the way in. What may not: wire formats (server/answers.py and its neighbours show segments).
"""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from headrace.server.parsing.arguments import Types
from headrace.server.parsing.formats import Dialect, ReasoningFormat, ToolFormat
from headrace.server.parsing.parser import FormatParser
from headrace.server.parsing.segments import OutputParser
from headrace.server.parsing.texts import CustomCalls, WholeText

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the answers of one request are made of. ``opened``: the prompt has begun the reasoning.

    ``functions``: what may be called; ``only``: nothing else may. ``fixed_name``: only arguments of this one are written. ``single``:
    nothing follows the first call. ``customs``: functions that take a text. ``text_of``: what the user reads is this one's text.
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
        parser = None if self.tools is None and self.reasoning is None else self._create_parser()
        if self.text_of:
            return WholeText(parser, self.text_of, create_call_id)
        return CustomCalls(parser, self.customs) if parser is not None and self.customs else parser

    def _create_parser(self) -> OutputParser:
        return FormatParser(
            self.tools,
            self.reasoning,
            create_id=partial(create_call_id, self.id_length, self.id_form),
            opened=self.opened,
            functions=self.functions,
            fixed_name=self.fixed_name,
            single=self.single,
            only=self.only,
        )


def form_of(dialect: Dialect, prompt: str, functions: Mapping[str, Types], *, parallel: bool = True, only: bool = False) -> Form:
    """``prompt``: as rendered, or its end; ``functions``: what may be called."""
    tools, reasoning = dialect.tools if functions else None, dialect.reasoning
    if reasoning is not None and prompt.rstrip().endswith(reasoning.end):
        reasoning = None
    return Form(
        tools=tools,
        reasoning=reasoning,
        opened=reasoning is not None and prompt.rstrip().endswith(reasoning.begin),
        functions=functions,
        single=not parallel,
        only=only,
        id_length=tools.id_length if tools is not None else 0,
        id_form=tools.id_form if tools is not None else "",
    )


def create_call_id(length: int = 0, form: str = "", name: str = "", index: int = 0) -> str:
    """Some templates insist on a number of letters and digits, some on the name and the index; others take any."""
    if form:
        return form.format(name=name, index=index)
    return "".join(secrets.choice(_LETTERS) for _ in range(length)) if length else f"call_{uuid.uuid4().hex}"
