"""Steps with prompts as graphs, on and off: ms to the first token over the length of the prompt.

A length is timed once it has been recorded; what it takes before (a step launch by launch, then one that is recorded) is not.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "prompt tokens"
FIRST = Figure("ms to the first token", False)
_UNTIMED = 3  # prompts of a length, at first
_TURNS = 5  # and behind them


def measure(lab: Lab) -> Result:
    lengths = (16, 48) if lab.quick else (16, 64, 128, 256, 512, 1024, 2048)

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        return [{X: length, FIRST.name: 1e3 * first_token(lab, mode, engine, length, seed)}]

    return lab.result("one prompt, one token out", X, (FIRST,), lab.curves(X, lengths, point), log="x")


def first_token(lab: Lab, mode: str, engine: Engine, length: int, seed: int) -> float:
    """Seconds of a prompt of ``length`` tokens, alone: the least of some."""
    return min([lone_prompt(lab, mode, engine, length, (seed, turn)) for turn in range(_UNTIMED + _TURNS)][_UNTIMED:])


def lone_prompt(lab: Lab, mode: str, engine: Engine, length: int, seed: tuple[int, int]) -> float:
    """Seconds; no two seeds have one prompt."""
    dialogues = random_dialogues(1, Lengths(length, 1), vocab_size=engine.info.vocab_size, seed=1000 * seed[0] + seed[1])
    return lab.run(mode, (length, *seed), engine.core, dialogues).seconds
