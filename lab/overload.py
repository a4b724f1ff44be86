"""``python -m lab overload``: what a device still serves in time when more is asked of it than it can do.

After Mooncake (Qin et al., FAST 25, §7): goodput is requests whose first token and whose tokens thereafter came within
their targets, a second of the whole run, the last answer's end included. It is shown from below what the device can do
to three times as much, on the same requests at the same times, through the engine's own scheduler on simulated devices:
first come, first served as it stands; the same with steps bounded in time; and ``deadline``, which goes by what is due
and turns away what it predicts to be late.

What lives here: the ways, the curve, the table. What may not: runs (simulated.py), the policy (scheduler/), modelling
(planner/).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.planner.workload.statistics import meets
from lab import simulated

ROWS = 256
COLUMNS = (
    "load",
    "requests/s",
    "way",
    "good/s",
    "good tokens/s",
    "good",
    "refused",
    "late",
    "median first token ms",
    "p99 first token ms",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    simulated.add_arguments(parser)
    parser.add_argument(
        "--ttft", type=float, default=2000.0, metavar="MS", help="target of the first token (default: 2000)"
    )
    parser.add_argument(
        "--tpot", type=float, default=100.0, metavar="MS", help="target from one token to the next (default: 100)"
    )
    usual = [0.5, 0.8, 1.0, 1.5, 2.0, 3.0]
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=usual,
        metavar="X",
        help="times what the device can do (default: 0.5 … 3)",
    )


def run(args: argparse.Namespace) -> int:
    for name, values in (("--ttft", [args.ttft]), ("--tpot", [args.tpot]), ("--loads", args.loads)):
        if any(not 0 < value < float("inf") for value in values):
            raise ConfigError(f"{name} is {' '.join(f'{value:g}' for value in values)}; give finite numbers above 0.")
    bench, limits = simulated.create(args), {"ttft": args.ttft / 1e3, "tpot": args.tpot / 1e3}
    facts = machine_facts(
        str(bench.device),
        shape=simulated.shape(args),
        model=args.model,
        targets=f"ttft {args.ttft:g} ms, tpot {args.tpot:g} ms",
    )
    print_facts(facts)
    most = saturated(bench, limits)
    print(f"\nall at once, first come, first served: {most:.3g} requests/s end while it is full; that is a load of 1\n")
    sweep = Sweep()
    points = sweep.take(point for load in args.loads for point in _points(bench, load, load * most, limits))
    print(table(COLUMNS, [[point[column] for column in COLUMNS] for point in points]))
    prices = bench.say_prices()
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "prices": prices, "saturated": most, "points": points})
    return sweep.status()


def ways(limits: Mapping[str, float]) -> dict[str, EngineConfig]:
    ttft, tpot = limits["ttft"] * 1e3, limits["tpot"] * 1e3
    schedulers = {
        "fcfs": SchedulerConfig(max_num_seqs=ROWS),
        f"fcfs, {tpot:g} ms steps": SchedulerConfig(max_num_seqs=ROWS, max_step_ms=tpot),
        "deadline": SchedulerConfig(
            max_num_seqs=ROWS, scheduling_policy="deadline", ttft_target_ms=ttft, tpot_target_ms=tpot
        ),
    }
    return {name: EngineConfig(scheduler=scheduler) for name, scheduler in schedulers.items()}


def saturated(bench: simulated.Bench, limits: Mapping[str, float]) -> float:
    """Requests a second when all are there from the start, without the first and the last tenth to end: filling and
    draining."""
    _, samples = bench.run(ways(limits)["fcfs"], bench.at_rate(float("inf")))
    ends = sorted(sample.ended for sample in samples)
    tenth = len(ends) // 10
    if ends[-1 - tenth] == ends[tenth]:
        raise ConfigError(
            f"All {len(ends)} answers end at one moment, so nothing says what this device can do; give more --requests."
        )
    return (len(ends) - 2 * tenth - 1) / (ends[-1 - tenth] - ends[tenth])


def _points(bench: simulated.Bench, load: float, rate: float, limits: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    asked = bench.at_rate(rate)
    for name, config in ways(limits).items():
        figures, samples = bench.run(config, asked)
        served = [sample for sample in samples if sample.error is None]
        good = [sample for sample in served if meets(sample, limits)]
        seconds = figures["duration"]
        yield {
            "load": load,
            "requests/s": rate,
            "way": name,
            "good/s": len(good) / seconds,
            "good tokens/s": sum(each.prompt_tokens + each.output_tokens for each in good) / seconds,
            "good": f"{len(good) / len(samples):.0%}",
            "refused": f"{1 - len(served) / len(samples):.0%}",
            "late": f"{(len(served) - len(good)) / len(samples):.0%}",
            "median first token ms": figures["median_ttft_ms"],
            "p99 first token ms": figures["p99_ttft_ms"],
        }
