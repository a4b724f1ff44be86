"""What a simulation is asked, and when: lengths, arrivals and which beginnings are shared. Token ids are made when a request is sent.

What lives here: requests drawn from a seed or read from a trace, and their ids. What may not: clocks, reading files (bench/traces.py), arrival
times (bench/arrivals.py), models.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.bench.arrivals import Swing, arrival_times
from headrace.bench.traces import TRACE_BLOCK
from headrace.bench.workload import DrawsLengths, cut_row, scale_to, trace_rows
from headrace.errors import ConfigError
from headrace.sampling_params import NO_EXPECTATIONS, Expectations

BENCH_VOCAB = 1000  # of bench serve's ids, unless it is told otherwise
_ODD = np.uint64(0x9E3779B97F4A7C15)  # constants of splitmix64 (Steele et al. 2014)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``at`` in seconds from the start, None: when a client is free. Its prompt begins with the pieces named, each of
    ``piece`` tokens: equal names, equal tokens; the rest is its own.

    A later turn ``follows`` the request of that number: its prompt begins with that one's prompt and answer, and it is sent ``think`` seconds
    after that answer's end.
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


def drawn(count: int, lengths: DrawsLengths, *, prefix: int = 0, num_prefixes: int = 1, seed: int = 0) -> list[Asked]:
    """Requests of random lengths behind one of ``num_prefixes`` shared prefixes of ``prefix`` tokens, in turn.

    A seed draws the lengths that it draws for ``headrace bench serve``: numbers are taken in the same order, those of ids too.
    """
    rng = np.random.default_rng(seed)
    rng.integers(0, BENCH_VOCAB, prefix * num_prefixes)
    made = []
    for index in range(count):
        prompt, output = lengths.draw(rng)
        rng.integers(0, BENCH_VOCAB, prompt)
        made.append(Asked(prefix + prompt, output, pieces=(index % num_prefixes,) if prefix else (), piece=prefix))
    return made


def conversing(count: int, turns: int, lengths: DrawsLengths, *, system: int, think: float, seed: int = 0) -> list[Asked]:
    """``count`` conversations of ``turns`` turns behind one system prompt; ``think``: mean seconds between an answer and the next turn.

    Each turn asks with all that was said before and a new text. Drawn as ``drawn`` does.
    """
    rng = np.random.default_rng(seed)
    rng.integers(0, BENCH_VOCAB, system)
    made: list[Asked] = []
    for _ in range(count):
        for number in range(turns):
            new, output = lengths.draw(rng)
            thought = float(rng.exponential(think)) if number and think else 0.0
            rng.integers(0, BENCH_VOCAB, new)
            if number:
                before = made[-1]
                made.append(replace(before, prompt=before.prompt + before.output + new, output=output, follows=len(made) - 1, think=thought))
            else:
                made.append(Asked(system + new, output, pieces=(0,) if system else (), piece=system))
    return made


def arriving(
    asked: Sequence[Asked], rate: float, *, burstiness: float = 1.0, gaps: str = "gamma", swing: Swing | None = None, seed: int
) -> list[Asked]:
    """Open loop: requests, or first turns, come at times of their own (bench/arrivals.py). The same seed, the same arrivals as in ``headrace
    bench serve``. Raises ConfigError."""
    first = [each.follows is None for each in asked]
    times = iter(arrival_times(sum(first), rate, burstiness=burstiness, gaps=gaps, swing=swing, seed=seed))
    return [replace(each, at=float(next(times))) if begins else each for each, begins in zip(asked, first, strict=True)]


def traced(
    path: Path, *, count: int | None, speed: float = 1.0, max_prompt: int | None, max_output: int | None, rate: float | None = None
) -> list[Asked]:
    """A trace, ``speed`` times as fast, or as fast as makes ``rate`` requests a second of it: the same order, every gap scaled alike.

    With maxima, longer prompts and answers are cut to them. Raises ConfigError.
    """
    rows = trace_rows(path, count, speed=speed, rate=rate)
    return [Asked(*cut_row(row, max_prompt, max_output), row.at, row.hash_ids, TRACE_BLOCK) for row in rows]


def at_rate(asked: Sequence[Asked], rate: float) -> list[Asked]:
    """The same requests in the same order, all gaps scaled alike, so that ``rate`` come a second on average. Raises ConfigError."""
    times = [each.at for each in asked if each.at is not None]
    factor = scale_to(rate, times)
    return [each if each.at is None else replace(each, at=(each.at - times[0]) * factor) for each in asked]


def check_lengths(asked: Sequence[Asked], longest: int) -> None:
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
    """Token ids of every request, made when it is sent. ``answer``: what request r answered from a position on (r, position, count)."""

    def __init__(self, asked: Sequence[Asked], answer: Callable[[int, int, int], array[int]], *, vocab_size: int, seed: int) -> None:
        self._asked = asked
        self._answer = answer
        self._vocab_size = vocab_size
        self._seed = seed
        self._followed = {each.follows for each in asked if each.follows is not None}
        self._said: dict[int, array[int]] = {}  # of conversations under way: the last prompt, by its request

    def __call__(self, index: int) -> array[int]:
        asked = self._asked[index]
        ids = prompt_ids(asked, index, vocab_size=self._vocab_size, seed=self._seed) if asked.follows is None else self._next_turn(index, asked)
        if index in self._followed:
            self._said[index] = ids
        return ids

    def _next_turn(self, index: int, asked: Asked) -> array[int]:
        assert asked.follows is not None
        said = self._said.pop(asked.follows)
        said = said + self._answer(asked.follows, len(said), self._asked[asked.follows].output)
        return said + _as_array(_ids((self._seed, 2, index), asked.prompt - len(said), self._vocab_size))


def prompt_ids(asked: Asked, index: int, *, vocab_size: int, seed: int) -> array[int]:
    """The token ids of request number ``index``, which follows none."""
    parts, left = [], asked.prompt
    for name in asked.pieces[: -(-asked.prompt // asked.piece)] if asked.piece else ():
        parts.append(_ids((seed, 1, name), min(left, asked.piece), vocab_size))
        left -= len(parts[-1])
    parts.append(_ids((seed, 2, index), left, vocab_size))
    return _as_array(np.concatenate(parts))


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
