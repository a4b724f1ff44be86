"""Batch invariance on and off, which is what it costs: time a decode step over running requests, time of a prefill over its length.

The step's time is (time of the run - time of the same run with one token out) / (tokens out - 1), as in ``bench table``.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result, Side
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

ROWS, LENGTH = "running requests", "prompt tokens"
STEP, FIRST = Figure("ms/decode step", False), Figure("ms to the first token", False)
PROMPT = 128


def measure(lab: Lab) -> list[Result]:
    return [_decode(lab), _prefill(lab)]


def _decode(lab: Lab) -> Result:
    rows, out = ((1, 4), 6) if lab.quick else ((1, 8, 32, 128, 256), 64)

    def point(mode: str, engine: Engine, count: int, seed: int) -> list[Point]:
        if seed % 1000 == 0:  # the first repeat at this size: what is compiled and captured at first use is not timed
            _timed(lab, mode, engine, count, PROMPT, min(out, 16), 10**6 + seed)
        first = _timed(lab, mode, engine, count, PROMPT, 1, 2 * 10**6 + seed)
        return [{ROWS: count, STEP.name: 1e3 * (_timed(lab, mode, engine, count, PROMPT, out, seed) - first) / (out - 1)}]

    sides = {mode: Side({"scheduler.max_num_seqs": max(rows)}) for mode in MODES}
    return lab.result(f"prompts of {PROMPT}, {out} out, all at once", ROWS, (STEP,), lab.curves(ROWS, rows, point, sides), log="x")


def _prefill(lab: Lab) -> Result:
    lengths = (16, 64) if lab.quick else (128, 512, 2048, 8192)

    def point(mode: str, engine: Engine, length: int, seed: int) -> list[Point]:
        if seed % 1000 == 0:
            _timed(lab, mode, engine, 1, length, 1, 10**6 + seed)
        return [{LENGTH: length, FIRST.name: 1e3 * _timed(lab, mode, engine, 1, length, 1, seed)}]

    return lab.result("one prompt, one token out", LENGTH, (FIRST,), lab.curves(LENGTH, lengths, point), log="x")


def _timed(lab: Lab, mode: str, engine: Engine, count: int, length: int, out: int, seed: int) -> float:
    dialogues = random_dialogues(count, Lengths(length, out), vocab_size=engine.info.vocab_size, seed=seed)
    return lab.run(mode, (count, length, out, seed), engine.core, dialogues).seconds
