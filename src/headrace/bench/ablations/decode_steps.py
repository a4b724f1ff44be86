"""Time a decode step over running requests, for techniques of how steps are computed.

The step's time is (time of the run - time of the same run with one token out) / (tokens out - 1), as in ``bench table``.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result, Side
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "running requests"
FIGURES = (Figure("ms/decode step", False), Figure("output tokens/s", True))
PROMPT = 128


def measure(lab: Lab) -> Result:
    rows, out = ((1, 4), 8) if lab.quick else ((1, 2, 4, 8, 16, 32, 64, 128, 256), 128)
    return measure_steps(lab, rows, out)


def measure_steps(lab: Lab, rows: Sequence[int], out: int) -> Result:
    """At each of so many running requests; ``out``: tokens of each answer."""

    def timed(mode: str, engine: Engine, count: int, out: int, seed: int) -> float:
        dialogues = random_dialogues(count, Lengths(PROMPT, out), vocab_size=engine.info.vocab_size, seed=seed)
        return lab.run(mode, (count, out, seed), engine.core, dialogues).seconds

    def point(mode: str, engine: Engine, count: int, seed: int) -> list[Point]:
        if seed % 1000 == 0:  # the first repeat at this size: kernels are compiled and graphs captured before anything is timed
            timed(mode, engine, count, min(out, 16), 10**6 + seed)
        first = timed(mode, engine, count, 1, 2 * 10**6 + seed)
        step = (timed(mode, engine, count, out, seed) - first) / (out - 1)
        return [{X: count, "ms/decode step": 1e3 * step, "output tokens/s": count / step}]

    sides = {mode: Side({"scheduler.max_num_seqs": max(rows)}) for mode in MODES}
    title = f"prompts of {PROMPT}, {out} out, all at once"
    return lab.result(title, X, FIGURES, lab.curves(X, rows, point, sides), log="x")
