"""What is asked, and when: dialogues of one or more turns, made from a seed or read from a trace.

Every workload is a list of dialogues, whatever its kind; a plain request is a dialogue of one turn. A turn holds only its
*new* tokens: what came before (earlier turns and the answers really given) is put in front by whoever runs it.

What lives here: random, shared-prefix, conversation and trace workloads, and arrival times. What may not: clocks, sockets,
tokenizers (ids stand for themselves in-process and towards routes that take ids, and are written as words elsewhere).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from headrace.errors import ConfigError

TRACE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for

# Short words that most vocabularies hold as one token, to write ids as text.
_WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what all were we when
your can said there use an each which she do how their if will up other about out many then them these so some her would make like him into
time has look two more write go see number no way could people my than first water been call who oil its now find long down day did get come
made may part
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a dialogue. ``think_seconds`` pass between the last answer and this turn.

    ``stop_after``: the answer really ends after so many tokens, though up to ``max_tokens`` were asked for (in-process only).
    """

    new_ids: tuple[int, ...]
    max_tokens: int
    think_seconds: float = 0.0
    stop_after: int | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """``arrival`` in seconds after the start; None = as soon as a client is free (closed loop)."""

    turns: tuple[Turn, ...]
    arrival: float | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output lengths in tokens; each is drawn evenly from length * (1 ± spread)."""

    prompt: int
    output: int
    spread: float = 0.0

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        return self._one(rng, self.prompt), self._one(rng, self.output)

    def _one(self, rng: np.random.Generator, length: int) -> int:
        low, high = math.floor(length * (1 - self.spread)), math.ceil(length * (1 + self.spread))
        return int(rng.integers(max(1, low), max(1, high) + 1))


def random_dialogues(count: int, lengths: Lengths, *, vocab_size: int, seed: int = 0) -> list[Dialogue]:
    """Independent requests of random ids."""
    return shared_prefix_dialogues(count, lengths, num_prefixes=1, prefix_len=0, vocab_size=vocab_size, seed=seed)


def shared_prefix_dialogues(count: int, lengths: Lengths, *, num_prefixes: int, prefix_len: int, vocab_size: int, seed: int = 0) -> list[Dialogue]:
    """Requests that begin with one of ``num_prefixes`` system prompts of ``prefix_len`` tokens, in turn, and go on at random."""
    rng = np.random.default_rng(seed)
    prefixes = [_ids(rng, prefix_len, vocab_size) for _ in range(num_prefixes)]
    dialogues = []
    for index in range(count):
        prompt_len, output_len = lengths.draw(rng)
        dialogues.append(Dialogue((Turn(prefixes[index % num_prefixes] + _ids(rng, prompt_len, vocab_size), output_len),)))
    return dialogues


def conversations(
    count: int, turns: int, lengths: Lengths, *, system_len: int, think_seconds: float, vocab_size: int, seed: int = 0
) -> list[Dialogue]:
    """Dialogues of ``turns`` turns that all begin with one system prompt; think times are exponential with the mean given."""
    rng = np.random.default_rng(seed)
    system = _ids(rng, system_len, vocab_size)
    dialogues = []
    for _ in range(count):
        made = []
        for number in range(turns):
            prompt_len, output_len = lengths.draw(rng)
            think = float(rng.exponential(think_seconds)) if number and think_seconds else 0.0
            made.append(Turn((() if number else system) + _ids(rng, prompt_len, vocab_size), output_len, think))
        dialogues.append(Dialogue(tuple(made)))
    return dialogues


def _ids(rng: np.random.Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, count).tolist())


def with_arrivals(dialogues: Sequence[Dialogue], rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[Dialogue]:
    """Open loop: gaps between arrivals are gamma distributed with mean 1 / rate and shape ``burstiness``.

    Shape 1 is a Poisson process; below 1 is burstier, above 1 more even. An infinite rate sends everything at once.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"The request rate is {rate} and the burstiness {burstiness}; give numbers above 0.")
    if math.isinf(rate):
        return [replace(dialogue, arrival=0.0) for dialogue in dialogues]
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), len(dialogues))
    return [replace(dialogue, arrival=float(when)) for dialogue, when in zip(dialogues, np.cumsum(gaps), strict=True)]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """``at`` in seconds from the trace's start; ``hash_ids`` name blocks of TRACE_BLOCK prompt tokens (equal id, equal tokens)."""

    at: float
    prompt: int
    output: int
    hash_ids: tuple[int, ...] = ()


def trace_dialogues(
    path: Path, *, count: int | None, speed: float, max_prompt: int, max_output: int, vocab_size: int, seed: int = 0
) -> list[Dialogue]:
    """A trace replayed ``speed`` times as fast; lengths beyond the maxima are cut to them.

    ``.csv``: columns TIMESTAMP, ContextTokens, GeneratedTokens (Azure). ``.jsonl``: timestamp (ms), input_length, output_length,
    hash_ids (Mooncake). Prompts are random ids; Mooncake's equal hash ids give equal ids. Raises ConfigError.
    """
    dialogues = []
    for index, row in enumerate(read_trace(path)):
        if index == count:
            break
        ids = _trace_prompt(row, min(row.prompt, max_prompt), vocab_size, seed, index)
        dialogues.append(Dialogue((Turn(ids, max(1, min(row.output, max_output))),), row.at / speed))
    if not dialogues:
        raise ConfigError(f"The trace {path} holds no requests; give one with at least one row.")
    return dialogues


def _trace_prompt(row: TraceRow, length: int, vocab_size: int, seed: int, index: int) -> tuple[int, ...]:
    ids: list[int] = []
    for name in row.hash_ids[: -(-length // TRACE_BLOCK)]:
        ids += _ids(np.random.default_rng((seed, 1, name)), TRACE_BLOCK, vocab_size)
    rest = _ids(np.random.default_rng((seed, 2, index)), max(0, length - len(ids)), vocab_size)
    return (tuple(ids) + rest)[: max(1, length)]


def read_trace(path: Path) -> Iterator[TraceRow]:
    """Rows in order of time, the first at 0. Raises ConfigError naming the line that cannot be read."""
    read = {".csv": _azure_rows, ".jsonl": _mooncake_rows}.get(path.suffix)
    if read is None:
        raise ConfigError(f"The trace {path} is neither .csv (Azure) nor .jsonl (Mooncake); convert it to one of these.")
    number, first, last = 0, 0.0, 0.0
    try:
        for row in read(path):
            first = row.at if not number else first
            number += 1
            _check_row(path, number, row, last)
            last = row.at
            yield replace(row, at=row.at - first)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read ({error.strerror}); give an existing file.") from error
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        columns = "TIMESTAMP, ContextTokens, GeneratedTokens" if path.suffix == ".csv" else "timestamp, input_length, output_length, hash_ids"
        raise ConfigError(f"The trace {path} cannot be read after row {number} ({error}); its columns must be {columns}.") from error


def _check_row(path: Path, number: int, row: TraceRow, last: float) -> None:
    """A row that cannot have happened is refused: replayed, it would be another workload."""
    if row.prompt < 1 or row.output < 0:
        raise ConfigError(f"Row {number} of the trace {path} has {row.prompt} prompt and {row.output} output tokens; give at least 1 and 0.")
    if not max(0.0, last) <= row.at < math.inf:
        raise ConfigError(
            f"Row {number} of the trace {path} is at {row.at:.3f} s, before 0 or before the row above it ({last:.3f} s); sort the rows by time."
        )


def _azure_rows(path: Path) -> Iterator[TraceRow]:
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])  # microseconds; the files carry seven digits
            yield TraceRow(stamp.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake_rows(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield TraceRow(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), tuple(map(int, row["hash_ids"])))


def as_text(ids: Sequence[int]) -> str:
    """Ids written as common words: about a token each, equal ids the same text."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)
