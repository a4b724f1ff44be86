"""Chunked prefill on and off: the tail of the time between tokens over offered load, long prompts beside running answers.

Off, a prompt is computed whole before any decoding. Each side gets its own best number of tokens a step: the one with the
lowest tail at a middle load among those that keep nine tenths of the best throughput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.ablations.lab import MODES, Figure, Lab, Point, Result, Settings, Side, shown
from headrace.bench.driver import Run, drive
from headrace.bench.statistics import summarise
from headrace.bench.workload import Dialogue, Lengths, random_dialogues, with_arrivals
from headrace.engine.assembly import Engine

X = "offered requests/s"
FIGURES = (Figure("p99 itl ms", False), Figure("median itl ms", False), Figure("mean ttft ms", False), Figure("output tokens/s", True))
BUDGET = "scheduler.max_num_batched_tokens"
SEQS = {"scheduler.max_num_seqs": 16}
MIN_SHARE = 0.9  # of the best throughput
ARRIVAL_SECONDS = 4.0  # of each point


def measure(lab: Lab) -> Result:
    budgets = {"off": (512,), "on": (32,)} if lab.quick else {"off": (1536, 3072), "on": (128, 256, 512)}
    return measure_tails(lab, {mode: [{BUDGET: budget} for budget in budgets[mode]] for mode in MODES})


def measure_tails(lab: Lab, settings: Mapping[str, Sequence[Settings]]) -> Result:
    """Both sides over offered load, each at the best of its settings."""
    lengths = Lengths(64, 8, 0.2) if lab.quick else Lengths(1024, 64, 0.25)
    most = _capacity(lab, lengths, settings["on"][-1])

    def workload(engine: Engine, load: float, seed: int) -> list[Dialogue]:
        count = 6 if lab.quick else max(10, round(load * ARRIVAL_SECONDS))
        return with_arrivals(random_dialogues(count, lengths, vocab_size=engine.info.vocab_size, seed=seed), load, seed=seed)

    def trial(engine: Engine) -> Point:
        drive(engine.core, workload(engine, most / 2, 9998))  # an engine that prices its steps has met some of them
        return _figures(drive(engine.core, workload(engine, most / 2, 9999)))

    def point(mode: str, engine: Engine, load: float, seed: int) -> list[Point]:
        return [{X: load, **_figures(lab.run(mode, seed, engine.core, workload(engine, load, seed)))}]

    sides = {}
    for mode in MODES:
        candidates = [{**each, **SEQS} for each in settings[mode]]
        tried = []
        for candidate in candidates:
            with lab.engine(mode, candidate) as engine:
                tried.append({**candidate, **trial(engine)})
            lab.say(f"{mode}: tried {shown(tried[-1])}")
        sides[mode] = Side(_lowest_tail(candidates, tried), tried)
    loads = [float(f"{most * share:.3g}") for share in ((0.6,) if lab.quick else (0.2, 0.4, 0.6, 0.8, 0.95))]
    title = f"prompts of {lengths.prompt}, answers of {lengths.output}, Poisson arrivals"
    return lab.result(title, X, FIGURES, lab.curves(X, loads, point, sides))


def _capacity(lab: Lab, lengths: Lengths, settings: Settings) -> float:
    """Requests/s when all are there from the start, with the technique on; the second time, when prices of steps are known."""
    count = 4 if lab.quick else 24
    with lab.engine("on", {**settings, **SEQS}) as engine:
        runs = [drive(engine.core, random_dialogues(count, lengths, vocab_size=engine.info.vocab_size, seed=seed)) for seed in (1, 2)]
        return count / runs[-1].seconds


def _lowest_tail(candidates: list[dict[str, Any]], tried: list[Point]) -> dict[str, Any]:
    """Among the settings that do not pay for the tail with throughput."""
    fastest = max(each["output tokens/s"] for each in tried)
    allowed = [index for index, each in enumerate(tried) if each["output tokens/s"] >= MIN_SHARE * fastest]
    return candidates[min(allowed, key=lambda index: tried[index]["p99 itl ms"])]


def _figures(run: Run) -> Point:
    figures = summarise(run.samples, run.seconds)
    values = (figures["p99_itl_ms"], figures["median_itl_ms"], figures["mean_ttft_ms"], figures["output_throughput"])
    return dict(zip([figure.name for figure in FIGURES], values, strict=True))
