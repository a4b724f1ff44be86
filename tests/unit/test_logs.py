"""Log lines: one a line whatever is in them, in both forms; exceptions without their text."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headrace.observe import logs

HOSTILE = "a\r\nb\x1b[2J\u2028c\x00d\u202ee"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("test_logs")
    logger.propagate, handlers = False, logger.handlers[:]
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers[:] = handlers


def written(log: logging.Logger, form: logging.Formatter, message: str, error: bool = False, **facts: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(form)
    log.handlers[:] = [handler]
    try:
        if error:
            raise KeyError(HOSTILE)
    except KeyError:
        log.exception(message, extra={"facts": facts})
    else:
        log.warning("%s", message, extra={"facts": facts})
    return stream.getvalue()


@pytest.mark.parametrize("form", [logs.TextLines(), logs.JsonLines()])
@pytest.mark.parametrize("error", [False, True])
def test_a_line_stays_one_printable_line(log: logging.Logger, form: logging.Formatter, error: bool) -> None:
    line = written(log, form, HOSTILE, error, id=HOSTILE, tokens_in=5)
    assert line.endswith("\n") and line[:-1].isprintable() and line.isascii()
    assert "Traceback" not in line and ("KeyError at test_logs.py:" in line) == error
    assert line.count("2J") == 2  # the message and the fact, never the exception's own text


def test_json_lines_are_objects_with_the_facts(log: logging.Logger) -> None:
    entry = json.loads(written(log, logs.JsonLines(), "request", status=200, seconds=0.25, id="x y"))
    assert entry["message"] == "request" and entry["level"] == "warning" and entry["logger"] == "test_logs"
    assert (entry["status"], entry["seconds"], entry["id"]) == (200, 0.25, "x y") and entry["time"].endswith("Z")


def test_a_fact_cannot_pretend_to_be_another(log: logging.Logger) -> None:
    line = written(log, logs.TextLines(), "request", id="x status=500", status=200)
    assert 'id="x status=500" status=200' in line
