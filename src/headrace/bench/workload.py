"""What is asked, and when: dialogues of one or more turns, made from a seed or read from a trace.

Every workload is a list of dialogues, whatever its kind; a plain request is a dialogue of one turn. A turn holds only its
*new* tokens: what came before (earlier turns and the answers really given) is put in front by whoever runs it.

What lives here: random, shared-prefix, conversation and trace workloads. What may not: reading traces (traces.py), arrival times
(arrivals.py), clocks, sockets, tokenizers (ids stand for themselves in-process and towards routes that take ids, and are written as
words elsewhere).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.bench.arrivals import Swing, arrival_times
from headrace.bench.traces import TRACE_BLOCK, TraceRow, read_trace
from headrace.errors import ConfigError

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


class DrawsLengths(Protocol):
    """Where lengths come from: (prompt, output) in tokens, from numbers of the generator alone."""

    def draw(self, rng: np.random.Generator) -> tuple[int, int]: ...


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


@dataclass(frozen=True, slots=True)
class TraceLengths:
    """Pairs of a trace's own requests, each as likely as any other: long prompts keep their short answers, and every mode and gap of the
    distribution stays, where a fitted curve (a log-normal one, say) would smooth them away."""

    pairs: tuple[tuple[int, int], ...]

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        return self.pairs[int(rng.integers(0, len(self.pairs)))]


def trace_lengths(path: Path, *, max_prompt: int | None, max_output: int | None) -> TraceLengths:
    """Lengths of all requests; longer ones are cut to the maxima. Raises ConfigError."""
    return TraceLengths(tuple(cut_row(row, max_prompt, max_output) for row in trace_rows(path, None)))


def random_dialogues(count: int, lengths: DrawsLengths, *, vocab_size: int, seed: int = 0) -> list[Dialogue]:
    """Independent requests of random ids."""
    return shared_prefix_dialogues(count, lengths, num_prefixes=1, prefix_len=0, vocab_size=vocab_size, seed=seed)


def shared_prefix_dialogues(
    count: int, lengths: DrawsLengths, *, num_prefixes: int, prefix_len: int, vocab_size: int, seed: int = 0
) -> list[Dialogue]:
    """Requests that begin with one of ``num_prefixes`` system prompts of ``prefix_len`` tokens, in turn, and go on at random."""
    rng = np.random.default_rng(seed)
    prefixes = [_ids(rng, prefix_len, vocab_size) for _ in range(num_prefixes)]
    dialogues = []
    for index in range(count):
        prompt_len, output_len = lengths.draw(rng)
        dialogues.append(Dialogue((Turn(prefixes[index % num_prefixes] + _ids(rng, prompt_len, vocab_size), output_len),)))
    return dialogues


def conversations(
    count: int, turns: int, lengths: DrawsLengths, *, system_len: int, think_seconds: float, vocab_size: int, seed: int = 0
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


def with_arrivals(
    dialogues: Sequence[Dialogue], rate: float, *, burstiness: float = 1.0, gaps: str = "gamma", swing: Swing | None = None, seed: int = 0
) -> list[Dialogue]:
    """Open loop: each dialogue begins at a time of its own (arrivals.py), whatever has become of the others."""
    times = arrival_times(len(dialogues), rate, burstiness=burstiness, gaps=gaps, swing=swing, seed=seed)
    return [replace(dialogue, arrival=float(when)) for dialogue, when in zip(dialogues, times, strict=True)]


def trace_rows(path: Path, count: int | None, *, speed: float = 1.0, rate: float | None = None) -> list[TraceRow]:
    """The first ``count`` requests of a trace, ``speed`` times as fast, or as fast as makes ``rate`` a second of them: always in the same order,
    every gap scaled alike. Raises ConfigError."""
    if not 0 < speed < math.inf:
        raise ConfigError(f"--trace-speed is {speed:g}; give a finite number above 0.")
    rows = list(islice(read_trace(path), count))
    if not rows:
        raise ConfigError(f"The trace {path} holds no requests; give one with at least one row.")
    factor = 1.0 / speed if rate is None else scale_to(rate, [row.at for row in rows])
    return [replace(row, at=row.at * factor) for row in rows]


def scale_to(rate: float, times: Sequence[float]) -> float:
    """What the gaps between ascending times must be multiplied with, so that there are ``rate`` of them a second. Raises ConfigError."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"The request rate is {rate:g}; give a finite number above 0.")
    if not times[-1] > times[0]:
        raise ConfigError(f"All {len(times)} requests come at once, so there is no rate to scale; leave --request-rate and --sweep-rate out.")
    return (len(times) - 1) / (times[-1] - times[0]) / rate


def cut_row(row: TraceRow, max_prompt: int | None, max_output: int | None) -> tuple[int, int]:
    """Prompt and output tokens within the maxima. A request that had no answer is asked for one token: nothing less can be asked."""
    return min(row.prompt, max_prompt or row.prompt), max(1, min(row.output, max_output or row.output))


def trace_dialogues(
    path: Path,
    *,
    count: int | None,
    speed: float = 1.0,
    rate: float | None = None,
    max_prompt: int,
    max_output: int,
    vocab_size: int,
    seed: int = 0,
) -> list[Dialogue]:
    """A trace replayed as ``trace_rows`` says; lengths beyond the maxima are cut to them. Prompts are random ids; equal hash ids give equal
    ids. Raises ConfigError."""
    dialogues = []
    for index, row in enumerate(trace_rows(path, count, speed=speed, rate=rate)):
        prompt, output = cut_row(row, max_prompt, max_output)
        dialogues.append(Dialogue((Turn(_trace_prompt(row, prompt, vocab_size, seed, index), output),), row.at))
    return dialogues


def _trace_prompt(row: TraceRow, length: int, vocab_size: int, seed: int, index: int) -> tuple[int, ...]:
    ids: list[int] = []
    for name in row.hash_ids[: -(-length // TRACE_BLOCK)]:
        ids += _ids(np.random.default_rng((seed, 1, name)), TRACE_BLOCK, vocab_size)
    rest = _ids(np.random.default_rng((seed, 2, index)), max(0, length - len(ids)), vocab_size)
    return (tuple(ids) + rest)[: max(1, length)]


def as_text(ids: Sequence[int]) -> str:
    """Ids written as common words: about a token each, equal ids the same text."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)
