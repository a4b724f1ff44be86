"""Continuous batching on and off: throughput and waiting over offered load, answers of uneven length.

Off, a batch runs until its last sequence ends; its size is that side's own best setting.
Both sides meet the same arrivals of the same requests.
"""

from __future__ import annotations

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result
from headrace.bench.driver import drive
from headrace.bench.statistics import summarise
from headrace.bench.workload import Lengths, random_dialogues, with_arrivals
from headrace.engine.assembly import Engine

X = "offered requests/s"
FIGURES = (Figure("mean e2e s", False), Figure("p99 ttft s", False), Figure("requests/s", True), Figure("output tokens/s", True))
SEQS = "scheduler.max_num_seqs"
ARRIVAL_SECONDS = 3.0  # of each point


def measure(lab: Lab) -> Result:
    lengths = Lengths(16, 8, 0.9) if lab.quick else Lengths(32, 64, 0.9)
    sizes = (4, 8) if lab.quick else (32, 64, 128)

    def capacity(engine: Engine) -> float:
        """Requests/s when all are there from the start."""
        count = 16 if lab.quick else 192
        run = drive(engine.core, random_dialogues(count, lengths, vocab_size=engine.info.vocab_size, seed=1))
        return count / run.seconds

    def point(mode: str, engine: Engine, load: float, seed: int) -> list[Point]:
        count = 12 if lab.quick else max(16, round(load * ARRIVAL_SECONDS))
        requests = random_dialogues(count, lengths, vocab_size=engine.info.vocab_size, seed=seed)
        run = lab.run(mode, seed, engine.core, with_arrivals(requests, load, seed=seed))
        figures = summarise(run.samples, run.seconds)
        values = (figures["mean_e2el_ms"] / 1e3, figures["p99_ttft_ms"] / 1e3, figures["request_throughput"], figures["output_throughput"])
        return [{X: load, **dict(zip([figure.name for figure in FIGURES], values, strict=True))}]

    sides = {mode: lab.best(mode, [{SEQS: size} for size in sizes], capacity) for mode in MODES}
    with lab.engine("on", sides["on"].settings) as engine:
        most = capacity(engine)
    loads = [float(f"{most * share:.3g}") for share in ((0.8,) if lab.quick else (0.25, 0.5, 0.75, 1.0, 1.3))]
    title = f"prompts of {lengths.prompt}, answers of {lengths.output} ± 90 %, Poisson arrivals"
    return lab.result(title, X, FIGURES, lab.curves(X, loads, point, sides))
