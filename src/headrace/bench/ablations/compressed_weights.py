"""Compressed weights on and off: time a decode step over running requests, time of a prefill over its length."""

from __future__ import annotations

from headrace.bench.ablations.decode_steps import measure_steps
from headrace.bench.ablations.every_step import measure_prompts
from headrace.bench.ablations.lab import Lab, Result


def measure(lab: Lab) -> list[Result]:
    rows, out = ((1, 4), 6) if lab.quick else ((1, 2, 4, 8, 16), 32)
    return [measure_steps(lab, rows, out), measure_prompts(lab, (16, 64) if lab.quick else (128, 512))]
