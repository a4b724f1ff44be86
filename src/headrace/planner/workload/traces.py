"""Recorded traces: who came when, with how many tokens. Published layouts are told apart by their columns, whatever the
file is called.

    layout     columns                                              time                              lengths
    Azure      TIMESTAMP, ContextTokens, GeneratedTokens            a date, with a zone (2024) or     CSV
                                                                    seven digits of a second (2023)
    BurstGPT   Timestamp, Request tokens, Response tokens           seconds from the start            CSV; Model, Total
    tokens and Log Type
                                                                                                      are not looked at
    Mooncake   timestamp, input_length, output_length, hash_ids     milliseconds                      a JSON object a
    line; a hash id
                                                                                                      is a block of 512
                                                                                                      equal tokens

What cannot have happened is refused with its row: replayed, it would be another workload.

What lives here: layouts and their rows. What may not: what is made of rows (conversations.py, asked.py), arrivals
(arrivals.py).
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from headrace.errors import ConfigError

TRACE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
MOST_ROWS = 5_000_000  # of one run; more take more memory than a machine has to spare
MOST_LINE = 2**22  # characters
_MOST_SHOWN = 8  # columns in a message
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?\s*(Z|[+-]\d\d:?\d\d)?")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """``at`` in seconds from the trace's start; ``hash_ids`` name blocks of TRACE_BLOCK prompt tokens (equal id, equal
    tokens)."""

    at: float
    prompt: int
    output: int
    hash_ids: tuple[int, ...] = ()


Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """``columns`` as they are published; ``read`` makes a row of one line's values by those names."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], TraceRow]


def _azure(row: Row) -> TraceRow:
    return TraceRow(_seconds(row["TIMESTAMP"]), _whole(row["ContextTokens"]), _whole(row["GeneratedTokens"]))


def _burst(row: Row) -> TraceRow:
    return TraceRow(float(row["Timestamp"]), _whole(row["Request tokens"]), _whole(row["Response tokens"]))


def _mooncake(row: Row) -> TraceRow:
    return TraceRow(
        float(row["timestamp"]) / 1e3,
        _whole(row["input_length"]),
        _whole(row["output_length"]),
        _hashes(row["hash_ids"]),
    )


def _whole(value: Any) -> int:
    """A length. Copies that other programs made write 100 as 100.0."""
    if isinstance(value, bool) or not float(value).is_integer():
        raise ValueError(f"{str(value)[:40]} is no whole number of tokens")
    return int(float(value))


def _hashes(value: Any) -> tuple[int, ...]:
    ids = tuple(map(int, value))
    if list(ids) != value or min(ids, default=0) < 0:
        raise ValueError(f"the hash ids {str(value)[:40]} are no list of whole numbers from 0 on")
    return ids


LAYOUTS = (
    Layout("Azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    Layout("BurstGPT", ("Timestamp", "Request tokens", "Response tokens"), _burst),
    Layout("Mooncake", ("timestamp", "input_length", "output_length", "hash_ids"), _mooncake),
)


def _seconds(text: str) -> float:
    """A date of any number of digits behind the second; without a zone it is UTC, so that no clock change lies within a
    trace."""
    found = _DATE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is no date like 2023-11-16 18:17:03.97")
    day, clock, part, zone = found.groups()
    return datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}").timestamp() + float(part or 0.0)


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows in order of time, the first at 0. Raises ConfigError that names file and row."""
    number, first, last = 0, 0.0, 0.0
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            for row in _rows(path, lines):
                first = row.at if not number else first
                _check_row(path, number + 1, row, first, last)
                number, last = number + 1, row.at
                yield replace(row, at=row.at - first)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read ({error.strerror}); give an existing file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The trace {path} is no text (byte {error.object[error.start]:#04x} at {error.start}); give CSV or JSON lines."
        ) from error
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError, csv.Error) as error:
        raise ConfigError(
            f"Row {number + 1} of the trace {path} cannot be read ({_why(error)}); mend or remove it."
        ) from error


def _why(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)[:120]


def _rows(path: Path, lines: TextIO) -> Iterator[TraceRow]:
    bounded = _bounded(path, lines)
    begin = next((line for line in bounded if line.strip()), "")
    if not begin:
        return
    bounded = chain([begin], bounded)
    if begin.lstrip().startswith(("{", "[")):
        values: Iterator[Row] = (_object(line) for line in bounded if line.strip())
        head = list(_object(begin))
    else:
        table = csv.DictReader(bounded)
        values, head = iter(table), list(table.fieldnames or ())
    layout = _layout(path, head)
    published = {_plain(name): name for name in layout.columns}
    wanted = {name: published[_plain(name)] for name in head if _plain(name) in published}
    for row in values:
        yield layout.read({wanted[name]: value for name, value in row.items() if name in wanted and value is not None})


def _object(line: str) -> Row:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a line holds a {type(found).__name__}, no object")
    return found


def _bounded(path: Path, lines: TextIO) -> Iterator[str]:
    while line := lines.readline(MOST_LINE):
        if len(line) == MOST_LINE:
            raise ConfigError(
                f"The trace {path} has a line of more than {MOST_LINE:,} characters; give one request a line."
            )
        yield line


def _plain(name: str) -> str:
    """Columns are compared without case, spaces and underscores: copies of a trace differ in them."""
    return re.sub(r"[\s_]", "", name).lower()


def _layout(path: Path, head: Sequence[str]) -> Layout:
    found = {_plain(name) for name in head}
    for layout in LAYOUTS:
        if found >= {_plain(column) for column in layout.columns}:
            return layout
    shown = ", ".join(repr(name[:40]) for name in head[:_MOST_SHOWN]) + (", …" if len(head) > _MOST_SHOWN else "")
    known = "; ".join(f"{', '.join(layout.columns)} ({layout.name})" for layout in LAYOUTS)
    raise ConfigError(f"The trace {path} has the columns {shown}; its columns must be one of: {known}.")


def _check_row(path: Path, number: int, row: TraceRow, first: float, last: float) -> None:
    if number > MOST_ROWS:
        raise ConfigError(
            f"The trace {path} has more than {MOST_ROWS:,} requests; take a part of it with --num-prompts."
        )
    if row.prompt < 1 or row.output < 0:
        raise ConfigError(
            f"Row {number} of the trace {path} has {row.prompt} prompt and {row.output} output tokens; give at least 1 and 0."
        )
    if not 0.0 <= row.at < math.inf:
        raise ConfigError(f"Row {number} of the trace {path} is at {row.at:.3f} s; give finite times from 0 on.")
    if row.at < last:
        back = f"{row.at - first:.3f} s after the first row, and the row above it at {last - first:.3f} s"
        raise ConfigError(f"Row {number} of the trace {path} is at {back}; sort the rows by time.")
