"""A budget of milliseconds a step, on and off: the tail of the time between tokens over offered load, long prompts beside running answers.

Off, a step is bounded by a number of tokens alone. Each side gets its own best: of numbers of tokens, and of milliseconds.
Over requests a second at a bound, and on devices that are not here, see ``headrace bench capacity``.
"""

from __future__ import annotations

from headrace.bench.ablations.chunked_prefill import BUDGET, measure_tails
from headrace.bench.ablations.lab import Lab, Result

TIME = "scheduler.max_step_ms"


def measure(lab: Lab) -> Result:
    tokens, milliseconds = ((32,), (20.0,)) if lab.quick else ((128, 256, 512), (10.0, 20.0, 40.0))
    return measure_tails(lab, {"off": [{BUDGET: each} for each in tokens], "on": [{TIME: each} for each in milliseconds]})
