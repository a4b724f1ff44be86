"""Every kind of step, for techniques that serve prompts as well as those that decode: decode steps over running requests, one prompt by
itself over its length, and many requests at once, whose steps do both.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.bench.ablations import decode_steps
from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.ablations.prompt_graphs import FIRST, X
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

COUNT = "requests at once"
ALL = Figure("s in all", False)


def measure(lab: Lab) -> list[Result]:
    return [decode_steps.measure(lab), measure_prompts(lab, (16, 64) if lab.quick else (1024, 2048, 4096, 8192)), _mixed(lab)]


def measure_prompts(lab: Lab, lengths: Sequence[int]) -> Result:
    """One at a time, nothing beside it."""

    def timed(mode: str, engine: Engine, length: int, seed: int) -> float:
        dialogues = random_dialogues(1, Lengths(length, 1), vocab_size=engine.info.vocab_size, seed=seed)
        return lab.run(mode, (length, seed), engine.core, dialogues).seconds

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        if seed % 1000 == 0:  # the first repeat at this length: what is compiled at first use is not timed
            timed(mode, engine, length, 10**6 + seed)
        return [{X: length, FIRST.name: 1e3 * timed(mode, engine, length, seed)}]

    return lab.result("one prompt, one token out", X, (FIRST,), lab.curves(X, lengths, point), log="x")


def _mixed(lab: Lab) -> Result:
    """Answers begin while prompts are still computed, so that most steps decode some rows beside a prompt's."""
    counts, lengths = ((4,), Lengths(32, 6, 0.5)) if lab.quick else ((32, 128), Lengths(1088, 136, 0.88))

    def point(mode: str, engine: Engine, count: int, seed: int) -> list[Point]:
        for each in (10**6 + seed, seed) if seed % 1000 == 0 else (seed,):
            dialogues = random_dialogues(count, lengths, vocab_size=engine.info.vocab_size, seed=each)
            seconds = lab.run(mode, (count, each), engine.core, dialogues).seconds
        return [{COUNT: count, ALL.name: seconds}]

    title = f"prompts of {lengths.prompt}, answers of {lengths.output} ± {round(100 * lengths.spread)} %, all at once"
    return lab.result(title, COUNT, (ALL,), lab.curves(COUNT, counts, point))
