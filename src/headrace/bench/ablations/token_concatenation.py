"""Token concatenation on and off: prefill throughput over how much the prompts differ in length.

Off, each step is padded to its longest sequence. Each side gets its own best number of tokens a step.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result
from headrace.bench.driver import drive
from headrace.bench.workload import Dialogue, Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "spread of lengths"
FIGURES = (Figure("prompt tokens/s", True), Figure("seconds", False))
BUDGET = "scheduler.max_num_batched_tokens"


def measure(lab: Lab) -> Result:
    count, mean = (6, 24) if lab.quick else (48, 128)
    spreads = (0.0, 0.9) if lab.quick else (0.0, 0.25, 0.5, 0.75, 1.0)
    budgets = (256,) if lab.quick else (256, 512, 1024, 2048)

    def prompts(engine: Engine, spread: float, seed: int) -> list[Dialogue]:
        return random_dialogues(count, Lengths(mean, 1, spread), vocab_size=engine.info.vocab_size, seed=seed)

    def rate(engine: Engine) -> float:
        """Prompt tokens/s at the widest spread."""
        dialogues = prompts(engine, 1.0, 999)
        return sum(len(dialogue.turns[0].new_ids) for dialogue in dialogues) / drive(engine.core, dialogues).seconds

    def point(mode: str, engine: Engine, spread: float, seed: int) -> list[Point]:
        run = lab.run(mode, seed, engine.core, prompts(engine, spread, seed))
        tokens = sum(sample.prompt_tokens for sample in run.samples)
        return [{X: spread, "prompt tokens/s": tokens / run.seconds, "seconds": run.seconds}]

    sides = {mode: lab.best(mode, [{BUDGET: budget} for budget in budgets], rate) for mode in MODES}
    return lab.result(f"{count} prompts of {mean} ± spread, one token out", X, FIGURES, lab.curves(X, spreads, point, sides))
