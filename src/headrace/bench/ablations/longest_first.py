"""Longest answers first on and off: the time until the last of many requests has ended, all given at once, by how much their answers differ.

Both sides are given the same requests in the same order; what the engine makes of that is the technique.
"""

from __future__ import annotations

from array import array

from headrace.bench.ablations.lab import Figure, Lab, Point, Result
from headrace.bench.driver import drive, greedy
from headrace.bench.workload import Dialogue, Lengths, random_dialogues
from headrace.engine.assembly import Engine
from headrace.request import Request

X = "answers: ± %"
FIGURES = (Figure("s in all", False), Figure("steps", False), Figure("output tokens/s", True))
ROWS = "scheduler.max_num_seqs"


def measure(lab: Lab) -> Result:
    rows, count, lengths = (4, 12, Lengths(8, 12)) if lab.quick else (32, 96, Lengths(32, 64))

    def point(mode: str, engine: Engine, spread: int, seed: int) -> list[Point]:
        drawn = random_dialogues(count, Lengths(lengths.prompt, lengths.output, spread / 100), vocab_size=engine.info.vocab_size, seed=seed)
        order = [request.request_id for request in engine.core.batch_order([_request(number, each) for number, each in enumerate(drawn)])]
        run = drive(engine.core, [drawn[number] for number in order])
        lab.keep(mode, (spread, seed), {(order[place], turn): tokens for (place, turn), tokens in run.answers.items()})
        values = (run.seconds, float(run.steps), run.output_tokens / run.seconds)
        return [{X: float(spread), **dict(zip([figure.name for figure in FIGURES], values, strict=True))}]

    sides = {mode: lab.best(mode, [{ROWS: rows}], lambda engine: 0.0) for mode in ("off", "on")}
    title = f"{count} requests at once on {rows} rows, prompts of {lengths.prompt}, answers of {lengths.output} tokens and more or less"
    return lab.result(title, X, FIGURES, lab.curves(X, (90,) if lab.quick else (0, 50, 90), point, sides))


def _request(number: int, dialogue: Dialogue) -> Request:
    (turn,) = dialogue.turns
    return Request(request_id=number, prompt_token_ids=array("i", turn.new_ids), params=greedy(turn))
