"""What a model's text means: reasoning, content and tool calls, taken apart as the text comes.

What lives here: the way in. What may not: wire formats (server/answers.py and its neighbours show segments).
"""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Collection
from functools import partial

from headrace.server.parsing.formats import FORCED_ARGUMENTS, FORCED_CALLS, Dialect
from headrace.server.parsing.parser import FormatParser
from headrace.server.parsing.segments import OutputParser
from headrace.server.tools import ToolChoice

_AUTO = ToolChoice()
_LETTERS = string.ascii_letters + string.digits


def create_parser(dialect: Dialect, prompt: str, names: Collection[str] = (), choice: ToolChoice = _AUTO) -> OutputParser | None:
    """For one answer; None where its text is content throughout. ``prompt``: as rendered; ``names``: the functions it may call."""
    tools, reasoning = dialect.tools if names else None, dialect.reasoning
    create_id = partial(create_call_id, tools.id_length if tools is not None else 0)
    opened = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    if choice.forced:  # by a grammar from the first token on: there is no reasoning
        tools, reasoning = FORCED_ARGUMENTS if choice.name else FORCED_CALLS, None
    elif reasoning is not None and prompt.rstrip().endswith(reasoning.end):
        reasoning = None
    if tools is None and reasoning is None:
        return None
    return FormatParser(tools, reasoning, create_id=create_id, opened=opened, names=names, fixed_name=choice.name, single=not choice.parallel)


def create_call_id(length: int = 0) -> str:
    """Some templates insist on a number of letters and digits; others take any."""
    return "".join(secrets.choice(_LETTERS) for _ in range(length)) if length else f"call_{uuid.uuid4().hex}"
