"""What is asked, and when: lengths, arrivals and which beginnings are shared. Token ids are made when a request is
sent.

What lives here: requests drawn from a seed or read from a trace, and their ids, for simulations and for engines
(conversations.py). What may not: clocks, reading files (traces.py), arrival times (arrivals.py), models.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.errors import ConfigError
from headrace.planner.workload.arrivals import Swing, arrival_times
from headrace.planner.workload.traces import TRACE_BLOCK, TraceRow, read_trace
from headrace.request import NO_EXPECTATIONS, Expectations

BENCH_VOCAB = 1000  # of bench serve's ids, unless it is told otherwise
_ODD = np.uint64(0x9E3779B97F4A7C15)  # constants of splitmix64 (Steele et al. 2014)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. ``at`` in seconds from the start, None: when a client is free. Its prompt begins with the pieces
    named, each of ``piece`` tokens: equal names, equal tokens; the rest is its own.

    A later turn ``follows`` the request of that number: its prompt begins with that one's prompt and answer, and it is
    sent ``think`` seconds after that answer's end.
    """

    prompt: int
    output: int
    at: float | None = None
    pieces: tuple[int, ...] = ()
    piece: int = 0
    tenant: str = ""
    expects: Expectations = NO_EXPECTATIONS
    follows: int | None = None
    think: float = 0.0
    priority: int = 0


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
    """Pairs of a trace's own requests, each as likely as any other: long prompts keep their short answers, and every
    mode and gap of the distribution stays, where a fitted curve (a log-normal one, say) would smooth them away."""

    pairs: tuple[tuple[int, int], ...]

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        return self.pairs[int(rng.integers(0, len(self.pairs)))]


def trace_lengths(path: Path, *, max_prompt: int | None, max_output: int | None) -> TraceLengths:
    """Lengths of all requests; longer ones are cut to the maxima. Raises ConfigError."""
    return TraceLengths(tuple(cut_row(row, max_prompt, max_output) for row in trace_rows(path, None)))


def drawn(
    count: int, lengths: DrawsLengths, *, prefix: int = 0, num_prefixes: int = 1, seed: int = 0
) -> list[LoadRequest]:
    """Requests of random lengths behind one of ``num_prefixes`` shared prefixes of ``prefix`` tokens, in turn.

    Numbers that ids were once made of are passed over, so that a seed still draws the lengths of published figures.
    """
    rng = np.random.default_rng(seed)
    rng.integers(0, BENCH_VOCAB, prefix * num_prefixes)
    made = []
    for index in range(count):
        prompt, output = lengths.draw(rng)
        rng.integers(0, BENCH_VOCAB, prompt)
        made.append(
            LoadRequest(prefix + prompt, output, pieces=(index % num_prefixes,) if prefix else (), piece=prefix)
        )
    return made


def conversing(
    count: int, turns: int, lengths: DrawsLengths, *, system: int, think: float, seed: int = 0
) -> list[LoadRequest]:
    """``count`` conversations of ``turns`` turns behind one system prompt; ``think``: mean seconds between an answer
    and the next turn.

    Each turn asks with all that was said before and a new text. Drawn as ``drawn`` does.
    """
    rng = np.random.default_rng(seed)
    rng.integers(0, BENCH_VOCAB, system)
    made: list[LoadRequest] = []
    for _ in range(count):
        for number in range(turns):
            new, output = lengths.draw(rng)
            thought = float(rng.exponential(think)) if number and think else 0.0
            rng.integers(0, BENCH_VOCAB, new)
            if number:
                before = made[-1]
                made.append(
                    replace(
                        before,
                        prompt=before.prompt + before.output + new,
                        output=output,
                        follows=len(made) - 1,
                        think=thought,
                    )
                )
            else:
                made.append(LoadRequest(system + new, output, pieces=(0,) if system else (), piece=system))
    return made


def arriving(
    asked: Sequence[LoadRequest],
    rate: float,
    *,
    burstiness: float = 1.0,
    gaps: str = "gamma",
    swing: Swing | None = None,
    seed: int,
) -> list[LoadRequest]:
    """Open loop: requests, or first turns, come at times of their own (arrivals.py). Raises ConfigError."""
    first = [each.follows is None for each in asked]
    times = iter(arrival_times(sum(first), rate, burstiness=burstiness, gaps=gaps, swing=swing, seed=seed))
    return [replace(each, at=float(next(times))) if begins else each for each, begins in zip(asked, first, strict=True)]


def traced(
    path: Path,
    *,
    count: int | None,
    speed: float = 1.0,
    max_prompt: int | None,
    max_output: int | None,
    rate: float | None = None,
) -> list[LoadRequest]:
    """A trace, ``speed`` times as fast, or as fast as makes ``rate`` requests a second of it: the same order, every gap
    scaled alike.

    With maxima, longer prompts and answers are cut to them. Raises ConfigError.
    """
    rows = trace_rows(path, count, speed=speed, rate=rate)
    return [LoadRequest(*cut_row(row, max_prompt, max_output), row.at, row.hash_ids, TRACE_BLOCK) for row in rows]


def trace_rows(path: Path, count: int | None, *, speed: float = 1.0, rate: float | None = None) -> list[TraceRow]:
    """The first ``count`` requests of a trace, ``speed`` times as fast, or as fast as makes ``rate`` a second of them:
    always in the same order, every gap scaled alike. Raises ConfigError."""
    if not 0 < speed < math.inf:
        raise ConfigError(f"--trace-speed is {speed:g}; give a finite number above 0.")
    rows = list(islice(read_trace(path), count))
    if not rows:
        raise ConfigError(f"The trace {path} holds no requests; give one with at least one row.")
    factor = 1.0 / speed if rate is None else scale_to(rate, [row.at for row in rows])
    return [replace(row, at=row.at * factor) for row in rows]


def scale_to(rate: float, times: Sequence[float]) -> float:
    """What the gaps between ascending times must be multiplied with, so that there are ``rate`` of them a second.
    Raises ConfigError."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"The request rate is {rate:g}; give a finite number above 0.")
    if not times[-1] > times[0]:
        raise ConfigError(
            f"All {len(times)} requests come at once, so there is no rate to scale; leave --request-rate and --sweep-rate out."
        )
    return (len(times) - 1) / (times[-1] - times[0]) / rate


def cut_row(row: TraceRow, max_prompt: int | None, max_output: int | None) -> tuple[int, int]:
    """Prompt and output tokens within the maxima. A request that had no answer is asked for one token: nothing less can
    be asked."""
    return min(row.prompt, max_prompt or row.prompt), max(1, min(row.output, max_output or row.output))


def check_lengths(asked: Sequence[LoadRequest], longest: int) -> None:
    """Every request must fit as it stands: cut answers would be figures of another workload. Raises ConfigError."""
    over = [index for index, each in enumerate(asked) if each.prompt + each.output > longest]
    if over:
        worst = max(over, key=lambda index: asked[index].prompt + asked[index].output)
        named = f"request {worst + 1} has {asked[worst].prompt} + {asked[worst].output}"
        raise ConfigError(
            f"{len(over)} of {len(asked)} requests are longer than the {longest} tokens that this model and its cache hold ({named}). "
            f"Ask for shorter ones (of a trace --max-input-len and --max-output-len cut them), or take a larger device or model."
        )


class Prompts:
    """Token ids of every request, made when it is sent. ``answer``: what request r answered from a position on (r,
    position, count)."""

    def __init__(
        self, asked: Sequence[LoadRequest], answer: Callable[[int, int, int], array[int]], *, vocab_size: int, seed: int
    ) -> None:
        self._asked = asked
        self._answer = answer
        self._vocab_size = vocab_size
        self._seed = seed
        self._followed = {each.follows for each in asked if each.follows is not None}
        self._said: dict[int, array[int]] = {}  # of conversations under way: the last prompt, by its request

    def __call__(self, index: int) -> array[int]:
        asked = self._asked[index]
        ids = (
            prompt_ids(asked, index, vocab_size=self._vocab_size, seed=self._seed)
            if asked.follows is None
            else self._next_turn(index, asked)
        )
        if index in self._followed:
            self._said[index] = ids
        return ids

    def _next_turn(self, index: int, asked: LoadRequest) -> array[int]:
        assert asked.follows is not None
        said = self._said.pop(asked.follows)
        said = said + self._answer(asked.follows, len(said), self._asked[asked.follows].output)
        return said + own_ids(index, asked.prompt - len(said), vocab_size=self._vocab_size, seed=self._seed)


def prompt_ids(asked: LoadRequest, index: int, *, vocab_size: int, seed: int) -> array[int]:
    """The token ids of request number ``index``, which follows none."""
    parts, left = [], asked.prompt
    for name in asked.pieces[: -(-asked.prompt // asked.piece)] if asked.piece else ():
        parts.append(_ids((seed, 1, name), min(left, asked.piece), vocab_size))
        left -= len(parts[-1])
    parts.append(_ids((seed, 2, index), left, vocab_size))
    return _as_array(np.concatenate(parts))


def own_ids(index: int, count: int, *, vocab_size: int, seed: int) -> array[int]:
    """What a later turn, request number ``index``, adds to what was said."""
    return _as_array(_ids((seed, 2, index), count, vocab_size))


def _as_array(found: np.ndarray) -> array[int]:
    ids = array("i")
    ids.frombytes(found.tobytes())
    return ids


def _ids(name: tuple[int, int, int], count: int, vocab_size: int) -> np.ndarray:
    """``count`` ids that only their name decides: a hash of (name, position), as int32."""
    start = hash(name) & 0xFFFFFFFFFFFFFFFF  # of integers: the same in every process
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(start)) * _ODD
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
    found: np.ndarray = ((mixed ^ (mixed >> _SHIFT)) % np.uint64(vocab_size)).astype(np.int32)
    return found
