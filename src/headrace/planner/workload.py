"""What a simulation is asked, and when: lengths, arrivals and which beginnings are shared. Token ids are made when a request is sent.

What lives here: requests drawn from a seed or read from a trace, and their ids. What may not: clocks, reading files (bench/workload.py
does), models.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headrace.bench.workload import TRACE_BLOCK, Lengths, read_trace
from headrace.errors import ConfigError
from headrace.request import NO_EXPECTATIONS, Expectations

BENCH_VOCAB = 1000  # of bench serve's ids, unless it is told otherwise
_ODD = np.uint64(0x9E3779B97F4A7C15)  # constants of splitmix64 (Steele et al. 2014)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``at`` in seconds from the start, None: when a client is free. Its prompt begins with the pieces named, each of
    ``piece`` tokens: equal names, equal tokens; the rest is its own."""

    prompt: int
    output: int
    at: float | None = None
    pieces: tuple[int, ...] = ()
    piece: int = 0
    tenant: str = ""
    expects: Expectations = NO_EXPECTATIONS


def drawn(count: int, lengths: Lengths, *, prefix: int = 0, num_prefixes: int = 1, seed: int = 0) -> list[Asked]:
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


def arriving(asked: Sequence[Asked], rate: float, *, burstiness: float, seed: int) -> list[Asked]:
    """Open loop: gaps are gamma distributed with mean 1 / rate and shape ``burstiness`` (1: Poisson; inf: all gaps equal).

    An infinite rate sends everything at once. The same seed, the same arrivals as in ``headrace bench serve``.
    """
    if not rate > 0 or not burstiness > 0:
        raise ConfigError(f"The request rate is {rate:g} and the burstiness {burstiness:g}; give numbers above 0.")
    if math.isinf(rate) or math.isinf(burstiness):
        gaps = np.full(len(asked), 1.0 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), len(asked))
    return [replace(each, at=float(when)) for each, when in zip(asked, np.cumsum(gaps), strict=True)]


def traced(path: Path, *, count: int | None, speed: float, max_prompt: int | None, max_output: int | None, rate: float | None = None) -> list[Asked]:
    """A trace, ``speed`` times as fast, or as fast as makes ``rate`` requests a second of it: the same order, every gap scaled alike.

    With maxima, longer prompts and answers are cut to them. Raises ConfigError.
    """
    if not 0 < speed < math.inf:
        raise ConfigError(f"--trace-speed is {speed:g}; give a finite number above 0.")
    asked: list[Asked] = []
    for row in read_trace(path):
        if len(asked) == count:
            break
        prompt, output = min(row.prompt, max_prompt or row.prompt), min(row.output, max_output or row.output)
        asked.append(Asked(prompt, max(1, output), row.at / speed, row.hash_ids, TRACE_BLOCK))
    if not asked:
        raise ConfigError(f"The trace {path} holds no requests; give one with at least one row.")
    return asked if rate is None else at_rate(asked, rate)


def at_rate(asked: Sequence[Asked], rate: float) -> list[Asked]:
    """The same requests in the same order, all gaps scaled alike, so that ``rate`` come a second on average. Raises ConfigError."""
    first, last = asked[0].at, asked[-1].at
    assert first is not None and last is not None, "they have arrivals"
    if not 0 < rate < math.inf:
        raise ConfigError(f"The request rate is {rate:g}; give a finite number above 0.")
    if not last > first:
        raise ConfigError(f"All {len(asked)} requests come at once, so there is no rate to scale; leave --request-rate and --sweep-rate out.")
    factor = (len(asked) - 1) / (last - first) / rate
    return [replace(each, at=((each.at or 0.0) - first) * factor) for each in asked]


def check_lengths(asked: Sequence[Asked], longest: int) -> None:
    """Every request must fit as it stands: cut answers would be figures of another workload. Raises ConfigError."""
    over = [index for index, each in enumerate(asked) if each.prompt + each.output > longest]
    if over:
        worst = max(over, key=lambda index: asked[index].prompt + asked[index].output)
        named = f"request {worst + 1} has {asked[worst].prompt} + {asked[worst].output}"
        raise ConfigError(
            f"{len(over)} of {len(asked)} requests are longer than the {longest} tokens that this model and its cache hold ({named}). "
            f"Cut them with --max-input-len and --max-output-len, or take a larger device or model."
        )


def prompt_ids(asked: Asked, index: int, *, vocab_size: int, seed: int) -> array[int]:
    """The token ids of request number ``index``."""
    parts, left = [], asked.prompt
    for name in asked.pieces[: -(-asked.prompt // asked.piece)] if asked.piece else ():
        parts.append(_ids((seed, 1, name), min(left, asked.piece), vocab_size))
        left -= len(parts[-1])
    parts.append(_ids((seed, 2, index), left, vocab_size))
    ids = array("i")
    ids.frombytes(np.concatenate(parts).tobytes())
    return ids


def _ids(name: tuple[int, int, int], count: int, vocab_size: int) -> np.ndarray:
    """``count`` ids that only their name decides: a hash of (name, position), as int32."""
    start = hash(name) & 0xFFFFFFFFFFFFFFFF  # of integers: the same in every process
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(start)) * _ODD
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
    found: np.ndarray = ((mixed ^ (mixed >> _SHIFT)) % np.uint64(vocab_size)).astype(np.int32)
    return found
