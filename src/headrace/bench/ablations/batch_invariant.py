"""Batch invariance on and off, which is what it costs: time a decode step over running requests, time of a prefill over its length."""

from __future__ import annotations

from headrace.bench.ablations.decode_steps import measure_steps
from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

LENGTH = "prompt tokens"
FIRST = Figure("ms to the first token", False)


def measure(lab: Lab) -> list[Result]:
    rows, out = ((1, 4), 6) if lab.quick else ((1, 8, 32, 128, 256), 64)
    return [measure_steps(lab, rows, out), _prefill(lab)]


def _prefill(lab: Lab) -> Result:
    lengths = (16, 64) if lab.quick else (128, 512, 2048, 8192)

    def timed(mode: str, engine: Engine, length: int, seed: int) -> float:
        dialogues = random_dialogues(1, Lengths(length, 1), vocab_size=engine.info.vocab_size, seed=seed)
        return lab.run(mode, (length, seed), engine.core, dialogues).seconds

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        if seed % 1000 == 0:  # the first repeat at this length: what is compiled at first use is not timed
            timed(mode, engine, length, 10**6 + seed)
        return [{LENGTH: length, FIRST.name: 1e3 * timed(mode, engine, length, seed)}]

    return lab.result("one prompt, one token out", LENGTH, (FIRST,), lab.curves(LENGTH, lengths, point), log="x")
