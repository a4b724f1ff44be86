"""Log lines: one line an event, for people or for collectors, and nothing in a line that could break it or act on a terminal.

What lives here: formats, and where exceptions shrink to type and place. What may not: what is logged, and how often.

An event's figures are given as ``extra={"facts": {...}}``. An exception's own text may quote what a client wrote, so it is left
out below the debug level.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

FORMAT_VARIABLE = "HEADRACE_LOG_FORMAT"  # by which a server's processes learn its --log-format
_PLAIN = re.compile(r"[\w.,:/+-]*", re.ASCII)
_PACKAGE = Path(__file__).parent


def configure(form: str, **facts: Any) -> None:
    """All loggers of this process write to stderr in this form; their levels stay as they are. ``facts`` stand in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(facts) if form == "json" else TextLines(facts))
    logging.getLogger().handlers[:] = [handler]


class _Lines(logging.Formatter):
    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._facts = dict(facts or {})

    def facts(self, record: logging.LogRecord) -> Mapping[str, Any]:
        """The process's own, then the event's."""
        return {**self._facts, **_facts(record)}


class TextLines(_Lines):
    """``15:04:05 info message  name=value …``"""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_word(value)}" for name, value in self.facts(record).items())
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} {printable(record.getMessage())}{facts}"


class JsonLines(_Lines):
    """One object a line: time (UTC), level, logger, message, and the facts."""

    def format(self, record: logging.LogRecord) -> str:
        when = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"
        head = {"time": when, "level": record.levelname.lower(), "logger": record.name, "message": printable(record.getMessage())}
        return json.dumps({**head, **self.facts(record)}, default=str)


def printable(text: str) -> str:
    """Everything that is no visible character as an escape: a line stays one line, and a terminal is told nothing."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _word(value: Any) -> str:
    """A value that cannot be taken for several."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    facts: dict[str, Any] = dict(getattr(record, "facts", ()))
    if record.exc_info is not None and record.exc_info[1] is not None:
        facts["exception"] = _exception(record.exc_info[1], with_text=logging.getLogger("headrace").isEnabledFor(logging.DEBUG))
    return facts


def _exception(error: BaseException, *, with_text: bool) -> str:
    """``KeyError at server/app.py:39 > server/generate.py:120``; where it was raised comes last."""
    places = " > ".join(_places(error.__traceback__))
    return f"{type(error).__name__} at {places}" + (f": {error}" if with_text else "")


def _places(trace: TracebackType | None) -> list[str]:
    """Our own files by their path in the package, others by name alone."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(trace)]
    return [f"{path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name}:{line}" for path, line in frames]


def configure_child() -> None:
    """The same in a process that a server has started."""
    configure(os.environ.get(FORMAT_VARIABLE, "text"))
