"""Cascade attention on and off: time a decode step of requests that share a system prompt, over its length.

The step's time is (time of the run - time of the same run with one token out) / (tokens out - 1), as in ``bench table``.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result, Side
from headrace.bench.workload import Lengths, shared_prefix_dialogues
from headrace.engine.assembly import Engine

PREFIX = "shared prefix tokens"
FIGURES = (Figure("ms/decode step", False), Figure("total s", False))
OWN = 64


def measure(lab: Lab) -> Result:
    prefixes, count, out = ((0, 64), 4, 4) if lab.quick else ((0, 512, 2048, 8192), 256, 64)

    def timed(mode: str, engine: Engine, prefix: int, out: int, seed: int) -> float:
        requests = shared_prefix_dialogues(count, Lengths(OWN, out), num_prefixes=1, prefix_len=prefix, vocab_size=engine.info.vocab_size, seed=seed)
        return lab.run(mode, (prefix, out, seed), engine.core, requests).seconds

    def point(mode: str, engine: Engine, prefix: int, seed: int) -> list[Point]:
        first, whole = timed(mode, engine, prefix, 1, 10**6 + seed), timed(mode, engine, prefix, out, seed)
        return [{PREFIX: prefix, "ms/decode step": 1e3 * (whole - first) / (out - 1), "total s": whole}]

    sides = {mode: Side({"scheduler.max_num_seqs": count}) for mode in MODES}
    title = f"{count} requests at once: a shared system prompt, then {OWN} tokens; {out} out"
    return lab.result(title, PREFIX, FIGURES, lab.curves(PREFIX, prefixes, point, sides))
