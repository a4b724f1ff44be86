"""Overlap on and off: steps/s over running requests, on an executor that computes no model and takes 2 ms a step.

On a machine whose cores compute the model themselves overlap cannot show; here the device's time is time that passes.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result, Side
from headrace.bench.workload import Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "running requests"
FIGURES = (Figure("steps/s", True), Figure("ms/step", False), Figure("idle share", False))
DEVICE_TIME = 0.002  # s


def measure(lab: Lab) -> Result:
    lab.config = replace(lab.config, device=replace(lab.config.device, executor="keyed-hash", device_time=DEVICE_TIME))
    rows, steps = ((16,), 30) if lab.quick else ((16, 32, 64, 128, 192, 256), 400)

    def point(mode: str, engine: Engine, count: int, seed: int) -> list[Point]:
        run = lab.run(mode, seed, engine.core, random_dialogues(count, Lengths(8, steps), vocab_size=engine.info.vocab_size, seed=seed))
        rate = run.steps / run.seconds
        return [{X: count, "steps/s": rate, "ms/step": 1e3 / rate, "idle share": max(0.0, 1 - rate * DEVICE_TIME)}]

    sides = {mode: Side({"scheduler.max_num_seqs": max(rows)}) for mode in MODES}
    title = f"keyed-hash executor, {DEVICE_TIME * 1e3:g} ms a step, prompts of 8, {steps} out"
    return lab.result(title, X, FIGURES, lab.curves(X, rows, point, sides))
