"""Texts for calibration and evaluation, as rows of tokens.

What lives here: reading them. What may not: models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError

HELD_OUT = 8  # every so-manieth row is not calibrated with, but judged by
_FEWEST = 2 * HELD_OUT


def read_rows(path: Path, tokenizer: Tokenizer, *, length: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """(rows for calibration, rows for evaluation), each of ``length`` tokens, spread over the whole file. Raises
    ConfigError.

    A text file, or lines of JSON objects with ``text`` or ``messages``.
    """
    ids: list[int] = []
    for document in _documents(path, tokenizer):
        ids += document
    rows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    if len(rows) < _FEWEST:
        raise ConfigError(
            f"--calibration {path} has {len(ids):,} tokens, {len(rows)} rows of {length}, and at least {_FEWEST} are needed; give more text, or a "
            f"smaller --calibration-length."
        )
    wanted = min(len(rows), count + -(-count // (HELD_OUT - 1)))
    rows = [rows[index * len(rows) // wanted] for index in range(wanted)]
    held = rows[HELD_OUT - 1 :: HELD_OUT]
    return [row for index, row in enumerate(rows) if index % HELD_OUT != HELD_OUT - 1], held


def _documents(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--calibration {path} cannot be read ({error}); give a text file in UTF-8, or one of JSON lines."
        ) from error
    if path.suffix not in (".json", ".jsonl"):
        yield tokenizer.encode(text)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _encoded(_object(path, number, line), path, number, tokenizer)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"line {number} of --calibration {path} is not JSON ({error}); give one object per line."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"line {number} of --calibration {path} is not an object; give one per line, with text or messages."
        )
    return value


def _encoded(value: dict[str, Any], path: Path, number: int, tokenizer: Tokenizer) -> list[int]:
    if isinstance(text := value.get("text"), str):
        return tokenizer.encode(text)
    if isinstance(messages := value.get("messages"), list):
        tools = value.get("tools")
        return tokenizer.encode_chat(tokenizer.apply_chat_template(messages, tools, False), messages, tools, False)
    raise ConfigError(f"line {number} of --calibration {path} has neither text nor messages; give one of them.")
