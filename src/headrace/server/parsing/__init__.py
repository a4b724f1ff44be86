"""What a model's text means: reasoning, content and tool calls, taken apart as the text comes.

What lives here: the way in. What may not: wire formats (server/answers.py and its neighbours show segments).
"""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Collection

from headrace.server.parsing.formats import Dialect
from headrace.server.parsing.parser import FormatParser
from headrace.server.parsing.segments import OutputParser

_LETTERS = string.ascii_letters + string.digits


def create_parser(dialect: Dialect, prompt: str, names: Collection[str] = (), *, single: bool = False) -> OutputParser | None:
    """For one answer; None where its text is content throughout. ``prompt``: as rendered; ``names``: the functions it may call."""
    tools, reasoning = dialect.tools if names else None, dialect.reasoning
    if tools is None and reasoning is None:
        return None
    opened = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    closed = reasoning is not None and prompt.rstrip().endswith(reasoning.end)
    length = tools.id_length if tools is not None else 0
    return FormatParser(tools, None if closed else reasoning, create_id=lambda _: create_call_id(length), opened=opened, names=names, single=single)


def create_call_id(length: int = 0) -> str:
    """Some templates insist on a number of letters and digits; others take any."""
    return "".join(secrets.choice(_LETTERS) for _ in range(length)) if length else f"call_{uuid.uuid4().hex}"
