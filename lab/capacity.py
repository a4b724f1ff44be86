"""``python -m lab capacity``: how many requests a second a device serves within a bound on the time between tokens, by
how steps are bounded.

After Sarathi-Serve (Agrawal et al., OSDI 24, §5): capacity is the highest rate at which the 99th percentile of the time
between tokens stays below a bound and requests do not queue up: the median first token is in time, and while requests
come the queue grows no longer and as many end as come. Compared, on the same requests at the same times, through the
engine's own scheduler on simulated devices: whole prompts before any decoding, chunks of a fixed number of tokens, and
chunks that a budget in milliseconds allows.

What lives here: the ways, the search, the table. What may not: runs (simulated.py), modelling (planner/).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.bench.arguments import count, positive
from headrace.bench.sweep import Sweep
from headrace.config import EngineConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.observe.report import machine_facts, print_facts, table, write_json
from headrace.planner.workload.statistics import Sample
from lab import simulated

ROWS = 256
CLOSE = 1.03  # the search ends when the bounds of a capacity are that near each other
MOST_TIMES = 1e6  # of the first guess: whatever holds there holds at any rate
BUDGET_SHARE = 0.95  # of the bound, as the budget: a client's gap is a step and what little lies between two
GROWTH = 0.05  # of those that come in the second half may stay
COLUMNS = (
    "steps bounded by",
    "requests/s",
    "steady",
    "p99 gap ms",
    "median gap ms",
    "median first token ms",
    "p99 first token ms",
    "kept",
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to bound a step."""

    name: str
    config: EngineConfig
    plain: bool = False  # prompts are computed whole


Point = dict[str, Any]
Steady = Literal["yes", "no", "too short"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    simulated.add_arguments(parser)
    parser.add_argument(
        "--gap",
        type=positive,
        nargs="+",
        default=[100.0, 500.0],
        metavar="MS",
        help="bounds on the 99th percentile (default: 100 500)",
    )
    parser.add_argument(
        "--queued",
        type=positive,
        default=2000.0,
        metavar="MS",
        help="bound on the median time to the first token (default: 2000)",
    )
    parser.add_argument(
        "--chunks",
        type=count,
        nargs="+",
        default=[256, 512, 1024, 2048],
        metavar="N",
        help="fixed chunks (default: 256 … 2048)",
    )
    parser.add_argument(
        "--rates",
        type=positive,
        nargs="+",
        metavar="R",
        help="points of the load curve (default: shares of the best capacity)",
    )


def run(args: argparse.Namespace) -> int:
    bench = simulated.create(args)
    facts = machine_facts(str(bench.device), shape=simulated.shape(args), model=args.model)
    print_facts(facts)
    sweep = Sweep()
    found = sweep.take(_at_bound(bench, args, gap, sweep) for gap in args.gap)
    prices = bench.say_prices()
    if args.output_json:
        write_json(args.output_json, {"facts": facts, "prices": prices, "bounds": found})
    return sweep.status()


def ways(chunks: Sequence[int], gap: float) -> list[Way]:
    budget = gap * BUDGET_SHARE
    return [
        _way("nothing: whole prompts", SchedulerConfig(max_num_seqs=ROWS, chunked_prefill=False), plain=True),
        *(
            _way(f"{size} tokens", SchedulerConfig(max_num_seqs=min(size, ROWS), max_num_batched_tokens=size))
            for size in chunks
        ),
        _way(f"{budget:g} ms", SchedulerConfig(max_num_seqs=ROWS, max_step_ms=budget)),
    ]


def _way(name: str, scheduler: SchedulerConfig, *, plain: bool = False) -> Way:
    return Way(name, EngineConfig(scheduler=scheduler), plain)


def _at_bound(bench: simulated.Bench, args: argparse.Namespace, gap: float, sweep: Sweep) -> dict[str, Any]:
    """Capacities and the load curve at one bound, printed."""
    compared = ways(args.chunks, gap)

    def holds(found: Point) -> bool:
        return found["steady"] != "no" and bool(
            found["p99 gap ms"] <= gap and found["median first token ms"] <= args.queued
        )

    def capacity_of(way: Way) -> float:
        return capacity(lambda rate: holds(point(bench, way, rate)), bench.base_rate())

    capacities = {way.name: capacity_of(way) for way in compared}
    plain = next(capacities[way.name] for way in compared if way.plain)
    best = max(capacities.values())
    print(
        f"\ncapacity with the 99th percentile of the time between tokens within {gap:g} ms, and the median first token within {args.queued:g}:"
    )
    print(
        table(
            ("steps bounded by", "requests/s", "times whole prompts"),
            [[n, c, c / plain if plain else None] for n, c in capacities.items()],
        )
    )
    rates = args.rates or (
        [round(best * share, 3) for share in (0.3, 0.6, 0.8, 1.0, 1.2)] if best else [bench.base_rate()]
    )
    curve = sweep.take(point(bench, way, rate) for rate in rates for way in compared)
    print(f"\n{table(COLUMNS, [[each[column] for column in COLUMNS] for each in curve])}", flush=True)
    if any(each["steady"] == "too short" for each in curve):
        print(
            "too short: answers take longer than half of the run, so it cannot be told whether as many end as come; give more --requests."
        )
    return {"gap": gap, "capacities": capacities, "curve": curve}


def point(bench: simulated.Bench, way: Way, rate: float) -> Point:
    figures, samples = bench.run(way.config, bench.at_rate(rate))
    return {
        "steps bounded by": way.name,
        "requests/s": rate,
        "steady": steadiness_of(samples),
        "p99 gap ms": figures["p99_itl_ms"],
        "median gap ms": figures["median_itl_ms"],
        "median first token ms": figures["median_ttft_ms"],
        "p99 first token ms": figures["p99_ttft_ms"],
        "kept": figures.get("promise_kept_share"),
    }


def steadiness_of(samples: Sequence[Sample]) -> Steady:
    """Of the second half of the time in which requests came: whether about as many began and ended as came. "too
    short": a tenth of the answers take longer than that half, so only who began counts."""
    begin, end = (share * samples[-1].sent for share in (0.5, 1.0))
    came = sum(begin < each.sent <= end for each in samples)
    begun = sum(bool(each.arrivals) and begin < each.arrivals[0] <= end for each in samples)
    ended = sum(each.error is None and begin < each.ended <= end for each in samples)
    least = (1.0 - GROWTH) * came - 1.0
    if begun < least:
        return "no"
    answers = sorted(each.ended - each.arrivals[0] for each in samples if each.arrivals)
    if answers[9 * len(answers) // 10] > end - begin:
        return "too short"
    return "yes" if ended >= least else "no"


def capacity(holds: Callable[[float], bool], guess: float) -> float:
    """The highest rate at which it holds, within CLOSE; 0 where it does not even at a thousandth of ``guess``. Raises
    ConfigError where it always does."""
    low, high = 0.0, guess
    while holds(high):
        if high > MOST_TIMES * guess:
            raise ConfigError(
                f"Even {high:,.0f} requests a second are served within the bounds: too few to queue up; give more --requests."
            )
        low, high = high, high * 2
    while not low:
        if high < guess / 1000:
            return 0.0
        high, low = (high, high / 2) if holds(high / 2) else (high / 2, 0.0)
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
