"""Log lines: one line per event, for people or for collectors, with nothing in it that could break the line or control
a terminal; and a stream for them that never blocks.

What lives here: formats, the stream, and reducing exceptions to type and place. What may not: what is logged, and how
often.

An event's figures are given as ``extra={"facts": {...}}``. An exception's own text may quote what a client wrote, so it
is left out unless the level is debug.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import select
import stat
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

FORMAT_VARIABLE = "HEADRACE_LOG_FORMAT"  # by which a server's processes learn its --log-format
_PATIENCE_MS = 20  # and no more than once a second
_PLAIN = re.compile(r"[\w.,:/+-]*", re.ASCII)
_PACKAGE = Path(__file__).parent.parent


def configure(form: str, **facts: Any) -> None:
    """All loggers of this process write to stderr in this form; their levels do not change. ``facts`` are added to
    every line."""
    if not isinstance(getattr(sys.stderr, "buffer", None), NonBlockingStderr):
        sys.stderr = io.TextIOWrapper(NonBlockingStderr(2), "utf-8", "backslashreplace", write_through=True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(facts) if form == "json" else TextLines(facts))
    logging.getLogger().handlers[:] = [handler]


class NonBlockingStderr(io.RawIOBase):
    """A stderr that never blocks: what its reader does not accept is dropped, and the number is reported with the next
    line it accepts.

    A pipe or a terminal is opened again, because its flags are shared with everyone who has it, and libuv clears them
    in each child process that it starts; a file is written directly.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lost = 0
        self._torn = False  # what was lost began in the middle of a line
        self._waited = 0.0  # when it last waited
        self._lock = threading.Lock()
        self._nonblocking = False
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            with contextlib.suppress(OSError):  # another user's, who does not let us: it is asked before each write
                self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._nonblocking = True

    def write(self, data: Any) -> int:
        with self._lock:
            notice = b"... %d lines are missing here: they were not read in time\n" % self._lost if self._lost else b""
            text = b"\n" * self._torn + notice + data
            taken = self._take(text)
            if taken >= len(text) - len(data):
                self._lost, self._torn = 0, False
            if taken < len(text):
                self._lost, self._torn = self._lost + 1, self._torn or taken > len(text) - len(data)
        return len(data)

    def _take(self, text: bytes) -> int:
        """In pieces that a pipe accepts whole or not at all."""
        for start in range(0, len(text), select.PIPE_BUF):
            piece = text[start : start + select.PIPE_BUF]
            if not self._write(piece) and not (self._is_ready_soon() and self._write(piece)):
                return start
        return len(text)

    def _write(self, piece: bytes) -> bool:
        try:
            return (self._nonblocking or self._is_ready(0)) and os.write(self._descriptor, piece) == len(piece)
        except OSError:  # full, or the reader is gone
            return False

    def _is_ready(self, milliseconds: int) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(milliseconds))

    def _is_ready_soon(self) -> bool:
        """Gives a slow reader a moment."""
        if time.monotonic() - self._waited < 1.0:
            return False
        ready = self._is_ready(_PATIENCE_MS)
        self._waited = time.monotonic()
        return ready

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


class _Lines(logging.Formatter):
    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._facts = dict(facts or {})

    def facts(self, record: logging.LogRecord) -> Mapping[str, Any]:
        """The process's facts, then the event's."""
        return {**self._facts, **_facts(record)}


class TextLines(_Lines):
    """``15:04:05 info message  name=value …``"""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_word(value)}" for name, value in self.facts(record).items())
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} {printable(record.getMessage())}{facts}"


class JsonLines(_Lines):
    """One object per line: time (UTC), level, logger, message, and the facts."""

    def format(self, record: logging.LogRecord) -> str:
        when = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"
        head = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        return json.dumps({**head, **self.facts(record)}, default=str)


def printable(text: str) -> str:
    """Escapes everything that is not a visible character: a line remains one line and cannot control a terminal."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def _word(value: Any) -> str:
    """A value that cannot be mistaken for several."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _facts(record: logging.LogRecord) -> Mapping[str, Any]:
    facts: dict[str, Any] = dict(getattr(record, "facts", ()))
    if record.exc_info is not None and record.exc_info[1] is not None:
        facts["exception"] = _exception(
            record.exc_info[1], with_text=logging.getLogger("headrace").isEnabledFor(logging.DEBUG)
        )
    return facts


def _exception(error: BaseException, *, with_text: bool) -> str:
    """``KeyError at server/app.py:39 > server/generate.py:120``; the place where it was raised comes last."""
    places = " > ".join(_places(error.__traceback__))
    return f"{type(error).__name__} at {places}" + (f": {error}" if with_text else "")


def _places(trace: TracebackType | None) -> list[str]:
    """Our own files by their path in the package, others by name only."""
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(trace)]
    return [
        f"{path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name}:{line}" for path, line in frames
    ]


def tell_processes(form: str) -> None:
    """The form, and the level, to those that this one starts from now on."""
    os.environ[FORMAT_VARIABLE] = form
    os.environ["HEADRACE_LOG_LEVEL"] = logging.getLevelName(logging.getLogger("headrace").level).lower()


def configure_child() -> None:
    """The same for a process that a server has started."""
    configure(os.environ.get(FORMAT_VARIABLE, "text"))
