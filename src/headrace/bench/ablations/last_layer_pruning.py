"""The last layer for the wanted tokens alone, on and off: prompt tokens/s over the length of the prompts.

Predicted gain: (what follows attention in one layer) / (all layers), so the fewer layers, the more.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "prompt tokens"
FIGURES = (Figure("prompt tokens/s", True), Figure("ms/prompt", False))


def measure(lab: Lab) -> Result:
    count, lengths = (4, (32,)) if lab.quick else (8, (256, 1024, 4096))

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        prompts = random_dialogues(count, Lengths(length, 1), vocab_size=engine.info.vocab_size, seed=seed)
        seconds = lab.run(mode, (length, seed), engine.core, prompts).seconds
        return [{X: length, "prompt tokens/s": count * length / seconds, "ms/prompt": 1e3 * seconds / count}]

    return lab.result(f"{count} prompts at once, one token out", X, FIGURES, lab.curves(X, lengths, point))
