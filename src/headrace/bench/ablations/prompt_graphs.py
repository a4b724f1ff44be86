"""Steps with prompts as graphs, on and off: ms to the first token over the length of the prompt, alone; requests/s where one begins as another ends.

Prompts by themselves are timed once every shape of theirs is recorded, as an idle server does it; the others behind as many requests that are not.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.statistics import summarise
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "prompt tokens"
FIRST = Figure("ms to the first token", False)
LOAD = "requests at once"
SERVED = (Figure("requests/s", True), Figure("p99 itl ms", False))
_UNTIMED = 3  # prompts of a length, at first
_TURNS = 5  # and behind them


def measure(lab: Lab) -> list[Result]:
    return [_alone(lab), _one_after_another(lab)]


def _alone(lab: Lab) -> Result:
    lengths = (16, 48) if lab.quick else (16, 64, 128, 256, 512, 1024, 2048)

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        return [{X: length, FIRST.name: 1e3 * first_token(lab, mode, engine, length, seed)}]

    return lab.result("one prompt, one token out", X, (FIRST,), lab.curves(X, lengths, point), log="x")


def _one_after_another(lab: Lab) -> Result:
    """Most steps decode for some and compute the prompts of others."""
    loads, turns, lengths = ((2,), 2, Lengths(16, 4, 0.5)) if lab.quick else ((8, 32, 64), 8, Lengths(256, 32, 0.9))

    def point(mode: str, engine: Engine, load: int, seed: int) -> list[Point]:
        for each in (10**6 + seed, seed):
            dialogues = random_dialogues(turns * load, lengths, vocab_size=engine.info.vocab_size, seed=each)
            run = lab.run(mode, each, engine.core, dialogues, max_concurrency=load)
        figures = summarise(run.samples, run.seconds)
        return [{LOAD: load, SERVED[0].name: figures["request_throughput"], SERVED[1].name: figures["p99_itl_ms"]}]

    title = f"prompts of {lengths.prompt}, answers of {lengths.output} ± 90 %, one begins as another ends"
    return lab.result(title, LOAD, SERVED, lab.curves(LOAD, loads, point))


def first_token(lab: Lab, mode: str, engine: Engine, length: int, seed: int) -> float:
    """Seconds of a prompt of ``length`` tokens, alone: the least of some."""
    return min([lone_prompt(lab, mode, engine, length, (seed, turn)) for turn in range(_UNTIMED + _TURNS)][_UNTIMED:])


def lone_prompt(lab: Lab, mode: str, engine: Engine, length: int, seed: tuple[int, int]) -> float:
    """Seconds; no two seeds have one prompt."""
    dialogues = random_dialogues(1, Lengths(length, 1), vocab_size=engine.info.vocab_size, seed=1000 * seed[0] + seed[1])
    return lab.run(mode, (length, *seed), engine.core, dialogues).seconds
