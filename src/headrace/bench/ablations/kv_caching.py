"""KV caching on and off: one stream's tokens/s over the length of its answer.

Off, step n computes the whole sequence again: the work grows with the square of the answer.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "output tokens"
FIGURES = (Figure("output tokens/s", True), Figure("last gap ms", False))


def measure(lab: Lab) -> Result:
    lengths = (8, 16) if lab.quick else (16, 32, 64, 128, 256)

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        dialogues = random_dialogues(1, Lengths(32, length), vocab_size=engine.info.vocab_size, seed=seed)
        run = lab.run(mode, seed, engine.core, dialogues)
        return [{X: length, "output tokens/s": length / run.seconds, "last gap ms": run.samples[0].gaps[-1] * 1e3}]

    return lab.result("one stream, prompt of 32", X, FIGURES, lab.curves(X, lengths, point))
