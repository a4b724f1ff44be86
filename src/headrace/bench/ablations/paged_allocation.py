"""Paged (lazy) allocation on and off: how many requests run at once in the same memory over the length they ask for.

Answers end after 32 tokens whatever was asked; off, the longest possible answer is reserved at admission.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result, Side
from headrace.bench.workload import Dialogue, Lengths, random_dialogues
from headrace.engine.assembly import Engine

X = "max_tokens asked"
FIGURES = (Figure("running at once", True), Figure("output tokens/s", True), Figure("mean ttft ms", False))
ANSWER = 32  # tokens


def measure(lab: Lab) -> Result:
    blocks, count, asked = (48, 12, (64, 256)) if lab.quick else (128, 32, (32, 64, 128, 256, 512, 1024))

    def point(mode: str, engine: Engine, max_tokens: int, seed: int) -> list[Point]:
        requests = random_dialogues(count, Lengths(32, max_tokens), vocab_size=engine.info.vocab_size, seed=seed)
        run = lab.run(mode, seed, engine.core, [_stopping(request) for request in requests])
        ttft = sum(sample.ttft for sample in run.samples) / count * 1e3
        values = (run.most_scheduled, run.output_tokens / run.seconds, ttft)
        return [{X: max_tokens, **dict(zip([figure.name for figure in FIGURES], values, strict=True))}]

    sides = {mode: Side({"cache.num_blocks": blocks, "scheduler.max_num_seqs": count}) for mode in MODES}
    title = f"{blocks} KV blocks, {count} requests at once, prompts of 32, answers of {ANSWER} whatever was asked"
    return lab.result(title, X, FIGURES, lab.curves(X, asked, point, sides), log="x")


def _stopping(dialogue: Dialogue) -> Dialogue:
    return replace(dialogue, turns=tuple(replace(turn, stop_after=ANSWER) for turn in dialogue.turns))
